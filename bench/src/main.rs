//! Side-by-side benchmarks: each row runs Skep and a peer or a physical limit in turns, in one
//! run, and prints their ratio. Absolute numbers depend on the machine; ratios much less.

mod ask;
mod fleet;
mod inference;
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
    // Load comes from processes of their own, so that they share nothing with what is measured.
    let generator = match arguments.first().map(String::as_str) {
        Some("load") if arguments.len() == 3 => Some(load::generate as fn(&[String]) -> _),
        Some("ask") => Some(ask::generate as _),
        _ => None,
    };
    if let Some(generate) = generator {
        return match generate(&arguments[1..]) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let benchmarks: [(&str, Benchmark); 7] = [
        ("network", network::measure),
        ("step", torch::measure_step),
        ("text", torch::measure_text),
        ("worker", process::measure),
        ("scaling", fleet::measure),
        ("load", load::measure),
        ("inference", inference::measure),
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
