//! What can go wrong, and the one shape in which a client hears of it.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::json;
use skep_learn::LearnError;
use skep_wire::{ErrorBody, ErrorCode};
use thiserror::Error;

/// What keeps a server from starting.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The model cannot be read.
    #[error(transparent)]
    Data(#[from] skep_data::DataError),
    /// The model cannot be built.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// The run that is followed cannot be reached.
    #[error(transparent)]
    Client(#[from] skep_worker::ClientError),
    /// There is no such model, or nobody says what it is.
    #[error("{message}")]
    Model {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },
    /// The operating system.
    #[error("{0}")]
    System(String),
}

impl ServeError {
    pub(crate) fn model(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Model { message: message.into(), hint: hint.into() }
    }
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
    pub fn bad(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(ErrorCode::BadRequest, message, hint)
    }

    pub(crate) fn too_large(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(ErrorCode::TooLarge, message, hint)
    }

    pub(crate) fn busy(message: &str) -> Self {
        Self::new(ErrorCode::Busy, message, "try again after the time in Retry-After")
    }

    /// The server's own fault; the detail is in its log.
    pub(crate) fn internal(detail: &dyn std::fmt::Display) -> Self {
        tracing::error!("{detail}");
        Self::new(ErrorCode::Internal, "the server failed to answer this", "its log says why")
    }
}

impl From<LearnError> for ApiError {
    fn from(error: LearnError) -> Self {
        match error {
            LearnError::Column { .. } | LearnError::NoInference(_) => {
                Self::bad(error.to_string(), "/v2/models says what the model takes")
            }
            other => Self::internal(&other),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let ErrorBody { code, message, hint } = self.0;
        let status =
            StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        // `error` is where clients of the Open Inference Protocol look.
        let body = json!({ "code": code, "message": message, "hint": hint, "error": message });
        let mut response = (status, Json(body)).into_response();
        let headers = response.headers_mut();
        if matches!(code, ErrorCode::Busy | ErrorCode::Closing) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        // What is left of a refused body is not worth reading.
        if matches!(code, ErrorCode::TooLarge | ErrorCode::TooSlow) {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}
