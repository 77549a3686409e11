//! A run's history in its store, under `metrics/`: `history.json`, from which a hive goes on,
//! `metrics.csv`, and TensorBoard's event files.
//!
//! An object store cannot append. The history and the CSV are bounded, so they are written anew as
//! a whole: the history before each checkpoint and after each measurement, so that it is never behind
//! the version from which a hive goes on, the CSV now and then. TensorBoard reads a file on from where it was, so its files never change: each is a
//! segment with what is new since the one before. They become larger as the run becomes longer, a
//! fiftieth of it each, so that even a long run has a few hundred.

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use skep_data::{DataError, RunFiles};
use skep_wire::{Measurement, Point, Split};

use crate::history::{Kept, Recorder, clock};
use crate::tensorboard::EventFile;

/// How long at least lies between two writes while a run is running, but for the history.
const BETWEEN_WRITES: Duration = Duration::from_secs(10);
/// How many seconds of a run a segment holds, at least.
const SHORTEST_SEGMENT: f64 = 10.0;

/// Writes the metrics of one run.
pub(crate) struct MetricsFiles {
    files: RunFiles,
    generation: u64,
    recorder: Arc<Recorder>,
    last_write: Option<Instant>,
    /// Of this generation.
    segments: u64,
    /// Seconds of the run at the last segment's end.
    segment_end: f64,
}

impl MetricsFiles {
    pub(crate) fn new(files: RunFiles, generation: u64, recorder: Arc<Recorder>) -> Self {
        Self { files, generation, recorder, last_write: None, segments: 0, segment_end: 0.0 }
    }

    /// What an earlier hive wrote. A history that cannot be read is none: no run depends on it.
    pub(crate) async fn read(files: &RunFiles) -> Kept {
        let read = match files.metrics("history.json").await {
            Ok(None) => return Kept::default(),
            Ok(Some(bytes)) => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        read.unwrap_or_else(|error| {
            tracing::warn!(run = files.run(), "the history is lost: {error}");
            Kept::default()
        })
    }

    pub(crate) async fn write_if_due(&mut self) -> Result<(), DataError> {
        if self.last_write.is_some_and(|last| last.elapsed() < BETWEEN_WRITES) {
            return Ok(());
        }
        self.last_write = Some(Instant::now());
        let kept = self.recorder.kept();
        let now = kept.history.points.last().map_or(0.0, |point| point.seconds);
        if now - self.segment_end >= SHORTEST_SEGMENT.max(now / 50.0) {
            let complete = kept.complete().to_vec();
            self.write_segment(&kept, &complete).await?;
        }
        self.write_whole().await
    }

    /// Writes what a hive goes on from.
    pub(crate) async fn write_history(&self) -> Result<(), DataError> {
        let json = serde_json::to_vec(&self.recorder.kept()).unwrap_or_default();
        self.files.write_metrics("history.json", Bytes::from(json)).await
    }

    /// Writes everything that will not change.
    pub(crate) async fn write(&mut self) -> Result<(), DataError> {
        let kept = self.recorder.kept();
        let complete = kept.complete().to_vec();
        self.write_segment(&kept, &complete).await?;
        self.write_whole().await
    }

    /// Writes everything: the run is over.
    pub(crate) async fn write_end(&mut self) -> Result<(), DataError> {
        let kept = self.recorder.kept();
        self.write_segment(&kept, &kept.history.points).await?;
        self.write_whole().await
    }

    async fn write_segment(&mut self, kept: &Kept, points: &[Point]) -> Result<(), DataError> {
        let new = points.partition_point(|point| point.version.number <= kept.exported);
        let points = &points[new..];
        let measured = &kept.history.measured;
        let new = measured.partition_point(|measured| measured.time <= kept.exported_time);
        let measured = &measured[new..];
        if points.is_empty() && measured.is_empty() {
            return Ok(());
        }
        let from_step = (self.segments == 0).then_some(kept.exported + 1);
        let mut file = EventFile::new(clock(), from_step);
        points.iter().for_each(|point| file.point(point));
        measured.iter().for_each(|measured| file.measurement(measured));
        let name = format!("events.out.tfevents.{:06}.{:06}", self.generation, self.segments);
        self.files.write_metrics(&name, Bytes::from(file.into_bytes())).await?;
        self.segments += 1;
        self.segment_end = points.last().map_or(self.segment_end, |point| point.seconds);
        let number = points.last().map_or(kept.exported, |point| point.version.number);
        let time = measured.last().map_or(kept.exported_time, |measured| measured.time);
        self.recorder.exported(number, time);
        Ok(())
    }

    async fn write_whole(&self) -> Result<(), DataError> {
        self.write_history().await?;
        let kept = self.recorder.kept();
        let csv = csv(&kept.history.points, &kept.history.measured);
        self.files.write_metrics("metrics.csv", Bytes::from(csv)).await
    }
}

/// A line for every point and every measurement, in the order of time.
fn csv(points: &[Point], measured: &[Measurement]) -> String {
    let mut csv = String::from(
        "time,seconds,version,samples,epoch,versions,loss,learning_rate,gradient_norm,staleness,\
         samples_per_second,versions_per_second,workers,worker_seconds,received_bytes,sent_bytes,\
         validation_loss,validation_accuracy,test_loss,test_accuracy\n",
    );
    let text = |number: Option<f64>| number.map_or(String::new(), |number| number.to_string());
    let mut measured = measured.iter().peekable();
    let measurement = |csv: &mut String, line: &Measurement| {
        let results = format!("{},{}", line.loss, text(line.accuracy));
        let (validation, test) = match line.split {
            Split::Test => (",", results.as_str()),
            _ => (results.as_str(), ","),
        };
        let _ = writeln!(
            csv,
            "{},{},{},{},,,,,,,,,,,,,{validation},{test}",
            line.time, line.seconds, line.version, line.samples
        );
    };
    for point in points {
        while let Some(line) = measured.next_if(|line| line.time < point.time) {
            measurement(&mut csv, line);
        }
        let _ = writeln!(
            csv,
            "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},,,,",
            point.time,
            point.seconds,
            point.version,
            point.samples,
            point.epoch,
            point.versions,
            text(point.loss),
            point.learning_rate,
            point.norm,
            point.staleness,
            point.samples_per_second,
            point.versions_per_second,
            point.workers,
            point.usage.worker_seconds,
            point.usage.received_bytes,
            point.usage.sent_bytes,
        );
    }
    measured.for_each(|line| measurement(&mut csv, line));
    csv
}
