//! `skep status`: a hive's runs and workers at a glance.

use std::process::ExitCode;

use clap::Args;
use skep_wire::{RunState, RunSummary, RunView};

use crate::cli::runtime;
use crate::connect::ConnectFlags;
use crate::failure::Failure;
use crate::progress::{duration, thousands};

/// What to show.
#[derive(Args, Clone, Debug)]
pub(crate) struct StatusFlags {
    #[command(flatten)]
    connect: ConnectFlags,
    /// As JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn status(flags: &StatusFlags) -> Result<ExitCode, Failure> {
    let client = flags.connect.client()?;
    runtime(1)?.block_on(async {
        let mut views = Vec::new();
        for run in client.runs().await? {
            views.push(client.run(&run.name).await?);
        }
        if flags.json {
            println!("{}", serde_json::to_string(&views).unwrap_or_default());
            return Ok(ExitCode::SUCCESS);
        }
        if views.is_empty() {
            println!("no runs; `skep run create mnist` makes one");
        }
        for view in &views {
            print_run(view);
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn print_run(view: &RunView) {
    let state = state_name(view.state);
    let reason = if view.reason.is_empty() { String::new() } else { format!(" ({})", view.reason) };
    println!("{}: {state}{reason}", view.name);
    let epochs = view.epochs.map_or(String::new(), |epochs| format!("/{epochs}"));
    let within = 100.0 * view.epoch_applied as f64 / view.epoch_positions.max(1) as f64;
    println!("  version     {} (durable: {})", view.version, view.durable);
    println!("  epoch       {}{epochs}, {within:.0} % of it applied", view.epoch + 1);
    let left = view.seconds_left.map_or(String::new(), |left| format!(", {} left", duration(left)));
    println!(
        "  samples     {} in {}, now {} a second{left}",
        thousands(view.samples),
        duration(view.seconds),
        thousands(view.rate as u64)
    );
    if let Some(loss) = view.loss {
        println!("  loss        {loss:.4}");
    }
    for (name, measured) in
        [("validation", view.validation), ("best", view.best), ("test", view.test)]
    {
        if let Some(measured) = measured {
            let accuracy =
                measured.accuracy.map_or(String::new(), |a| format!("{:.2} %, ", a * 100.0));
            println!(
                "  {name:<11} {accuracy}loss {:.4} at version {}",
                measured.loss, measured.version
            );
        }
    }
    let skipped: u64 = view.skipped.iter().map(|gap| gap.count).sum();
    if skipped > 0 {
        println!("  skipped     {skipped} positions in {} places", view.skipped.len());
    }
    if let Some(trouble) = &view.trouble {
        println!("  trouble     {trouble}");
    }
    if let Some(model) = &view.model {
        println!("  model       {model}");
    }
    if view.workers.is_empty() {
        println!("  no workers heard of lately");
        return;
    }
    let width = view.workers.iter().map(|worker| worker.name.len()).max().unwrap_or(0).max(6);
    println!(
        "  {:<width$}  {:>10}  {:>9}  {:>9}  {:>7}  {:>6}",
        "worker", "samples", "samples/s", "staleness", "waiting", "seen"
    );
    for worker in &view.workers {
        println!(
            "  {:<width$}  {:>10}  {:>9}  {:>9.2}  {:>5.0} %  {:>4.0} s",
            worker.name,
            thousands(worker.samples),
            thousands(worker.rate as u64),
            worker.staleness,
            worker.waiting * 100.0,
            worker.seen_seconds
        );
    }
}

/// A state as it is written everywhere: `done_with_gaps`.
pub(crate) fn state_name(state: RunState) -> String {
    let name = serde_json::to_value(state).unwrap_or_default();
    name.as_str().unwrap_or_default().to_owned()
}

/// Runs, one a line.
pub(crate) fn print_runs(runs: &[RunSummary]) {
    let width = runs.iter().map(|run| run.name.len()).max().unwrap_or(0).max(3);
    println!(
        "{:<width$}  {:<14}  {:>10}  {:>5}  {:>12}  {:>8}  {:>10}  {:>7}",
        "run", "state", "version", "epoch", "samples", "loss", "accuracy", "workers"
    );
    for run in runs {
        println!(
            "{:<width$}  {:<14}  {:>10}  {:>5}  {:>12}  {:>8}  {:>10}  {:>7}",
            run.name,
            state_name(run.state),
            run.version.to_string(),
            run.epoch + 1,
            thousands(run.samples),
            run.loss.map_or("-".to_owned(), |loss| format!("{loss:.4}")),
            run.accuracy.map_or("-".to_owned(), |a| format!("{:.2} %", a * 100.0)),
            run.workers
        );
    }
}
