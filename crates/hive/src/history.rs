//! How a run went, from version 0 on, in bounded memory: at most [`MOST_POINTS`] points, of which
//! each sums up twice as many versions whenever they become too many.
//!
//! It is kept in the store too (see `metrics_files.rs`), so that it outlives a hive; what a crash
//! took back is cut off again.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use skep_core::Millis;
use skep_wire::{Evaluated, History, Measurement, Point, Usage, Version};

use crate::metrics::Counters;

/// How many points, and how many measurements, are kept.
const MOST_POINTS: usize = 1000;
/// How many points a message of a stream has at most: enough for a smooth curve.
const MOST_NEW_POINTS: usize = 16;
/// How far back a rate looks.
const RECENT: Millis = 5_000;
/// How far apart the moments are that a rate is worked out from.
const BETWEEN_MARKS: Millis = 100;

/// One version as its keeper made it.
pub(crate) struct Made {
    /// On the keeper's clock.
    pub(crate) now: Millis,
    pub(crate) seconds: f64,
    pub(crate) version: Version,
    pub(crate) samples: u64,
    pub(crate) epoch: u64,
    pub(crate) loss: Option<f64>,
    pub(crate) learning_rate: f64,
    pub(crate) norm: f64,
    pub(crate) staleness: f64,
}

/// What the store keeps of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// How many versions a point sums up.
    stride: u64,
    #[serde(flatten)]
    pub(crate) history: History,
    usage: Usage,
    /// The number of the last version in a TensorBoard file, and the time of the last measurement.
    #[serde(default)]
    pub(crate) exported: u64,
    #[serde(default)]
    pub(crate) exported_time: u64,
}

impl Kept {
    /// The points that no version will be added to.
    pub(crate) fn complete(&self) -> &[Point] {
        match self.history.points.as_slice() {
            [points @ .., last] if last.versions < self.stride => points,
            points => points,
        }
    }
}

/// The history of one run, shared by its keeper, which adds to it, and those who look or write.
pub(crate) struct Recorder {
    counters: Arc<Counters>,
    inner: Mutex<Inner>,
}

struct Inner {
    kept: Kept,
    /// What other starts of the hive have used.
    before: Usage,
    worked: Millis,
    /// Moments of the last seconds: when, which version, how many samples.
    marks: VecDeque<(Millis, u64, u64)>,
    workers: u64,
    /// Where versions that may yet be measured lie. There are few at a time.
    places: VecDeque<(u64, u64)>,
}

impl Recorder {
    /// Goes on from what the store has, as far as the run goes on from there.
    pub(crate) fn new(mut kept: Kept, number: u64, counters: Arc<Counters>) -> Self {
        kept.stride = kept.stride.max(1);
        kept.history.points.retain(|point| point.version.number <= number);
        kept.history.measured.retain(|measured| measured.version.number <= number);
        kept.exported = kept.exported.min(number);
        let before = kept.usage;
        let inner = Inner {
            kept,
            before,
            worked: 0,
            marks: VecDeque::new(),
            workers: 0,
            places: VecDeque::new(),
        };
        Self { counters, inner: Mutex::new(inner) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a version. Workers are counted now and then only.
    pub(crate) fn version(&self, made: &Made, workers: impl FnOnce() -> u64) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        if inner.marks.back().is_none_or(|(at, ..)| made.now.saturating_sub(*at) >= BETWEEN_MARKS) {
            inner.marks.push_back((made.now, made.version.number, made.samples));
            while inner.marks.front().is_some_and(|(at, ..)| made.now - at > RECENT) {
                inner.marks.pop_front();
            }
            inner.workers = workers();
        }
        let (versions_per_second, samples_per_second) =
            inner.rates(made.now, made.version.number, made.samples);
        if inner.places.len() == MOST_POINTS {
            inner.places.pop_front();
        }
        inner.places.push_back((made.version.number, made.samples));
        let point = Point {
            time: clock(),
            seconds: brief(made.seconds),
            version: made.version,
            versions: 1,
            samples: made.samples,
            epoch: made.epoch,
            loss: made.loss,
            learning_rate: made.learning_rate,
            // JSON has no word for infinity.
            norm: made.norm.min(f64::MAX),
            staleness: made.staleness,
            samples_per_second: brief(samples_per_second),
            versions_per_second: brief(versions_per_second),
            workers: inner.workers,
            usage: inner.usage(&self.counters),
        };
        let stride = inner.kept.stride;
        let points = &mut inner.kept.history.points;
        match points.last_mut() {
            Some(last) if last.versions < stride => merge(last, point),
            _ => points.push(point),
        }
        if points.len() > MOST_POINTS {
            halve(points);
            inner.kept.stride = stride.saturating_mul(2);
        }
    }

    /// Adds a measurement.
    pub(crate) fn measured(&self, evaluated: &Evaluated, seconds: f64) {
        let mut inner = self.lock();
        let number = evaluated.version.number;
        let placed = inner.places.iter().find(|(at, _)| *at == number).map(|(_, samples)| *samples);
        // After a restart the version is in no place; the point that holds it is near enough.
        let near = |point: &&Point| point.version.number >= number;
        let placed = placed
            .or_else(|| inner.kept.history.points.iter().find(near).map(|point| point.samples));
        let measured = &mut inner.kept.history.measured;
        // Later than the one before, so that readers can tell by the time what is new to them.
        let time = measured.last().map_or(0, |last| last.time + 1).max(clock());
        measured.push(Measurement {
            time,
            seconds: brief(seconds),
            version: evaluated.version,
            samples: placed.unwrap_or_default(),
            split: evaluated.split,
            loss: evaluated.loss,
            accuracy: evaluated.accuracy,
        });
        if measured.len() > MOST_POINTS {
            // Every other one goes; the newest stays.
            let mut at = measured.len();
            measured.retain(|_| {
                at -= 1;
                at.is_multiple_of(2)
            });
        }
    }

    /// A worker was there for so long.
    pub(crate) fn worked(&self, millis: Millis) {
        self.lock().worked += millis;
    }

    /// Everything, in at most so many points.
    pub(crate) fn history(&self, most: usize) -> History {
        let mut history = self.lock().kept.history.clone();
        while history.points.len() > most.max(2) {
            halve(&mut history.points);
        }
        history
    }

    /// What is new after a version and a time, in a few points. Only those that will not change any
    /// more.
    pub(crate) fn since(&self, number: u64, time: u64) -> (Vec<Point>, Vec<Measurement>) {
        let inner = self.lock();
        let complete = inner.kept.complete();
        let from = complete.partition_point(|point| point.version.number <= number);
        let mut new = complete[from..].to_vec();
        while new.len() > MOST_NEW_POINTS {
            halve(&mut new);
        }
        let newer = |measurement: &&Measurement| measurement.time > time;
        (new, inner.kept.history.measured.iter().filter(newer).copied().collect())
    }

    /// Versions per second, lately, on the keeper's clock as far as it is known here; and what was
    /// used.
    pub(crate) fn pace(&self, number: u64) -> (f64, Usage) {
        let inner = self.lock();
        let usage = inner.usage(&self.counters);
        let last = inner.kept.history.points.last();
        let silent = last.map_or(0, |point| clock().saturating_sub(point.time));
        let Some((at, _, samples)) = inner.marks.back() else { return (0.0, usage) };
        let (versions, _) = inner.rates(at + silent, number, *samples);
        (if silent > RECENT { 0.0 } else { brief(versions) }, usage)
    }

    /// What is to be written.
    pub(crate) fn kept(&self) -> Kept {
        let inner = self.lock();
        Kept { usage: inner.usage(&self.counters), ..inner.kept.clone() }
    }

    /// Notes how far TensorBoard files go.
    pub(crate) fn exported(&self, number: u64, time: u64) {
        let mut inner = self.lock();
        (inner.kept.exported, inner.kept.exported_time) = (number, time);
    }
}

impl Inner {
    fn rates(&self, now: Millis, number: u64, samples: u64) -> (f64, f64) {
        let Some((at, first, first_samples)) = self.marks.front() else { return (0.0, 0.0) };
        let span = now.saturating_sub(*at);
        if span == 0 {
            return (0.0, 0.0);
        }
        let rate = |count: u64| count as f64 * 1000.0 / span as f64;
        (rate(number.saturating_sub(*first)), rate(samples.saturating_sub(*first_samples)))
    }

    fn usage(&self, counters: &Counters) -> Usage {
        Usage {
            worker_seconds: self.before.worker_seconds + self.worked as f64 / 1000.0,
            received_bytes: self.before.received_bytes + counters.bytes_in.load(Ordering::Relaxed),
            sent_bytes: self.before.sent_bytes + counters.bytes_out.load(Ordering::Relaxed),
        }
    }
}

/// Neighbours become one.
fn halve(points: &mut Vec<Point>) {
    let mut halved: Vec<Point> = Vec::with_capacity(points.len().div_ceil(2));
    for (at, point) in std::mem::take(points).into_iter().enumerate() {
        match halved.last_mut() {
            Some(last) if at % 2 == 1 => merge(last, point),
            _ => halved.push(point),
        }
    }
    *points = halved;
}

/// Adds the versions that follow.
fn merge(point: &mut Point, next: Point) {
    let (own, others) = (point.versions as f64, next.versions as f64);
    let mean = |a: f64, b: f64| (a * own + b * others) / (own + others);
    let loss = match (point.loss, next.loss) {
        (Some(a), Some(b)) => Some(mean(a, b)),
        (a, b) => a.or(b),
    };
    *point = Point {
        loss,
        norm: mean(point.norm, next.norm),
        staleness: mean(point.staleness, next.staleness),
        versions: point.versions + next.versions,
        ..next
    };
}

/// Milliseconds since 1970.
pub(crate) fn clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_millis() as u64)
}

/// A number for people: what lies behind the third place costs bytes and tells nothing.
pub(crate) fn brief(number: f64) -> f64 {
    (number * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_wire::Split;

    fn made(number: u64) -> Made {
        Made {
            now: number * 10,
            seconds: number as f64 / 100.0,
            version: Version::new(1, number),
            samples: number * 64,
            epoch: 0,
            loss: Some(number as f64),
            learning_rate: 0.1,
            norm: 1.0,
            staleness: 0.5,
        }
    }

    fn recorded(versions: u64) -> Recorder {
        let recorder = Recorder::new(Kept::default(), 0, Arc::default());
        for number in 1..=versions {
            recorder.version(&made(number), || 3);
        }
        recorder
    }

    #[test]
    fn a_long_run_stays_bounded_and_whole() {
        let recorder = recorded(100_000);
        let history = recorder.history(usize::MAX);
        assert!((400..=MOST_POINTS).contains(&history.points.len()), "{}", history.points.len());
        let versions: u64 = history.points.iter().map(|point| point.versions).sum();
        assert_eq!(versions, 100_000, "every version is in a point");
        let losses: f64 =
            history.points.iter().map(|p| p.loss.expect("is there") * p.versions as f64).sum();
        assert!((losses / 100_000.0 - 50_000.5).abs() < 1e-6, "means keep their weight");
        let last = history.points.last().expect("is there");
        assert_eq!((last.version.number, last.samples, last.workers), (100_000, 6_400_000, 3));
        assert!((last.versions_per_second - 100.0).abs() < 1.0, "{}", last.versions_per_second);
        assert!(recorder.history(60).points.len() <= 60);
        assert!(history.points.windows(2).all(|pair| pair[0].samples < pair[1].samples));
    }

    #[test]
    fn a_stream_is_up_to_date_with_few_points() {
        let recorder = recorded(0);
        let mut seen = 0;
        for number in 1..=5_000 {
            recorder.version(&made(number), || 1);
            if number % 50 == 0 {
                let (points, _) = recorder.since(seen, 0);
                assert!(points.len() <= MOST_NEW_POINTS, "{}", points.len());
                for point in points {
                    assert!(point.version.number > seen);
                    seen = point.version.number;
                }
                assert!(number - seen < 16, "{number} {seen}");
            }
        }
    }

    #[test]
    fn what_a_crash_took_back_is_cut_off() {
        let recorder = recorded(40);
        recorder.worked(2_500);
        for number in [20, 40] {
            let version = Version::new(1, number);
            let evaluated = Evaluated {
                version,
                split: Split::Validation,
                samples: 10,
                loss: 0.5,
                accuracy: Some(0.9),
            };
            recorder.measured(&evaluated, 1.0);
        }
        assert_eq!(recorder.history(100).measured[0].samples, 20 * 64);
        let json = serde_json::to_vec(&recorder.kept()).expect("is there");
        let kept: Kept = serde_json::from_slice(&json).expect("is there");
        let again = Recorder::new(kept, 30, Arc::default());
        let history = again.history(100);
        assert_eq!(history.points.len(), 30);
        assert_eq!(history.measured.len(), 1);
        assert!(
            (again.pace(30).1.worker_seconds - 2.5).abs() < 1e-9,
            "what was used is not undone"
        );
    }
}
