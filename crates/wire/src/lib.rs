//! What travels between a hive and everyone else: the envelope in HTTP headers, tensor frames in
//! safetensors form, JSON messages, encodings and error codes.
//!
//! Everything here decodes bytes from outside, so every decoder caps first, checks with checked
//! arithmetic, and allocates last. `fuzz/` has a target per decoder.
//!
//! `wire` knows nothing of `core`, `math` or anyone: `hive` and `worker` translate.

mod envelope;
mod error;
mod frame;
mod job;
mod layout;
mod lease_id;
mod message;
mod progress;
mod schema;
mod version;

pub use envelope::{ContributionKind, Encoding, Envelope, Outcome, Receipt, Without, header};
pub use error::{ErrorBody, ErrorCode, WireError};
pub use frame::{Frame, FrameView};
pub use job::{
    CheckpointJob, DataJob, EvaluationJob, Job, LeaseJob, ModelJob, RunJob, StopJob, TrainJob,
    WorkersJob,
};
pub use layout::{Layout, TensorPlace};
pub use lease_id::LeaseId;
pub use message::*;
pub use progress::{History, Measurement, Point, Progress, TimedEvent, Usage};
pub use schema::{BufferMerge, Role, Schema, TensorSpec};
pub use version::Version;

pub use safetensors::Dtype;

/// The port a hive listens on unless told otherwise: the one the first servers of this kind used.
pub const DEFAULT_PORT: u16 = 29500;

/// The longest safetensors header a decoder looks at.
pub const MAX_HEADER_BYTES: usize = 16 << 20;
