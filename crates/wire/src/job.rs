//! A job: one table of settings that describes a run wherever it runs.
//!
//! The tables `policy`, `optimiser` and `outer` are taken as they are: their owners (`core`, `math`)
//! read and check them when the hive creates the run, so each setting is defined once.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Everything a run is told. Every setting has a default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Job {
    /// What is run, and for how long.
    pub run: RunJob,
    /// What is trained.
    pub model: ModelJob,
    /// What it is trained on.
    pub data: DataJob,
    /// How samples become gradients.
    pub train: TrainJob,
    /// How contributions become versions: `kind` is `batch`, `async`, `sync` or `average`.
    #[schema(value_type = Object)]
    pub policy: Map<String, Value>,
    /// How a version becomes the next: `kind` is `sgd`, `adam`, `adamw` or `rmsprop`. Where workers
    /// bring home models, it is theirs.
    #[schema(value_type = Object)]
    pub optimiser: Map<String, Value>,
    /// Where workers bring home models, how their average becomes the next version: `kind` is
    /// `none`, `sgd` or `nesterov`.
    #[serde(skip_serializing_if = "Map::is_empty")]
    #[schema(value_type = Object)]
    pub outer: Map<String, Value>,
    /// Who works, where the one who starts the run also starts workers.
    pub workers: WorkersJob,
    /// When to end early.
    pub stop: StopJob,
    /// What survives a crash.
    pub checkpoint: CheckpointJob,
    /// How often accuracy is measured while training.
    pub evaluation: EvaluationJob,
    /// How long a worker may be silent.
    pub lease: LeaseJob,
}

/// What is run, and for how long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunJob {
    /// The run's name; made from the task's where it is left out.
    pub name: Option<String>,
    /// What workers bring home: `gradients` or `models`.
    pub exchange: String,
    /// From which all randomness comes.
    pub seed: u64,
    /// How often each sample is used.
    pub epochs: u64,
    /// How many versions to make instead; 0 means until stopped.
    pub steps: Option<u64>,
}

impl Default for RunJob {
    fn default() -> Self {
        Self { name: None, exchange: "gradients".to_owned(), seed: 0, epochs: 10, steps: None }
    }
}

/// What is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ModelJob {
    /// The model's name among the tasks that the binary knows.
    pub kind: String,
    /// A file to start from: safetensors, or a PyTorch `.pth` (weights only).
    pub init: Option<String>,
    /// Settings of the model's own, which its task reads and checks.
    #[schema(value_type = Object)]
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub settings: Map<String, Value>,
}

impl Default for ModelJob {
    fn default() -> Self {
        Self { kind: "lenet5".to_owned(), init: None, settings: Map::new() }
    }
}

/// What it is trained on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataJob {
    /// A built-in dataset's name or a folder.
    pub source: String,
    /// How many shards to cut the training set into; chosen by size where it is left out.
    pub shards: Option<usize>,
    /// How many whole copies of the training set there are, each with shards and positions of its
    /// own: what one model per copy is trained on.
    pub copies: usize,
    /// The share of the training set that is held out to validate on.
    pub validation: f64,
    /// Which samples a shard has: `shuffled`, or `label`, in the order of their labels.
    pub split: String,
}

impl Default for DataJob {
    fn default() -> Self {
        let split = "shuffled".to_owned();
        Self { source: "mnist".to_owned(), shards: None, copies: 1, validation: 0.05, split }
    }
}

/// How samples become gradients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainJob {
    /// Samples per backward pass.
    pub batch: u64,
    /// Backward passes per contribution; local steps where workers bring home models.
    pub every: u64,
    /// How gradients travel to the hive and parameters back: `f32` or `bf16`.
    pub encoding: crate::Encoding,
}

impl Default for TrainJob {
    fn default() -> Self {
        Self { batch: 32, every: 1, encoding: crate::Encoding::F32 }
    }
}

/// Who works.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WorkersJob {
    /// How many worker processes `skep train` starts; one per core where it is left out.
    pub count: Option<usize>,
}

/// When to end early. Whatever comes first ends the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StopJob {
    /// Validation accuracy, from 0 to 1.
    pub accuracy: Option<f64>,
    /// Minutes of work: time in which the run was running.
    pub minutes: Option<f64>,
    /// Versions.
    pub steps: Option<u64>,
}

/// What survives a crash.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointJob {
    /// Seconds between checkpoints.
    pub seconds: f64,
    /// How many checkpoints are kept besides the best.
    pub keep: usize,
}

impl Default for CheckpointJob {
    fn default() -> Self {
        Self { seconds: 5.0, keep: 3 }
    }
}

/// How often accuracy is measured while training.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluationJob {
    /// Versions between two evaluations on the validation split; at the end of each epoch where
    /// it is left out.
    pub versions: Option<u64>,
}

/// How long a worker may be silent, and how much it takes at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LeaseJob {
    /// Seconds without a heartbeat after which a lease lapses.
    pub seconds: f64,
    /// Seconds without an accepted contribution after which a lease lapses, heartbeats or not.
    pub progress_seconds: f64,
    /// Seconds of work that a lease should hold.
    pub target_seconds: f64,
}

impl Default for LeaseJob {
    fn default() -> Self {
        Self { seconds: 10.0, progress_seconds: 120.0, target_seconds: 2.0 }
    }
}
