//! Samples per second: two workers against one, and against the best single PyTorch process.
//!
//! Small contributions show what the exchange itself costs; `sync`, the default, also pays for its
//! barrier.

use std::process::{Command, Stdio};

use crate::Failure;
use crate::process::program;
use crate::rows::{Row, Target, median};
use crate::torch::python;

const ROUNDS: usize = 3;

pub(crate) fn measure() -> Result<Vec<Row>, Failure> {
    let python = python();
    // Eight batches to a contribution, as the first system of this kind had it; then one.
    let settings = [["batch:2", "8"], ["batch:2", "1"], ["sync:2", "1"]];
    let mut rates: [[Vec<f64>; 2]; 3] = Default::default();
    let mut peers = Vec::new();
    for _ in 0..ROUNDS {
        for (setting, rates) in settings.iter().zip(&mut rates) {
            for (workers, rates) in [1, 2].into_iter().zip(rates) {
                rates.push(samples_per_second(workers, *setting)?);
            }
        }
        if let Some(python) = python {
            peers.push(torch_samples_per_second(python)?);
        }
    }
    let text = |rate: f64| format!("{rate:.0} samples/s");
    let targets = [Target::AtLeast(1.7), Target::AtLeast(1.7), Target::None];
    let mut rows = Vec::new();
    let mut default_rate = 0.0;
    for (([policy, every], rates), target) in settings.iter().zip(&mut rates).zip(targets) {
        let [one, two] = rates.each_mut().map(|rates| median(rates));
        let what = format!("2 workers against 1: batch 32, every {every}, policy {policy}");
        let peer = format!("1 worker {}", text(one));
        rows.push(Row::new(&what, text(two), peer, two / one, target));
        default_rate = two;
    }
    let what = "2 workers (the default, sync:2) against one PyTorch process on both cores";
    rows.push(if peers.is_empty() {
        Row::skipped(what, "no PyTorch here")
    } else {
        let peer = median(&mut peers);
        let peer_text = format!("PyTorch {}", text(peer));
        let ratio = default_rate / peer;
        Row::new(what, text(default_rate), peer_text, ratio, Target::AtLeast(1.2))
    });
    Ok(rows)
}

/// `skep train mnist` as a user runs it.
fn samples_per_second(workers: usize, [policy, every]: [&str; 2]) -> Result<f64, Failure> {
    let folder = tempfile::tempdir()?;
    let output = Command::new(program("skep")?)
        .args(["train", "mnist", "--json", "--epochs", "10", "--policy", policy, "--every", every])
        .args(["--workers", &workers.to_string()])
        .arg("--store")
        .arg(folder.path())
        .stderr(Stdio::null())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let result: serde_json::Value = serde_json::from_str(text.lines().last().unwrap_or_default())?;
    let number = |name: &str| result[name].as_f64().ok_or("no number in the result");
    Ok(number("samples")? / number("seconds")?)
}

/// The better of one and two threads.
fn torch_samples_per_second(python: &str) -> Result<f64, Failure> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/train_torch.py");
    let output = Command::new(python).arg(script).stderr(Stdio::null()).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().parse()?)
}
