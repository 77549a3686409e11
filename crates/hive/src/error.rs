//! What can go wrong in a hive, and the one shape in which a client hears of it.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use skep_core::Refusal;
use skep_wire::{ErrorBody, ErrorCode, WireError};
use thiserror::Error;

/// What keeps a hive from starting or going on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HiveError {
    /// The store.
    #[error(transparent)]
    Data(#[from] skep_data::DataError),
    /// A run that cannot be.
    #[error("run `{run}`: {message}")]
    Run {
        /// Which.
        run: String,
        /// What is wrong with it.
        message: String,
    },
    /// Certificates.
    #[error("TLS: {0}")]
    Tls(String),
    /// Keys.
    #[error("keys: {0}")]
    Keys(String),
    /// The socket.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What came of it.
        source: std::io::Error,
    },
    /// Another hive claimed the store.
    #[error(
        "another hive (generation {newer}) has taken over the store; this one (generation {own}) stops"
    )]
    Replaced {
        /// Its generation.
        newer: u64,
        /// Ours.
        own: u64,
    },
}

/// An answer that is not a success.
#[derive(Debug, Clone)]
pub struct ApiError(pub ErrorBody);

impl ApiError {
    /// With what a person should know, and what to do.
    pub fn new(code: ErrorCode, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self(ErrorBody { code, message: message.into(), hint: hint.into() })
    }

    /// A malformed request.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::BadRequest, message, "see /openapi.json for what the route takes")
    }

    /// Nothing of that name.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::NotFound, message, "")
    }

    /// The hive goes down.
    pub fn closing() -> Self {
        Self::new(ErrorCode::Closing, "the hive is going down", "try again; it may come back")
    }

    /// The hive's own fault; the detail is in its log.
    pub fn internal(detail: &dyn std::fmt::Display) -> Self {
        tracing::error!("{detail}");
        Self::new(ErrorCode::Internal, "the hive failed to do this", "its log says why")
    }
}

impl From<WireError> for ApiError {
    fn from(error: WireError) -> Self {
        let code = match &error {
            WireError::Mismatch(_) | WireError::Schema(_) => ErrorCode::WrongSchema,
            WireError::TooLarge { .. } => ErrorCode::TooLarge,
            _ => ErrorCode::BadRequest,
        };
        Self::new(code, error.to_string(), "")
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let again = "take a new lease";
        match refusal {
            Refusal::OtherGeneration => Self::new(
                ErrorCode::OtherGeneration,
                "the contribution was made under another generation of the hive",
                again,
            ),
            Refusal::Gone(why) => Self::new(ErrorCode::LeaseGone, why, again),
            Refusal::NotRunning(why) => Self::new(ErrorCode::NotRunning, why, ""),
            Refusal::WrongRange(what) => Self::new(
                ErrorCode::WrongRange,
                what,
                "contributions go on from the lease's cursor, one after the other",
            ),
            Refusal::TooStale { staleness, allowed } => Self::new(
                ErrorCode::TooStale,
                format!("made {staleness} versions ago; the policy allows {allowed}"),
                again,
            ),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.0.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let code = self.0.code;
        let mut response = (status, Json(self.0)).into_response();
        let headers = response.headers_mut();
        if matches!(code, ErrorCode::Busy | ErrorCode::Closing) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if code == ErrorCode::Unauthorised {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // What is left of a refused body is not worth reading.
        if matches!(code, ErrorCode::TooLarge | ErrorCode::TooSlow | ErrorCode::Unauthorised) {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}
