//! PyTorch beside Skep, where it is installed.

use std::process::{Command, Stdio};

use crate::Failure;
use crate::process::program;
use crate::rows::{Row, Target};

/// The Python that has torch, if one does.
pub(crate) fn python() -> Option<&'static str> {
    ["/usr/bin/python3", "python3"].into_iter().find(|python| {
        Command::new(python)
            .args(["-c", "import torch"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    })
}

/// One LeNet-5 step, batch 32.
pub(crate) fn measure_step() -> Result<Vec<Row>, Failure> {
    let what = "LeNet-5 step, batch 32, one thread";
    Ok(vec![step(what, ["32", "10", "lenet5"], Target::AtMost(1.3))?])
}

/// One step of each model of texts on 100 reviews of the lengths that reviews have.
pub(crate) fn measure_text() -> Result<Vec<Row>, Failure> {
    let rows = ["text-average", "text-bigru"].map(|model| {
        let what = format!("{model} step, 100 reviews, one thread");
        step(&what, ["100", "10", model], Target::AtMost(0.5))
    });
    rows.into_iter().collect()
}

/// A step here and in PyTorch, one thread each, in turns: batch, rounds, model.
fn step(what: &str, arguments: [&str; 3], target: Target) -> Result<Row, Failure> {
    if python().is_none() {
        return Ok(Row::skipped(what, "no PyTorch here"));
    }
    let output = Command::new(program("examples/step")?).args(arguments).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let minimum = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().find_map(|word| word.parse::<f64>().ok())
    };
    let (ours, ratio) = minimum("skep").zip(minimum("ratio")).ok_or("no result of the step")?;
    let (ours, theirs) = (format!("{ours:.2} ms"), format!("PyTorch {:.2} ms", ours / ratio));
    Ok(Row::new(what, ours, theirs, ratio, target))
}
