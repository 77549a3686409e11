//! The JSON messages of the routes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Job, LeaseId, Schema, Version, WireError};

/// The metadata key under which a run's description travels in the safetensors file that creates
/// it: the tensors of that file are version 0.
pub const RUN_METADATA: &str = "skep.run";

/// One object of a dataset: either kept by the hive, then it has a hash and bytes, or only known
/// by name, then its bytes are where workers can read them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShardRef {
    /// SHA-256 of its bytes, in hexadecimal digits; also its name in the store.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hash: String,
    /// What workers know it by, where the hive does not keep it: 1 to 128 visible ASCII characters.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// How many samples it holds.
    pub samples: u64,
    /// How many bytes it has, where the hive keeps it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl ShardRef {
    /// A shard that the hive keeps.
    pub fn kept(hash: String, samples: u64, bytes: u64) -> Self {
        Self { hash, name: String::new(), samples, bytes }
    }

    /// A shard that only workers can read.
    pub fn named(name: &str, samples: u64) -> Self {
        Self { hash: String::new(), name: name.to_owned(), samples, bytes: 0 }
    }

    /// Whether the hive keeps its bytes.
    pub fn is_kept(&self) -> bool {
        self.name.is_empty()
    }

    /// What it is called in requests: its hash, or its name.
    pub fn id(&self) -> &str {
        if self.is_kept() { &self.hash } else { &self.name }
    }

    /// Whether a text can be the name of a shard that the hive does not keep. What looks like a
    /// hash cannot: a worker could not tell whose it is.
    pub fn is_name(text: &str) -> bool {
        (1..=128).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_graphic())
            && !Self::is_hash(text)
    }

    /// Whether a text can be a shard's hash.
    pub fn is_hash(text: &str) -> bool {
        text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    }
}

/// Which samples are meant.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// Trained on.
    Train,
    /// Held out; measured on while training.
    Validation,
    /// Measured on at the end.
    Test,
}

/// A run's data: every shard of every split.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Manifest {
    /// Where it came from, for people.
    pub source: String,
    /// Trained on.
    pub train: Vec<ShardRef>,
    /// Held out.
    pub validation: Vec<ShardRef>,
    /// For the end.
    pub test: Vec<ShardRef>,
    /// What the model needs besides its parameters.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub assets: Vec<AssetRef>,
}

/// A small file that belongs to a model, such as its vocabulary. The hive keeps it as it is: it is
/// sent and fetched like a shard, and lies beside the run's model under its name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AssetRef {
    /// Its name: like a run's.
    pub name: String,
    /// SHA-256 of its bytes, in hexadecimal digits.
    pub hash: String,
    /// How many bytes it has.
    pub bytes: u64,
}

impl Manifest {
    /// The shards of a split.
    pub fn split(&self, split: Split) -> &[ShardRef] {
        match split {
            Split::Train => &self.train,
            Split::Validation => &self.validation,
            Split::Test => &self.test,
        }
    }

    /// Every shard.
    pub fn shards(&self) -> impl Iterator<Item = &ShardRef> {
        self.train.iter().chain(&self.validation).chain(&self.test)
    }

    /// How many samples a split has.
    pub fn samples(&self, split: Split) -> u64 {
        self.split(split).iter().map(|shard| shard.samples).sum()
    }
}

/// What creates a run, beside version 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunSpec {
    /// The run's name.
    pub name: String,
    /// Its settings.
    pub job: Job,
    /// Its tensors.
    pub schema: Schema,
    /// Its data.
    pub manifest: Manifest,
    /// What made it: program and version.
    #[serde(default)]
    pub made_by: String,
}

impl RunSpec {
    /// Whether a text can be a run's name: lower-case letters, digits, `-`, `_` and `.`, at most
    /// 63, starting with a letter or digit. Names become paths in the store.
    pub fn is_name(text: &str) -> bool {
        let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        !text.is_empty()
            && text.len() <= 63
            && text.bytes().next().is_some_and(word)
            && text.bytes().all(|b| word(b) || matches!(b, b'-' | b'_' | b'.'))
    }

    /// Reads the description from a safetensors file's metadata.
    pub fn from_metadata(text: &str) -> Result<Self, WireError> {
        serde_json::from_str(text).map_err(|error| WireError::Schema(error.to_string()))
    }
}

/// What a run is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// Handing out work.
    Running,
    /// Handing out none until resumed.
    Paused,
    /// Every position of every epoch was applied.
    Done,
    /// Done, but some positions were skipped, and are named.
    DoneWithGaps,
    /// It cannot go on; the reason says why.
    Failed,
    /// Ended by someone before its time.
    Stopped,
}

impl RunState {
    /// Whether nothing will happen any more.
    pub fn is_final(self) -> bool {
        !matches!(self, Self::Running | Self::Paused)
    }
}

/// The result of an evaluation of one version.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Evaluated {
    /// Which version.
    #[schema(value_type = String)]
    pub version: Version,
    /// On which samples.
    pub split: Split,
    /// How many samples.
    pub samples: u64,
    /// Mean loss.
    pub loss: f64,
    /// Share answered correctly, where the task has a notion of that.
    pub accuracy: Option<f64>,
}

/// The body of a contribution of kind `evaluation`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EvaluationCounts {
    /// Sum of the losses of the samples.
    pub loss_sum: f64,
    /// How many were answered correctly, where the task has a notion of that.
    pub correct: Option<u64>,
}

/// A range of positions that was given up, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Skipped {
    /// In which epoch.
    pub epoch: u64,
    /// The first position.
    pub first: u64,
    /// How many positions.
    pub count: u64,
    /// Why.
    pub reason: String,
}

/// One run as the hive shows it: the one authority on its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunView {
    /// Its name.
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
    /// How many versions it will make, where that is known: schedules depend on it.
    #[serde(default)]
    pub versions: Option<u64>,
    /// Positions applied since version 0.
    pub samples: u64,
    /// Mean training loss over the latest contributions.
    pub loss: Option<f64>,
    /// Samples per second, lately.
    pub rate: f64,
    /// Seconds in which the run was running.
    pub seconds: f64,
    /// Seconds to go at the present rate.
    pub seconds_left: Option<f64>,
    /// Workers heard of lately.
    pub workers: Vec<WorkerView>,
    /// The latest evaluation on the validation split.
    pub validation: Option<Evaluated>,
    /// The best evaluation on the validation split.
    pub best: Option<Evaluated>,
    /// The evaluation of the final version on the test split.
    pub test: Option<Evaluated>,
    /// What was given up.
    pub skipped: Vec<Skipped>,
    /// Where the final model lies, as the hive sees it.
    pub model: Option<String>,
    /// The last trouble with writing checkpoints, if it lasts.
    pub trouble: Option<String>,
    /// Settings.
    pub job: Job,
    /// Tensors.
    pub schema: Schema,
    /// Data.
    pub manifest: Manifest,
}

/// One worker as the hive knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WorkerView {
    /// Its name, of its own choosing.
    pub name: String,
    /// What computes: program, engine, version.
    pub engine: String,
    /// Seconds since it was heard of.
    pub seen_seconds: f64,
    /// Contributions accepted.
    pub contributions: u64,
    /// Samples accepted.
    pub samples: u64,
    /// Samples per second, lately.
    pub rate: f64,
    /// Versions between base and application, lately.
    pub staleness: f64,
    /// Share of its time spent waiting for the hive or the network, lately.
    pub waiting: f64,
}

/// A line of `GET /v1/runs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunSummary {
    /// Its name.
    pub name: String,
    /// What it is doing.
    pub state: RunState,
    /// Why, where that needs saying.
    pub reason: String,
    /// The version now.
    #[schema(value_type = String)]
    pub version: Version,
    /// The epoch under way, from 0.
    pub epoch: u64,
    /// Positions applied since version 0.
    pub samples: u64,
    /// Mean training loss, lately.
    pub loss: Option<f64>,
    /// The best validation accuracy so far.
    pub accuracy: Option<f64>,
    /// Workers heard of lately.
    pub workers: usize,
    /// Samples per second, lately.
    pub rate: f64,
}

/// The body of `PATCH /v1/runs/{run}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunChange {
    /// What to do.
    pub action: RunAction,
}

/// What can be done to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RunAction {
    /// Hand out no more work.
    Pause,
    /// Hand out work again.
    Resume,
    /// Train no more: measure the version there is, and be done.
    Finish,
    /// End now, keeping what there is.
    Stop,
}

/// What a lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum LeaseKind {
    /// Gradients of a slice.
    Train,
    /// Counts over a slice of a held-out split, on exactly the base version.
    Evaluate,
}

/// The body of `POST /v1/runs/{run}/leases`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LeaseRequest {
    /// The worker's name, of its own choosing.
    pub worker: String,
    /// What computes: program, engine, version.
    #[serde(default)]
    pub engine: String,
    /// How many seconds the worker has left, if that is bounded.
    #[serde(default)]
    pub seconds_left: Option<f64>,
    /// Shards the worker has at hand, by hash or name: it gets slices of these if there are any.
    #[serde(default)]
    pub has: Vec<String>,
    /// The only shards the worker can read, by hash or name, if it cannot read all.
    #[serde(default)]
    pub only: Option<Vec<String>>,
    /// Which kinds of leases the worker takes; all of them where none is named.
    #[serde(default)]
    pub kinds: Vec<LeaseKind>,
    /// Seconds to wait for work before the answer is `wait`.
    #[serde(default)]
    pub wait: f64,
    /// Share of its time that the worker spent waiting, lately.
    #[serde(default)]
    pub waiting: f64,
}

/// The answer to a request for a lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase", tag = "answer")]
pub enum LeaseAnswer {
    /// Work.
    Lease(LeaseView),
    /// None now; ask again.
    Wait {
        /// After so many seconds.
        seconds: f64,
        /// What is waited for.
        reason: String,
    },
    /// None any more: the run is complete.
    Done {
        /// How it ended.
        reason: String,
    },
    /// None any more: the run was stopped or failed.
    Stopped {
        /// Why.
        reason: String,
    },
}

/// The right to work on a slice until a deadline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LeaseView {
    /// Its id.
    #[schema(value_type = String)]
    pub id: LeaseId,
    /// What it is for.
    pub kind: LeaseKind,
    /// The version to use: at least this one to train, exactly this one to evaluate.
    #[schema(value_type = String)]
    pub base: Version,
    /// Of which split.
    pub split: Split,
    /// The epoch: with the run's seed and the shard it gives the order of samples.
    pub epoch: u64,
    /// The shard's place in the manifest.
    pub shard: u64,
    /// The first position.
    pub first: u64,
    /// How many positions.
    pub count: u64,
    /// Where `first` lies in the shard's own order.
    pub offset: u64,
    /// Positions per contribution (the last one may be shorter).
    pub chunk: u64,
    /// Seconds between heartbeats.
    pub renew_seconds: f64,
}

/// The answer to a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Renewed {
    /// Seconds until the next is due.
    pub renew_seconds: f64,
}

/// The body of `DELETE /v1/runs/{run}/leases/{lease}`, optional.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GiveBack {
    /// Set where the slice could not be worked on; a slice that fails five times is skipped.
    pub failure: Option<String>,
}

/// One line of a worker's log at the hive.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LogLine {
    /// Milliseconds since 1970.
    pub time: u64,
    /// Who says it.
    pub worker: String,
    /// `info`, `warn` or `error`.
    pub level: String,
    /// What it says.
    pub message: String,
}

/// What `GET /v1/runs/{run}/events` sends, one per server-sent event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "event")]
#[non_exhaustive]
pub enum Event {
    /// A version is out.
    Version {
        /// Which.
        #[schema(value_type = String)]
        version: Version,
        /// Mean loss of the contributions it is made of.
        loss: Option<f64>,
        /// Positions applied since version 0.
        samples: u64,
        /// The epoch under way.
        epoch: u64,
        /// The learning rate of the step.
        rate: f64,
        /// The norm of the gradient before clipping.
        norm: f64,
    },
    /// A version was measured.
    Evaluated(Evaluated),
    /// A worker was heard of for the first time, or again after a silence.
    Joined {
        /// Who.
        worker: String,
    },
    /// Something went wrong and was dealt with.
    Fault {
        /// Who was concerned.
        worker: String,
        /// What happened.
        message: String,
    },
    /// A checkpoint is complete.
    Checkpoint {
        /// Of which version.
        #[schema(value_type = String)]
        version: Version,
    },
    /// The run's state changed.
    State {
        /// To this.
        state: RunState,
        /// Why.
        reason: String,
    },
}

/// Who may do what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum KeyRole {
    /// Look: runs, parameters, events.
    Reader,
    /// Work: leases, contributions, shards, logs, and all that a reader may.
    Worker,
    /// Everything, keys included.
    Admin,
}

/// The body of `POST /v1/keys`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KeyRequest {
    /// What it allows.
    pub role: KeyRole,
    /// For which run; for all where it is left out.
    #[serde(default)]
    pub run: Option<String>,
    /// Seconds until it expires; never where it is left out.
    #[serde(default)]
    pub seconds: Option<f64>,
}

/// The answer to `POST /v1/keys`: the only time the key is shown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct KeyIssued {
    /// The key's public name.
    pub id: String,
    /// The key itself.
    pub key: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_is_kept_or_named() {
        let hash = "ab".repeat(32);
        let kept = format!(r#"{{"hash":"{hash}","samples":4,"bytes":100}}"#);
        let named = r#"{"name":"fashion/train","samples":60000}"#;
        for (text, shard, id) in [
            (kept.as_str(), ShardRef::kept(hash.clone(), 4, 100), hash.as_str()),
            (named, ShardRef::named("fashion/train", 60_000), "fashion/train"),
        ] {
            assert_eq!(serde_json::from_str::<ShardRef>(text).expect("a shard"), shard);
            assert_eq!(serde_json::to_string(&shard).expect("JSON"), text);
            assert_eq!(shard.id(), id);
        }
        assert!(serde_json::from_str::<ShardRef>(r#"{"name":"x"}"#).is_err());
    }
}
