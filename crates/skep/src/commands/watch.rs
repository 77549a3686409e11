//! `skep watch`: the live page in a terminal, redrawn in place; plain lines elsewhere. It ends with
//! the run.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use console::Term;
use skep_wire::{Event, History, Progress, RunState, RunSummary, TimedEvent, WorkerView};

use crate::cli::runtime;
use crate::commands::logs::clock;
use crate::commands::status::state_name;
use crate::connect::ConnectFlags;
use crate::failure::Failure;
use crate::progress::{duration, thousands};

/// How often a terminal is drawn anew, and how often a line is written elsewhere.
const FRAME_EVERY: Duration = Duration::from_millis(500);
const LINE_EVERY: Duration = Duration::from_secs(2);

/// What to watch.
#[derive(Args, Clone, Debug)]
pub(crate) struct WatchFlags {
    #[command(flatten)]
    connect: ConnectFlags,
    /// The run; where it is left out, the only one that is running
    run: Option<String>,
}

pub(crate) fn watch(flags: &WatchFlags) -> Result<ExitCode, Failure> {
    let client = flags.connect.client()?;
    runtime(1)?.block_on(async {
        let run = match &flags.run {
            Some(run) => run.clone(),
            None => only(&client.runs().await?)?,
        };
        let mut screen = Screen::new();
        loop {
            let progress = client.progress(&run).await?;
            if screen.is_due() || progress.state.is_final() {
                let history = client.history(&run, 120).await?;
                screen.show(&progress, &history);
            }
            if progress.state.is_final() {
                let failed = progress.state == RunState::Failed;
                return Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS });
            }
            tokio::time::sleep(FRAME_EVERY).await;
        }
    })
}

/// The run that is meant where none is named.
fn only(runs: &[RunSummary]) -> Result<String, Failure> {
    let running: Vec<_> = runs.iter().filter(|run| !run.state.is_final()).collect();
    match (runs, running.as_slice()) {
        ([run], _) => Ok(run.name.clone()),
        (_, [run]) => Ok(run.name.clone()),
        ([], _) => {
            Err(Failure::mistake("the hive has no runs").hint("`skep run create mnist` makes one"))
        }
        _ => {
            let names: Vec<_> = runs.iter().map(|run| run.name.as_str()).collect();
            Err(Failure::mistake("there are several runs")
                .hint(format!("name one: skep watch RUN, of {}", names.join(", "))))
        }
    }
}

/// Where it is shown.
struct Screen {
    terminal: Option<Term>,
    drawn: usize,
    last_line: Option<Instant>,
}

impl Screen {
    fn new() -> Self {
        let terminal = std::io::stdout().is_terminal().then(Term::stdout);
        Self { terminal, drawn: 0, last_line: None }
    }

    fn is_due(&self) -> bool {
        self.terminal.is_some() || self.last_line.is_none_or(|last| last.elapsed() >= LINE_EVERY)
    }

    fn show(&mut self, progress: &Progress, history: &History) {
        let Some(terminal) = &self.terminal else {
            self.last_line = Some(Instant::now());
            println!("{}", line(progress));
            return;
        };
        let (height, width) = terminal.size();
        let (height, width) = (usize::from(height).max(8), usize::from(width).max(40));
        let lines = frame(progress, history, width, height - 1);
        // Over what is there, line by line: a screen that is cleared first flickers.
        let mut text = String::new();
        if self.drawn > 0 {
            text.push_str(&format!("\x1b[{}A", self.drawn));
        }
        for line in &lines {
            let line: String = line.chars().take(width - 1).collect();
            text.push_str(&format!("{line}\x1b[K\n"));
        }
        text.push_str("\x1b[J");
        self.drawn = lines.len();
        let _ = terminal.write_str(&text);
    }
}

/// One line for a log.
fn line(progress: &Progress) -> String {
    let mut parts = vec![
        format!("{}: {}", progress.name, state_name(progress.state)),
        place(progress),
        format!("version {}", progress.version),
        format!("{:.1} versions/s", progress.versions_per_second),
        format!("{} samples/s", thousands(progress.rate as u64)),
    ];
    parts.extend(progress.loss.map(|loss| format!("loss {loss:.4}")));
    parts.extend(accuracy(progress));
    let test = progress.test.and_then(|test| test.accuracy);
    parts.extend(test.map(|test| format!("test {:.2} %", test * 100.0)));
    parts.push(format!("{} workers", progress.worker_count));
    parts.extend(left(progress));
    parts.join("  ")
}

/// A whole screen.
fn frame(progress: &Progress, history: &History, width: usize, height: usize) -> Vec<String> {
    let reason = plain(&progress.reason);
    let reason = if reason.is_empty() { reason } else { format!(" ({reason})") };
    let mut lines = vec![format!("{}: {}{reason}", progress.name, state_name(progress.state))];
    let (done, all) = share(progress);
    let bar = 20.max(width / 3);
    let filled = ((done as f64 / all.max(1) as f64).min(1.0) * bar as f64) as usize;
    let mut first = format!(
        "  {}  {}{}  {:.0} %",
        place(progress),
        "█".repeat(filled),
        "░".repeat(bar - filled),
        100.0 * done as f64 / all.max(1) as f64
    );
    if let Some(left) = left(progress) {
        first.push_str(&format!("  {left}"));
    }
    lines.push(first);
    lines.push(format!(
        "  version {} (durable {}), {:.1} a second    {} samples in {}, {} a second",
        progress.version,
        progress.durable,
        progress.versions_per_second,
        thousands(progress.samples),
        duration(progress.seconds),
        thousands(progress.rate as u64)
    ));
    let losses: Vec<f64> = history.points.iter().filter_map(|point| point.loss).collect();
    let now = progress.loss.map_or("-".to_owned(), |loss| format!("{loss:.4}"));
    lines.push(format!("  loss      {now:<8} {}", sparkline(&losses, width.saturating_sub(24))));
    let accuracies: Vec<f64> = history.measured.iter().filter_map(|m| m.accuracy).collect();
    if let Some(now) = accuracy(progress) {
        lines.push(format!("  {now}  {}", sparkline(&accuracies, width.saturating_sub(36))));
    }
    if let Some(test) = progress.test.and_then(|test| test.accuracy) {
        lines.push(format!("  test {:.2} %", test * 100.0));
    }
    lines.push(format!(
        "  used      {} worker-seconds, {:.1} MB in, {:.1} MB out",
        thousands(progress.usage.worker_seconds as u64),
        progress.usage.received_bytes as f64 / 1e6,
        progress.usage.sent_bytes as f64 / 1e6
    ));
    if progress.skipped > 0 {
        lines.push(format!("  skipped   {} positions", thousands(progress.skipped)));
    }
    if let Some(trouble) = &progress.trouble {
        lines.push(format!("  trouble   {}", plain(trouble)));
    }
    let events = progress.events.len().min(6).min(height / 4);
    let rows = height.saturating_sub(lines.len() + events + 4);
    lines.push(String::new());
    lines.extend(workers(progress.workers.as_deref().unwrap_or_default(), rows));
    if events > 0 {
        lines.push(String::new());
        lines.extend(progress.events.iter().rev().take(events).map(event_line));
    }
    lines.truncate(height);
    lines
}

/// The busiest workers, as many as there is room for.
fn workers(workers: &[WorkerView], rows: usize) -> Vec<String> {
    if workers.is_empty() {
        return vec!["  no workers heard of lately".to_owned()];
    }
    let mut sorted: Vec<_> = workers.iter().collect();
    sorted.sort_by(|a, b| b.rate.total_cmp(&a.rate).then_with(|| a.name.cmp(&b.name)));
    let shown = if sorted.len() > rows { rows.saturating_sub(1) } else { sorted.len() };
    let name = |worker: &WorkerView| plain(&worker.name).chars().take(30).collect::<String>();
    let width =
        sorted[..shown].iter().map(|worker| name(worker).chars().count()).max().unwrap_or(0).max(6);
    let mut lines = vec![format!(
        "  {:<width$}  {:>10}  {:>9}  {:>9}  {:>7}  {:>6}",
        "worker", "samples", "samples/s", "staleness", "waiting", "seen"
    )];
    for worker in &sorted[..shown] {
        lines.push(format!(
            "  {:<width$}  {:>10}  {:>9}  {:>9.2}  {:>5.0} %  {:>4.0} s",
            name(worker),
            thousands(worker.samples),
            thousands(worker.rate as u64),
            worker.staleness,
            worker.waiting * 100.0,
            worker.seen_seconds
        ));
    }
    if shown < sorted.len() {
        lines.push(format!("  and {} more", sorted.len() - shown));
    }
    lines
}

fn event_line(event: &TimedEvent) -> String {
    let what = match &event.event {
        Event::Evaluated(measured) => {
            let accuracy =
                measured.accuracy.map_or(String::new(), |a| format!(", {:.2} %", a * 100.0));
            format!("measured {}: loss {:.4}{accuracy}", measured.version, measured.loss)
        }
        Event::Joined { worker } => format!("{worker} joined"),
        Event::Fault { worker, message } if worker.is_empty() => format!("! {message}"),
        Event::Fault { worker, message } => format!("! {worker}: {message}"),
        Event::Checkpoint { version } => format!("checkpoint {version}"),
        Event::State { state, reason } if reason.is_empty() => state_name(*state),
        Event::State { state, reason } => format!("{}: {reason}", state_name(*state)),
        _ => String::new(),
    };
    format!("  {}  {}", clock(event.time), plain(&what))
}

fn place(progress: &Progress) -> String {
    match (progress.epochs, progress.steps) {
        (Some(epochs), _) => format!("epoch {}/{epochs}", (progress.epoch + 1).min(epochs)),
        (_, Some(steps)) => format!("step {}/{steps}", progress.version.number),
        _ => format!("epoch {}", progress.epoch + 1),
    }
}

fn share(progress: &Progress) -> (u64, u64) {
    match (progress.epochs, progress.steps) {
        (Some(epochs), _) => (
            progress.epoch * progress.epoch_positions + progress.epoch_applied,
            epochs * progress.epoch_positions,
        ),
        (_, Some(steps)) => (progress.version.number, steps),
        _ => (progress.epoch_applied, progress.epoch_positions),
    }
}

fn left(progress: &Progress) -> Option<String> {
    let left = progress.seconds_left.filter(|left| *left > 0.0 && !progress.state.is_final());
    left.map(|left| format!("{} left", duration(left)))
}

fn accuracy(progress: &Progress) -> Option<String> {
    let now = progress.validation?.accuracy? * 100.0;
    let best = progress.best?.accuracy? * 100.0;
    Some(format!("validation {now:.2} % (best {best:.2} %)"))
}

/// Numbers as a line of bars, the newest last.
fn sparkline(numbers: &[f64], width: usize) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    if numbers.is_empty() || width == 0 {
        return String::new();
    }
    // As many as fit, each the mean of its neighbours.
    let each = numbers.len().div_ceil(width);
    let means: Vec<f64> =
        numbers.chunks(each).map(|chunk| chunk.iter().sum::<f64>() / chunk.len() as f64).collect();
    let low = means.iter().copied().fold(f64::INFINITY, f64::min);
    let high = means.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let span = if high > low { high - low } else { 1.0 };
    means.iter().map(|mean| BARS[(((mean - low) / span * 7.0).round() as usize).min(7)]).collect()
}

/// Without what a terminal would take for a command: names and messages come from workers.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_wire::{Usage, Version};

    fn progress(workers: usize) -> Progress {
        let worker = |at: usize| WorkerView {
            name: format!("bee-{at}\x1b[2J"),
            engine: String::new(),
            seen_seconds: 0.1,
            contributions: 1,
            samples: 10,
            rate: at as f64,
            staleness: 0.5,
            waiting: 0.1,
        };
        Progress {
            time: 0,
            name: "mnist".to_owned(),
            state: RunState::Running,
            reason: String::new(),
            version: Version::new(1, 5),
            durable: Version::new(1, 4),
            epoch: 1,
            epoch_applied: 50,
            epoch_positions: 100,
            epochs: Some(3),
            steps: None,
            samples: 150,
            loss: Some(0.5),
            rate: 1000.0,
            versions_per_second: 2.5,
            seconds: 3.0,
            seconds_left: Some(61.0),
            validation: None,
            best: None,
            test: None,
            skipped: 0,
            model: None,
            trouble: None,
            usage: Usage::default(),
            worker_count: workers,
            workers: Some((0..workers).map(worker).collect()),
            points: vec![],
            measured: vec![],
            events: vec![TimedEvent {
                id: 1,
                time: 0,
                event: Event::Joined { worker: "bee\n".to_owned() },
            }],
        }
    }

    #[test]
    fn a_frame_fits_the_terminal_and_takes_no_commands_from_workers() {
        for height in [8, 24, 60] {
            let lines = frame(&progress(500), &History::default(), 80, height);
            assert!(lines.len() <= height, "{} of {height}", lines.len());
            assert!(lines.iter().all(|line| !line.chars().any(char::is_control)), "{lines:?}");
        }
        let lines = frame(&progress(500), &History::default(), 80, 40).join("\n");
        for part in ["mnist: running", "epoch 2/3", "50 %", "1 min 1 s left", "bee-499", "more"] {
            assert!(lines.contains(part), "no `{part}` in\n{lines}");
        }
    }

    #[test]
    fn a_sparkline_goes_from_low_to_high() {
        assert_eq!(sparkline(&[0.0, 1.0, 2.0, 7.0], 10), "▁▂▃█");
        assert_eq!(sparkline(&[1.0, 1.0], 10), "▁▁");
        assert_eq!(sparkline(&[0.0, 0.0, 7.0, 7.0], 2), "▁█");
        assert_eq!(sparkline(&[], 10), "");
    }
}
