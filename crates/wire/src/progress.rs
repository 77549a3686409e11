//! How a run went and goes: what the live page, `skep watch`, TensorBoard files and CSV are made of.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Evaluated, Event, RunState, Split, Version, WorkerView};

/// Some versions in a row, summed up. Numbers that grow are those after the last of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Point {
    /// When the last of them was made, in milliseconds since 1970.
    pub time: u64,
    /// Seconds in which the run was running, until then.
    pub seconds: f64,
    /// The last of them.
    #[schema(value_type = String)]
    pub version: Version,
    /// How many they are.
    pub versions: u64,
    /// Positions applied since version 0.
    pub samples: u64,
    /// The epoch under way, from 0.
    pub epoch: u64,
    /// Their mean loss.
    pub loss: Option<f64>,
    /// The learning rate of the last of them.
    pub learning_rate: f64,
    /// Their mean norm of the gradient, before clipping.
    pub norm: f64,
    /// Versions between base and application, on average.
    pub staleness: f64,
    /// Samples applied per second, lately.
    pub samples_per_second: f64,
    /// Versions per second, lately.
    pub versions_per_second: f64,
    /// Workers heard of lately.
    pub workers: u64,
    /// What was used since version 0.
    #[serde(flatten)]
    pub usage: Usage,
}

/// What a run has used, over all starts of its hive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// Seconds of all workers together, from first to last seen.
    pub worker_seconds: f64,
    /// Bytes of contributions.
    pub received_bytes: u64,
    /// Bytes of parameters and shards.
    pub sent_bytes: u64,
}

/// An evaluation, and where in the run the measured version lies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Measurement {
    /// When it was known, in milliseconds since 1970.
    pub time: u64,
    /// Seconds in which the run was running when it was known.
    pub seconds: f64,
    /// Which version.
    #[schema(value_type = String)]
    pub version: Version,
    /// Positions applied in that version since version 0.
    pub samples: u64,
    /// On which samples it was measured.
    pub split: Split,
    /// Mean loss.
    pub loss: f64,
    /// Share answered correctly, where the task has a notion of that.
    pub accuracy: Option<f64>,
}

/// The answer of `GET /v1/runs/{run}/history`: bounded, whatever the run's length.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// The run from its start, in points of about as many versions each.
    pub points: Vec<Point>,
    /// What was measured.
    pub measured: Vec<Measurement>,
}

/// An event with its time. Versions are no such events: they are in the points.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TimedEvent {
    /// Counts the events of a run since its hive started.
    pub id: u64,
    /// Milliseconds since 1970.
    pub time: u64,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// The answer of `GET /v1/runs/{run}/progress`: a run as one looks at it again and again, without
/// its settings, tensors and data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// The hive's clock, in milliseconds since 1970.
    pub time: u64,
    /// The run's name.
    pub name: String,
    /// What it is doing.
    pub state: RunState,
    /// Why, where that needs saying.
    pub reason: String,
    /// The version now.
    #[schema(value_type = String)]
    pub version: Version,
    /// The newest version that would survive a crash.
    #[schema(value_type = String)]
    pub durable: Version,
    /// The epoch under way, from 0.
    pub epoch: u64,
    /// Positions applied in the epoch under way.
    pub epoch_applied: u64,
    /// Positions in an epoch.
    pub epoch_positions: u64,
    /// How many epochs, unless the run is bounded otherwise.
    pub epochs: Option<u64>,
    /// How many versions, where the run is bounded that way.
    pub steps: Option<u64>,
    /// Positions applied since version 0.
    pub samples: u64,
    /// Mean training loss over the latest contributions.
    pub loss: Option<f64>,
    /// Samples per second, lately.
    pub rate: f64,
    /// Versions per second, lately.
    pub versions_per_second: f64,
    /// Seconds in which the run was running.
    pub seconds: f64,
    /// Seconds to go at the present rate.
    pub seconds_left: Option<f64>,
    /// The latest evaluation on the validation split.
    pub validation: Option<Evaluated>,
    /// The best evaluation on the validation split.
    pub best: Option<Evaluated>,
    /// The evaluation of the final version on the test split.
    pub test: Option<Evaluated>,
    /// Positions that were given up.
    pub skipped: u64,
    /// Where the final model lies, as the hive sees it.
    pub model: Option<String>,
    /// The last trouble with writing checkpoints, if it lasts.
    pub trouble: Option<String>,
    /// What was used since version 0.
    pub usage: Usage,
    /// How many workers were heard of lately.
    pub worker_count: usize,
    /// The workers heard of lately. In a stream they come once a second.
    pub workers: Option<Vec<WorkerView>>,
    /// In a stream, what is new of the history since the message before; a few points at most.
    pub points: Vec<Point>,
    /// In a stream, what was measured since the message before.
    pub measured: Vec<Measurement>,
    /// The latest events; in a stream, those since the message before.
    pub events: Vec<TimedEvent>,
}
