//! Times one step of a worker on LeNet-5 (parameters in, forward, backward, gradient out) and,
//! where `/usr/bin/python3` has PyTorch, the same step there, in turns, on one thread each.
//!
//! `cargo run --release -p skep-learn --example step -- [BATCH] [ROUNDS]`

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use skep_data::{Column, Table};
use skep_learn::Compute;
use skep_wire::{Dtype, Encoding, Frame, Layout};

const STEPS: usize = 100;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let start = Instant::now();
    let mut arguments = std::env::args().skip(1);
    let batch: usize = arguments.next().map_or(Ok(32), |text| text.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(10), |text| text.parse())?;

    let task = skep_learn::tasks().into_iter().next().ok_or("no task")?;
    let mut compute = task.compute(&task.defaults())?;
    let parameters = compute.initial(0)?;
    let layout = Arc::new(Layout::of_gradient(compute.schema(), Encoding::F32)?);
    let mut gradient = Frame::zeros(layout);
    let table = digits(batch)?;
    compute.load(&parameters)?;
    let loss = compute.gradient(&table, 0, &mut gradient)?;
    let first = start.elapsed().as_secs_f64() * 1e3;
    println!("first step      {first:.1} ms after main, loss {loss:.4}");

    let mut torch = Torch::start(batch).ok();
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    for _ in 0..rounds {
        ours.push(measure(compute.as_mut(), &parameters, &table, &mut gradient)?);
        if let Some(torch) = &mut torch {
            theirs.push(torch.measure()?);
        }
    }
    let best = |times: &[[f64; 2]], at: usize| {
        times.iter().map(|time| time[at]).fold(f64::INFINITY, f64::min)
    };
    println!("skep            {:.3} ms minimum, {:.3} median", best(&ours, 0), best(&ours, 1));
    if let Some(torch) = torch {
        println!(
            "torch {:<9} {:.3} ms minimum, {:.3} median",
            torch.version,
            best(&theirs, 0),
            best(&theirs, 1)
        );
        println!(
            "ratio           {:.3} minimum, {:.3} median",
            best(&ours, 0) / best(&theirs, 0),
            best(&ours, 1) / best(&theirs, 1)
        );
    }
    let before = resident("VmHWM")?;
    for _ in 0..100 {
        compute.evaluate(&table)?;
    }
    println!("peak memory     {:.1} MiB, {:.1} after 100 evaluations", before, resident("VmHWM")?);
    Ok(())
}

fn digits(rows: usize) -> Result<Table, skep_data::DataError> {
    let pixel = |at: usize| (at * 2_654_435_761 % 256) as u8;
    Table::new(vec![
        Column {
            name: "image".to_owned(),
            dtype: Dtype::U8,
            shape: vec![28, 28],
            bytes: (0..rows * 784).map(pixel).collect(),
        },
        Column {
            name: "label".to_owned(),
            dtype: Dtype::U8,
            shape: Vec::new(),
            bytes: (0..rows).map(|row| (row % 10) as u8).collect(),
        },
    ])
}

/// Minimum and median of the CPU milliseconds of a step.
fn measure(
    compute: &mut dyn Compute,
    parameters: &Frame,
    table: &Table,
    gradient: &mut Frame,
) -> Result<[f64; 2], skep_learn::LearnError> {
    let mut times = Vec::with_capacity(STEPS);
    for step in 0..STEPS {
        let start = cpu_milliseconds();
        compute.load(parameters)?;
        compute.gradient(table, step as u64, gradient)?;
        times.push(cpu_milliseconds() - start);
    }
    times.sort_by(f64::total_cmp);
    Ok([times[0], times[STEPS / 2]])
}

fn cpu_milliseconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid and the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

fn resident(field: &str) -> Result<f64, Box<dyn std::error::Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with(field)).ok_or("no such line")?;
    let kibibytes: f64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kibibytes / 1024.0)
}

/// `step_torch.py`, waiting for its turn.
struct Torch {
    process: Child,
    answers: BufReader<std::process::ChildStdout>,
    version: String,
}

impl Torch {
    fn start(batch: usize) -> Result<Self, Box<dyn std::error::Error>> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/step_torch.py");
        let mut process = Command::new("/usr/bin/python3")
            .args([script, &batch.to_string()])
            .env("OMP_NUM_THREADS", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut answers = BufReader::new(process.stdout.take().ok_or("no output")?);
        let mut version = String::new();
        if answers.read_line(&mut version)? == 0 {
            process.wait()?;
            return Err("no PyTorch".into());
        }
        let version = version.trim().to_owned();
        Ok(Self { process, answers, version })
    }

    fn measure(&mut self) -> Result<[f64; 2], Box<dyn std::error::Error>> {
        writeln!(self.process.stdin.as_mut().ok_or("no input")?, "{STEPS}")?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        let mut times = answer.split_whitespace().map(str::parse::<f64>);
        match (times.next(), times.next()) {
            (Some(minimum), Some(median)) => Ok([minimum?, median?]),
            _ => Err("PyTorch stopped".into()),
        }
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        // Closing its input ends it.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}
