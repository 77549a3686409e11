//! One error shape for every answer that is not a success, and what can be wrong with bytes.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

/// What a client can tell apart and act upon. Stable: clients match on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorCode {
    /// The request is malformed; sending it again will not help.
    BadRequest,
    /// No key, or one that is not known or has expired.
    Unauthorised,
    /// The key is good, but not for this.
    Forbidden,
    /// No such run, version, shard or route.
    NotFound,
    /// A run of that name exists.
    Exists,
    /// The contribution was made under another generation; its leases are void. Take a new lease.
    OtherGeneration,
    /// The base version is older than the policy allows. Take a new lease.
    TooStale,
    /// The lease lapsed, was given back or was overtaken. Take a new lease.
    LeaseGone,
    /// The range does not start at the lease's cursor or leaves its slice.
    WrongRange,
    /// NaN or infinity.
    NotFinite,
    /// The tensors are not the run's.
    WrongSchema,
    /// The body is larger than the run's frames can be.
    TooLarge,
    /// The body came too slowly.
    TooSlow,
    /// Too many bytes under way; try again after the time in `Retry-After`.
    Busy,
    /// The run is paused, stopped, done or failed.
    NotRunning,
    /// The hive is going down or was replaced by a newer one.
    Closing,
    /// The hive's fault.
    Internal,
}

impl ErrorCode {
    /// The HTTP status that goes with the code.
    pub fn status(self) -> u16 {
        match self {
            Self::BadRequest | Self::WrongRange | Self::WrongSchema | Self::NotFinite => 400,
            Self::Unauthorised => 401,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::TooSlow => 408,
            Self::Exists | Self::OtherGeneration | Self::TooStale | Self::NotRunning => 409,
            Self::LeaseGone => 410,
            Self::TooLarge => 413,
            Self::Internal => 500,
            Self::Busy | Self::Closing => 503,
        }
    }
}

/// The body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// For programs.
    pub code: ErrorCode,
    /// For people: what was wrong, and where.
    pub message: String,
    /// For people: what to do about it.
    #[serde(default)]
    pub hint: String,
}

/// What can be wrong with bytes from outside.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WireError {
    /// Not `generation.number`.
    #[error("`{0}` is not a version; versions look like `2.140`")]
    Version(String),
    /// Not 32 hexadecimal digits.
    #[error("not a lease id; lease ids have 32 hexadecimal digits")]
    LeaseId,
    /// A header of the envelope is missing.
    #[error("header `{0}` is missing")]
    HeaderMissing(&'static str),
    /// A header of the envelope cannot be read.
    #[error("header `{name}` is not {expected}")]
    HeaderInvalid {
        /// Which one.
        name: &'static str,
        /// What it should have been.
        expected: &'static str,
    },
    /// The bytes are not a safetensors file.
    #[error("not a safetensors file: {0}")]
    Safetensors(String),
    /// The file's tensors are not the expected ones.
    #[error("the tensors differ from the run's schema: {}", .0.join("; "))]
    Mismatch(Vec<String>),
    /// A schema that cannot be.
    #[error("schema: {0}")]
    Schema(String),
    /// Sizes that overflow or exceed the cap.
    #[error("{what} is {size} bytes, over the limit of {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// How large it says it is.
        size: u64,
        /// How large it may be.
        limit: u64,
    },
}
