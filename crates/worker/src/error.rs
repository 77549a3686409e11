//! What can go wrong between a worker and its hive.

use skep_wire::{ErrorBody, ErrorCode, WireError};
use thiserror::Error;

/// What came of a request.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The address or the settings cannot be used.
    #[error("{0}")]
    Settings(String),
    /// No connection, or it broke. Worth trying again.
    #[error("cannot reach the hive at {url}: {reason}")]
    Unreachable {
        /// Where.
        url: String,
        /// Why.
        reason: String,
    },
    /// The hive answered with an error.
    #[error("{}{}", .0.message, if .0.hint.is_empty() { String::new() } else { format!(" ({})", .0.hint) })]
    Refused(ErrorBody),
    /// The hive answered with something else than it should.
    #[error("the hive's answer cannot be read: {0}")]
    Answer(String),
    /// The work was called off.
    #[error("called off")]
    Stopped,
}

impl ClientError {
    /// The hive's error code, if it gave one.
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Refused(body) => Some(body.code),
            _ => None,
        }
    }

    /// Whether the same request may succeed later.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused(body) => {
                matches!(body.code, ErrorCode::Busy | ErrorCode::Closing | ErrorCode::TooSlow)
            }
            _ => false,
        }
    }
}

impl From<WireError> for ClientError {
    fn from(error: WireError) -> Self {
        Self::Answer(error.to_string())
    }
}

/// What ends a worker.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The hive.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The run's model is not one that this program knows.
    #[error("run `{run}` trains `{kind}`, which this program does not know; it knows {known}")]
    UnknownModel {
        /// The run.
        run: String,
        /// Its model.
        kind: String,
        /// What there is.
        known: String,
    },
    /// The run's tensors are not those of the model.
    #[error(
        "run `{run}` has other tensors than this program's `{kind}`; use the version of Skep that made it"
    )]
    OtherSchema {
        /// The run.
        run: String,
        /// Its model.
        kind: String,
    },
    /// The run's data is where this program cannot read it.
    #[error(
        "run `{run}` has data that its hive does not keep (`{shard}`); this program cannot read it"
    )]
    NotKept {
        /// The run.
        run: String,
        /// A shard of it.
        shard: String,
    },
    /// The model.
    #[error(transparent)]
    Learn(#[from] skep_learn::LearnError),
    /// The data.
    #[error(transparent)]
    Data(#[from] skep_data::DataError),
    /// The operating system.
    #[error("{0}")]
    System(String),
}
