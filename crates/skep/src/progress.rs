//! What a person sees of a run: a bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use skep_wire::{RunState, RunView};

/// Shows a run's progress on stderr.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    last_line: Option<Instant>,
}

/// How often a plain line is written.
const LINE_EVERY: Duration = Duration::from_secs(2);

impl Progress {
    pub(crate) fn new() -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = terminal.then(|| {
            let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr_with_hz(8));
            let style = ProgressStyle::with_template("{prefix} {wide_bar:.yellow/238} {msg}");
            if let Ok(style) = style {
                bar.set_style(style.progress_chars("⬢⬡ "));
            }
            bar
        });
        Self { bar, last_line: None }
    }

    /// Shows where the run is.
    pub(crate) fn show(&mut self, view: &RunView) {
        match &self.bar {
            Some(bar) => {
                let (done, all) = share(view);
                bar.set_length(all);
                bar.set_position(done);
                bar.set_prefix(place(view));
                bar.set_message(figures(view));
            }
            None => {
                if self.last_line.is_some_and(|last| last.elapsed() < LINE_EVERY) {
                    return;
                }
                self.last_line = Some(Instant::now());
                eprintln!("{}  {}", place(view), figures(view));
            }
        }
    }

    /// Clears the bar.
    pub(crate) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn share(view: &RunView) -> (u64, u64) {
    match (view.epochs, view.steps) {
        (Some(epochs), _) => {
            (view.epoch * view.epoch_positions + view.epoch_applied, epochs * view.epoch_positions)
        }
        (_, Some(steps)) => (view.version.number, steps),
        _ => (view.epoch_applied, view.epoch_positions),
    }
}

fn place(view: &RunView) -> String {
    if view.state == RunState::Running && training_is_over(view) {
        return "testing".to_owned();
    }
    match (view.epochs, view.steps) {
        (Some(epochs), _) => format!("epoch {}/{epochs}", (view.epoch + 1).min(epochs)),
        (_, Some(steps)) => format!("step {}/{steps}", view.version.number),
        _ => format!("epoch {}", view.epoch + 1),
    }
}

fn training_is_over(view: &RunView) -> bool {
    let (done, all) = share(view);
    (view.epochs.is_some() || view.steps.is_some()) && done >= all
}

fn figures(view: &RunView) -> String {
    let mut parts = vec![format!("{} samples/s", thousands(view.rate as u64))];
    if let Some(loss) = view.loss {
        parts.push(format!("loss {loss:.4}"));
    }
    if let Some(accuracy) = view.validation.and_then(|measured| measured.accuracy) {
        parts.push(format!("validation {:.2} %", accuracy * 100.0));
    }
    parts.push(format!("version {}", view.version));
    let workers = view.workers.iter().filter(|worker| worker.seen_seconds < 10.0).count();
    parts.push(format!("{workers} worker{}", if workers == 1 { "" } else { "s" }));
    if let Some(left) = view.seconds_left.filter(|_| !training_is_over(view)) {
        parts.push(format!("{} left", duration(left)));
    }
    if let Some(trouble) = &view.trouble {
        parts.push(format!("checkpoint: {trouble}"));
    }
    parts.join("  ")
}

/// A bar for work whose amount is known, on a terminal; nothing elsewhere.
pub(crate) fn bar(what: &str, amount: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(amount), ProgressDrawTarget::stderr_with_hz(8));
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar:.yellow/238} {pos}/{len}") {
        bar.set_style(style.progress_chars("⬢⬡ "));
    }
    bar.set_message(what.to_owned());
    bar
}

/// A sign of life for work whose amount is not known, on a terminal; nothing elsewhere.
pub(crate) fn spinner(what: &str) -> ProgressBar {
    let spinner = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(8));
    spinner.set_message(what.to_owned());
    spinner.enable_steady_tick(Duration::from_millis(125));
    spinner
}

/// 12345 as `12,345`.
pub(crate) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// 4000 seconds as `1 h 7 min`.
pub(crate) fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{whole} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_for_people() {
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(duration(59.4), "59 s");
        assert_eq!(duration(61.0), "1 min 1 s");
        assert_eq!(duration(4000.0), "1 h 6 min");
    }
}
