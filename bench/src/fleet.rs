//! Samples per second: two workers against one, and against the best single PyTorch process.
//!
//! `batch` shows what the exchange itself costs; `sync`, the default, also pays for its barrier.

use std::process::{Command, Stdio};

use crate::Failure;
use crate::process::program;
use crate::rows::{Row, Target, median};
use crate::torch::python;

const ROUNDS: usize = 3;

pub(crate) fn measure() -> Result<Vec<Row>, Failure> {
    let python = python();
    let (mut ones, mut twos, mut peers) = (vec![], vec![], vec![]);
    let (mut sync_ones, mut sync_twos) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        ones.push(samples_per_second(1, "batch:2")?);
        twos.push(samples_per_second(2, "batch:2")?);
        sync_ones.push(samples_per_second(1, "sync:2")?);
        sync_twos.push(samples_per_second(2, "sync:2")?);
        if let Some(python) = python {
            peers.push(torch_samples_per_second(python)?);
        }
    }
    let (one, two) = (median(&mut ones), median(&mut twos));
    let (sync_one, sync_two) = (median(&mut sync_ones), median(&mut sync_twos));
    let text = |rate: f64| format!("{rate:.0} samples/s");
    let mut rows = vec![
        Row::new(
            "2 workers against 1 (LeNet-5, batch 32, policy batch:2)",
            text(two),
            format!("1 worker {}", text(one)),
            two / one,
            Target::AtLeast(1.7),
        ),
        Row::new(
            "the same with policy sync:2, the default",
            text(sync_two),
            format!("1 worker {}", text(sync_one)),
            sync_two / sync_one,
            Target::None,
        ),
    ];
    let what = "2 workers against one PyTorch process on both cores";
    rows.push(if peers.is_empty() {
        Row::skipped(what, "no PyTorch here")
    } else {
        let peer = median(&mut peers);
        let peer_text = format!("PyTorch {}", text(peer));
        Row::new(what, text(sync_two), peer_text, sync_two / peer, Target::AtLeast(1.2))
    });
    Ok(rows)
}

/// `skep train mnist` as a user runs it.
fn samples_per_second(workers: usize, policy: &str) -> Result<f64, Failure> {
    let folder = tempfile::tempdir()?;
    let output = Command::new(program("skep")?)
        .args(["train", "mnist", "--json", "--epochs", "10", "--policy", policy])
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
