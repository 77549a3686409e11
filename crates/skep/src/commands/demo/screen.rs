//! What one sees of the demonstration: a screen that is drawn in place on a terminal, lines
//! elsewhere.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use console::{Style, Term};
use skep_deploy::local::Running;
use skep_wire::{Measurement, Split};

use super::cast::Cast;
use super::fire::{Kill, Victim};
use super::plot::Plot;
use super::probe::{Probe, Tally};
use super::proof::{Balance, Timetable, measurements};
use super::sight::Seen;
use super::{CALM_SHARE, ChaosFlags, MEASURE_EVERY};
use crate::progress::thousands;

/// How often a terminal is drawn anew, and how often a line is written elsewhere.
const FRAME_EVERY: Duration = Duration::from_millis(150);
const LINE_EVERY: Duration = Duration::from_secs(2);
/// For how long one sees that somebody was killed.
const WOUND: f64 = 0.6;

/// Everything there is to show.
pub(super) struct Scene {
    pub(super) began: Instant,
    pub(super) calm_seconds: f64,
    /// The last version, once it is known.
    pub(super) versions: Option<u64>,
    pub(super) timetable: Option<Timetable>,
    pub(super) calm: Vec<Measurement>,
    pub(super) chaos: Vec<Measurement>,
    pub(super) kills: Vec<Kill>,
    /// The worst that was seen while it ran.
    pub(super) balance: Balance,
    pub(super) worker_count: usize,
    pub(super) memory_limit: u64,
    /// The most memory of its own that a worker was seen with.
    pub(super) memory_peak: Option<u64>,
    /// Samples that the run in peace will come to, most likely.
    reach: u64,
    seen: Seen,
    tally: Tally,
    page_url: String,
    kills_per_second: f64,
}

impl Scene {
    pub(super) fn new(flags: &ChaosFlags, cast: &Cast) -> Self {
        Self {
            began: Instant::now(),
            calm_seconds: flags.seconds * CALM_SHARE,
            versions: None,
            timetable: None,
            calm: Vec::new(),
            chaos: Vec::new(),
            kills: Vec::new(),
            balance: Balance::default(),
            worker_count: flags.workers,
            memory_limit: flags.memory << 20,
            memory_peak: None,
            reach: 1,
            seen: Seen::default(),
            tally: Tally::default(),
            page_url: cast.page_url(),
            kills_per_second: flags.kills_per_second,
        }
    }

    /// `share` of the time of the run in peace is over.
    pub(super) fn see_calm(&mut self, seen: &Seen, share: f64) {
        self.reach = (seen.samples() as f64 / share.clamp(0.05, 1.0)) as u64;
        self.calm.clone_from(&seen.measured);
        self.look(seen);
    }

    pub(super) fn see_chaos(&mut self, seen: &Seen, probe: &Probe) {
        if let (Some(timetable), Some(versions)) = (&self.timetable, self.versions) {
            self.reach = timetable.samples(versions);
        }
        self.chaos.clone_from(&seen.measured);
        self.tally = probe.tally();
        self.look(seen);
    }

    /// Every version that is seen is counted.
    fn look(&mut self, seen: &Seen) {
        if seen.looks > 0
            && let Some(timetable) = &self.timetable
        {
            self.balance = self.balance.worst(timetable.compare(seen.version(), seen.samples()));
        }
        self.seen = seen.clone();
    }

    pub(super) fn hive_kills(&self) -> usize {
        self.kills.iter().filter(|kill| kill.victim == Victim::Hive).count()
    }

    /// Accuracy on the validation split against samples, in stretches: where a measurement is
    /// missing, because it was under way when the hive was killed, there is a gap.
    pub(super) fn curve(measured: &[Measurement]) -> Vec<Vec<(u64, f64)>> {
        let mut stretches: Vec<Vec<(u64, f64)>> = Vec::new();
        let mut next = 0;
        for it in measured.iter().filter(|it| it.split == Split::Validation) {
            let Some(accuracy) = it.accuracy else { continue };
            match stretches.last_mut() {
                Some(stretch) if it.version.number <= next => stretch.push((it.samples, accuracy)),
                _ => stretches.push(vec![(it.samples, accuracy)]),
            }
            next = it.version.number + MEASURE_EVERY;
        }
        stretches
    }

    /// The accuracy that was measured last.
    fn latest(measured: &[Measurement]) -> Option<f64> {
        Self::curve(measured).last()?.last().map(|(_, accuracy)| *accuracy)
    }

    /// Samples at the right end of the picture.
    pub(super) fn reach(&self) -> u64 {
        self.reach.max(1)
    }

    fn is_chaos(&self) -> bool {
        self.versions.is_some()
    }

    fn note_memory(&mut self, workers: &Running) {
        let sizes = workers.process_ids().into_iter().filter_map(own_memory);
        self.memory_peak = sizes.max().max(self.memory_peak);
    }
}

/// Bytes of private memory that a process can write: what its limit is on.
fn own_memory(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// Where it is shown.
pub(super) struct Screen {
    terminal: Option<Term>,
    drawn: usize,
    last: Option<Instant>,
}

/// A line in pieces, each with its colour.
type Line = Vec<(Style, String)>;

impl Screen {
    pub(super) fn new() -> Self {
        let terminal = std::io::stderr().is_terminal().then(Term::stderr);
        Self { terminal, drawn: 0, last: None }
    }

    /// Shows the scene if it is time.
    pub(super) fn show(&mut self, scene: &mut Scene, workers: Option<&Running>) {
        let every = if self.terminal.is_some() { FRAME_EVERY } else { LINE_EVERY };
        // The last scene, without workers, is shown in any case.
        if workers.is_some() && self.last.is_some_and(|last| last.elapsed() < every) {
            return;
        }
        self.last = Some(Instant::now());
        if let Some(workers) = workers {
            scene.note_memory(workers);
        }
        let Some(terminal) = &self.terminal else {
            eprintln!("{}", line(scene));
            return;
        };
        let (height, width) = terminal.size();
        let (height, width) = (usize::from(height).max(14), usize::from(width).clamp(60, 100));
        let lines = frame(scene, width - 1, height - 1);
        // Over what is there, line by line: a screen that is cleared first flickers.
        let mut text = String::new();
        if self.drawn > 0 {
            text.push_str(&format!("\x1b[{}A", self.drawn));
        }
        for line in &lines {
            text.push_str(&format!("{}\x1b[K\n", coloured(line, width - 1)));
        }
        text.push_str("\x1b[J");
        self.drawn = lines.len();
        let _ = terminal.write_str(&text);
    }

    /// Leaves the last picture where it is.
    pub(super) fn end(&mut self) {
        if std::mem::take(&mut self.drawn) > 0 {
            eprintln!();
        }
    }
}

fn coloured(line: &Line, width: usize) -> String {
    let mut room = width;
    let mut text = String::new();
    for (style, piece) in line {
        let piece: String = piece.chars().take(room).collect();
        room -= piece.chars().count();
        text.push_str(&style.clone().for_stderr().apply_to(piece).to_string());
    }
    text
}

/// One line for a log.
fn line(scene: &Scene) -> String {
    let seconds = scene.began.elapsed().as_secs();
    let version = scene.seen.progress.as_ref().map_or(String::new(), |it| it.version.to_string());
    let accuracy = |measured: &[Measurement]| {
        let last = Scene::latest(measured);
        last.map_or("-".to_owned(), |accuracy| format!("{:.1} %", accuracy * 100.0))
    };
    if !scene.is_chaos() {
        let accuracy = accuracy(&scene.calm);
        return format!("{seconds:>3} s  in peace: version {version}, validation {accuracy}");
    }
    let (compared, differing) = measurements(&scene.calm, &scene.chaos);
    format!(
        "{seconds:>3} s  under fire: version {version} of {}, validation {} ({} of {compared} points \
         on the curve)  kills {} (hive {}), lost {}, doubled {}  page: {} answers, {} dropped",
        scene.versions.unwrap_or_default(),
        accuracy(&scene.chaos),
        compared - differing,
        scene.kills.len(),
        scene.hive_kills(),
        scene.balance.lost,
        scene.balance.doubled,
        thousands(scene.tally.answered),
        scene.tally.dropped
    )
}

struct Colours {
    plain: Style,
    dim: Style,
    calm: Style,
    chaos: Style,
    good: Style,
    bad: Style,
}

impl Colours {
    fn new() -> Self {
        let plain = Style::new();
        Self {
            dim: plain.clone().dim(),
            calm: plain.clone().cyan(),
            chaos: plain.clone().yellow().bold(),
            good: plain.clone().green().bold(),
            bad: plain.clone().red().bold(),
            plain,
        }
    }

    /// For a count that should be 0.
    fn count(&self, count: u64) -> Style {
        if count == 0 { self.good.clone() } else { self.bad.clone() }
    }
}

/// A whole screen.
fn frame(scene: &Scene, width: usize, height: usize) -> Vec<Line> {
    let colours = Colours::new();
    let piece = |style: &Style, text: &str| (style.clone(), text.to_owned());
    let seconds = scene.began.elapsed().as_secs();
    let title = format!(
        "  {} workers of at most {} MiB, a hive, a page; {} kill -9 a second",
        scene.worker_count,
        scene.memory_limit >> 20,
        scene.kills_per_second
    );
    let mut lines =
        vec![vec![piece(&colours.chaos, "skep demo chaos"), piece(&colours.plain, &title)]];
    lines.push(Vec::new());
    let rows = height.saturating_sub(10).clamp(4, 14);
    lines.extend(curves(scene, &colours, width, rows));
    lines.push(marks(scene, &colours, width));
    lines.push(axis(scene, &colours, width));
    lines.push(legend(scene, &colours));
    lines.push(Vec::new());
    let hive_kills = scene.hive_kills();
    lines.push(vec![
        piece(&colours.plain, "  kills "),
        piece(&colours.chaos, &format!("{:<5}", scene.kills.len())),
        piece(&colours.plain, "lost "),
        (colours.count(scene.balance.lost), format!("{:<5}", scene.balance.lost)),
        piece(&colours.plain, "doubled "),
        (colours.count(scene.balance.doubled), format!("{:<5}", scene.balance.doubled)),
        piece(&colours.dim, &format!("{:>3} s, {hive_kills} kills of the hive", seconds)),
    ]);
    lines.push(company(scene, &colours));
    lines.push(page(scene, &colours));
    lines
}

/// How wide the numbers beside the curves are.
const MARGIN: usize = 8;

fn curves(scene: &Scene, colours: &Colours, width: usize, rows: usize) -> Vec<Line> {
    let reach = scene.reach() as f64;
    let mut plot = Plot::new(width.saturating_sub(MARGIN + 1), rows);
    for (curve, measured) in [(1, &scene.calm), (2, &scene.chaos)] {
        for stretch in Scene::curve(measured) {
            let points: Vec<_> = stretch.iter().map(|&(x, y)| (x as f64 / reach, y)).collect();
            plot.line(curve, &points);
        }
    }
    let label = |row: usize| match row {
        0 => " 100 % ┤".to_owned(),
        _ if row == rows / 2 => "  50 % ┤".to_owned(),
        _ if row + 1 == rows => "   0 % ┤".to_owned(),
        _ => "       │".to_owned(),
    };
    let row = |row: usize| {
        let mut line = vec![(colours.dim.clone(), label(row))];
        line.extend(plot.row(row).into_iter().map(|(curve, text)| {
            let style = match curve {
                2 => &colours.chaos,
                _ => &colours.calm,
            };
            (style.clone(), text)
        }));
        line
    };
    (0..rows).map(row).collect()
}

/// Where somebody was killed: a line below the curves.
fn marks(scene: &Scene, colours: &Colours, width: usize) -> Line {
    let room = width.saturating_sub(MARGIN + 1).max(1);
    let mut places: HashMap<usize, Victim> = HashMap::new();
    for kill in &scene.kills {
        let at = (kill.samples as f64 / scene.reach() as f64 * (room - 1) as f64).round() as usize;
        let known = places.entry(at.min(room - 1)).or_insert(kill.victim);
        if kill.victim == Victim::Hive {
            *known = Victim::Hive;
        }
    }
    let mut line = vec![(colours.dim.clone(), "  kills └".to_owned())];
    line.extend((0..room).map(|at| match places.get(&at) {
        Some(Victim::Hive) => (colours.bad.clone(), "▲".to_owned()),
        Some(Victim::Worker(_)) => (colours.chaos.clone(), "╵".to_owned()),
        None => (colours.dim.clone(), "─".to_owned()),
    }));
    line
}

fn axis(scene: &Scene, colours: &Colours, width: usize) -> Line {
    let end = format!("{} samples", thousands(scene.reach()));
    let room = width.saturating_sub(MARGIN + 2);
    vec![(colours.dim.clone(), format!("{:MARGIN$}0{end:>room$}", ""))]
}

fn legend(scene: &Scene, colours: &Colours) -> Line {
    let share = |measured: &[Measurement]| {
        let last = Scene::latest(measured);
        last.map_or("      -".to_owned(), |accuracy| format!("{:5.1} %", accuracy * 100.0))
    };
    let mut line = vec![
        (colours.calm.clone(), "  ── ".to_owned()),
        (colours.plain.clone(), format!("no kills {}   ", share(&scene.calm))),
    ];
    if scene.is_chaos() {
        let (compared, differing) = measurements(&scene.calm, &scene.chaos);
        line.push((colours.chaos.clone(), "── ".to_owned()));
        line.push((colours.plain.clone(), format!("under fire {}   ", share(&scene.chaos))));
        let text = format!("{} of {compared} points on the curve", compared - differing);
        line.push((colours.count(differing as u64), text));
    }
    line
}

/// Who is there: the hive and the workers, those just killed in red.
fn company(scene: &Scene, colours: &Colours) -> Line {
    let now = scene.began.elapsed().as_secs_f64();
    let wounded = |victim: Victim| {
        let recent = scene.kills.iter().rev().take_while(|kill| now - kill.seconds < WOUND);
        recent.clone().any(|kill| kill.victim == victim)
    };
    let dot = |victim: Victim| match wounded(victim) {
        true => (colours.bad.clone(), "✕".to_owned()),
        false => (colours.good.clone(), "●".to_owned()),
    };
    let mut line = vec![(colours.plain.clone(), "  hive ".to_owned())];
    line.push(match scene.seen.up && !wounded(Victim::Hive) {
        true => (colours.good.clone(), "●".to_owned()),
        false => (colours.bad.clone(), "✕".to_owned()),
    });
    line.push((colours.plain.clone(), "  workers ".to_owned()));
    line.extend((0..scene.worker_count.min(32)).map(|at| dot(Victim::Worker(at))));
    if let Some(progress) = &scene.seen.progress {
        let text =
            format!("  version {}, {:.0} a second", progress.version, progress.versions_per_second);
        line.push((colours.plain.clone(), text));
    }
    line
}

fn page(scene: &Scene, colours: &Colours) -> Line {
    if !scene.is_chaos() {
        let text = "  first without kills, then the same again under fire".to_owned();
        return vec![(colours.dim.clone(), text)];
    }
    let tally = &scene.tally;
    let right = tally.right().map_or(String::new(), |it| format!(", {:.0} % right", it * 100.0));
    let latest = tally.latest.map_or("-".to_owned(), |version| version.to_string());
    vec![
        (colours.plain.clone(), format!("  page {}  ", scene.page_url)),
        (colours.plain.clone(), format!("{} answers, ", thousands(tally.answered))),
        (colours.count(tally.dropped), format!("{} dropped", tally.dropped)),
        (colours.plain.clone(), format!("  by {latest}{right}")),
    ]
}
