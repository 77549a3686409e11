//! Side-by-side benchmarks: each row runs Skep and a peer or a physical limit in turns, in one
//! run, and prints their ratio. Absolute numbers depend on the machine; ratios much less.

mod fleet;
mod load;
mod network;
mod process;
mod rows;
mod torch;

use std::process::ExitCode;

use rows::Row;

/// What a benchmark can fail with.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What measures some rows.
type Benchmark = fn() -> Result<Vec<Row>, Failure>;

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "load") {
        // The load generator is a process of its own, so that it shares nothing with the hive.
        return match load::generate(&arguments[1..]) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let benchmarks: [(&str, Benchmark); 6] = [
        ("network", network::measure),
        ("step", torch::measure_step),
        ("text", torch::measure_text),
        ("worker", process::measure),
        ("scaling", fleet::measure),
        ("load", load::measure),
    ];
    if arguments.is_empty() {
        arguments = benchmarks.iter().map(|(name, _)| (*name).to_owned()).collect();
    }
    let mut rows = Vec::new();
    for (name, measure) in benchmarks {
        if !arguments.iter().any(|wanted| wanted == name) {
            continue;
        }
        eprintln!("measuring: {name}");
        match measure() {
            Ok(more) => rows.extend(more),
            Err(error) => rows.push(Row::failed(name, &error.to_string())),
        }
    }
    rows::print(&rows);
    if rows.iter().any(Row::is_missed) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
