//! Times one step of a worker (parameters in, forward, backward, gradient out) and, where
//! `/usr/bin/python3` has PyTorch, the same step there, in turns, on one thread each.
//!
//! `cargo run --release -p skep-learn --example step -- [BATCH] [ROUNDS] [MODEL]`, where the model is
//! lenet5, text-average or text-bigru.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use skep_data::{Column, Table};
use skep_learn::Compute;
use skep_wire::{Dtype, Encoding, Frame, Layout};

/// Words of 100 reviews of the Large Movie Review Dataset's training set, chosen by chance.
const REVIEWS: [usize; 100] = [
    218, 208, 744, 132, 571, 266, 166, 144, 714, 364, 196, 220, 81, 128, 298, 325, 502, 263, 189,
    202, 315, 129, 141, 145, 58, 248, 122, 249, 133, 247, 871, 967, 137, 182, 547, 294, 482, 516,
    121, 149, 407, 849, 685, 142, 184, 248, 135, 245, 63, 273, 108, 137, 238, 289, 203, 204, 111,
    182, 159, 56, 699, 213, 397, 298, 237, 399, 139, 51, 401, 53, 151, 125, 147, 769, 261, 109,
    138, 266, 85, 144, 179, 172, 80, 119, 257, 101, 92, 241, 117, 124, 254, 297, 326, 138, 177,
    173, 327, 183, 544, 30,
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let start = Instant::now();
    let mut arguments = std::env::args().skip(1);
    let batch: usize = arguments.next().map_or(Ok(32), |text| text.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(10), |text| text.parse())?;
    let model = arguments.next().unwrap_or_else(|| "lenet5".to_owned());

    let task = skep_learn::tasks().into_iter().find(|task| task.name() == model);
    let task = task.ok_or_else(|| format!("there is no model {model}"))?;
    // How many words of a review count, and how many steps make a measurement.
    let (length, steps) = match model.as_str() {
        "text-average" => (400, 100),
        "text-bigru" => (256, 5),
        _ => (0, 100),
    };
    let lengths: Vec<usize> =
        REVIEWS.iter().cycle().take(batch).map(|words| (*words).min(length)).collect();
    let mut compute = task.compute(&task.defaults())?;
    let parameters = compute.initial(0)?;
    let layout = Arc::new(Layout::of_gradient(compute.schema(), Encoding::F32)?);
    let mut gradient = Frame::zeros(layout);
    let table = if length > 0 { reviews(&lengths)? } else { digits(batch)? };
    compute.load(&parameters)?;
    let loss = compute.gradient(&table, 0, &mut gradient)?;
    let first = start.elapsed().as_secs_f64() * 1e3;
    println!("first step      {first:.1} ms after main, loss {loss:.4}");

    let mut torch = Torch::start(&model, &lengths, steps).ok();
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    for _ in 0..rounds {
        ours.push(measure(compute.as_mut(), &parameters, &table, &mut gradient, steps)?);
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
    for _ in 0..steps {
        compute.evaluate(&table)?;
    }
    let after = resident("VmHWM")?;
    println!("peak memory     {before:.1} MiB, {after:.1} after {steps} evaluations");
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

/// Texts of these lengths, frequent words more often than rare ones.
fn reviews(lengths: &[usize]) -> Result<Table, skep_data::DataError> {
    let widest = lengths.iter().copied().max().unwrap_or(1);
    let word = |at: usize| {
        let share = (at * 2_654_435_761 % (1 << 20)) as f64 / f64::from(1 << 20);
        (1.0 + 19_998f64.powf(share)) as u16
    };
    let row = |(row, &length): (usize, &usize)| {
        (0..widest).map(move |at| if at < length { word(row * widest + at) } else { 0 })
    };
    let tokens = lengths.iter().enumerate().flat_map(row).flat_map(u16::to_le_bytes).collect();
    Table::new(vec![
        Column { name: "tokens".to_owned(), dtype: Dtype::U16, shape: vec![widest], bytes: tokens },
        Column {
            name: "label".to_owned(),
            dtype: Dtype::U8,
            shape: Vec::new(),
            bytes: (0..lengths.len()).map(|row| (row % 2) as u8).collect(),
        },
    ])
}

/// Minimum and median of the CPU milliseconds of a step.
fn measure(
    compute: &mut dyn Compute,
    parameters: &Frame,
    table: &Table,
    gradient: &mut Frame,
    steps: usize,
) -> Result<[f64; 2], skep_learn::LearnError> {
    let mut times = Vec::with_capacity(steps);
    for step in 0..steps {
        let start = cpu_milliseconds();
        compute.load(parameters)?;
        compute.gradient(table, step as u64, gradient)?;
        times.push(cpu_milliseconds() - start);
    }
    times.sort_by(f64::total_cmp);
    Ok([times[0], times[steps / 2]])
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
    steps: usize,
}

impl Torch {
    fn start(
        model: &str,
        lengths: &[usize],
        steps: usize,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/step_torch.py");
        let mut process = Command::new("/usr/bin/python3")
            .args([script, model])
            .args(lengths.iter().map(usize::to_string))
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
        Ok(Self { process, answers, version, steps })
    }

    fn measure(&mut self) -> Result<[f64; 2], Box<dyn std::error::Error>> {
        writeln!(self.process.stdin.as_mut().ok_or("no input")?, "{}", self.steps)?;
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
