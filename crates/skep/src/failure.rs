//! What a person is told when a command fails: what, why, what to do; and the exit code.

use std::error::Error;
use std::fmt;

use skep_data::DataError;
use skep_hive::{ApiError, HiveError};
use skep_serve::ServeError;
use skep_wire::ErrorCode;
use skep_worker::{ClientError, WorkerError};

/// A failed command.
#[derive(Debug)]
pub(crate) struct Failure {
    /// 2 for the user's mistakes, 1 for the rest.
    pub(crate) code: u8,
    pub(crate) message: String,
    pub(crate) hint: String,
}

impl Failure {
    /// The user can mend it.
    pub(crate) fn mistake(message: impl Into<String>) -> Self {
        Self { code: 2, message: message.into(), hint: String::new() }
    }

    /// The user cannot help it.
    pub(crate) fn fault(message: impl Into<String>) -> Self {
        Self { code: 1, message: message.into(), hint: String::new() }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        if !self.hint.is_empty() {
            write!(f, "\nhint: {}", self.hint)?;
        }
        Ok(())
    }
}

/// An error with its causes on one line.
pub(crate) fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        let code = match &error {
            DataError::NoSpace { .. } | DataError::Store { .. } | DataError::Damaged { .. } => 1,
            _ => 2,
        };
        Self { code, message: causes(&error), hint: String::new() }
    }
}

impl From<skep_learn::LearnError> for Failure {
    fn from(error: skep_learn::LearnError) -> Self {
        Self::mistake(causes(&error))
    }
}

impl From<HiveError> for Failure {
    fn from(error: HiveError) -> Self {
        match error {
            HiveError::Data(error) => error.into(),
            HiveError::Tls(_) | HiveError::Keys(_) => Self::mistake(error.to_string()),
            other => Self::fault(causes(&other)),
        }
    }
}

fn code_of(code: ErrorCode) -> u8 {
    match code {
        ErrorCode::Internal | ErrorCode::Busy | ErrorCode::Closing | ErrorCode::TooSlow => 1,
        _ => 2,
    }
}

impl From<ApiError> for Failure {
    fn from(ApiError(body): ApiError) -> Self {
        Self { code: code_of(body.code), message: body.message, hint: body.hint }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Settings(message) => Self::mistake(message),
            ClientError::Refused(body) => {
                Self { code: code_of(body.code), message: body.message, hint: body.hint }
            }
            ClientError::Unreachable { ref reason, .. } if reason.starts_with("TLS") => {
                Self::fault(error.to_string())
                    .hint("give the hive's fingerprint with --pin, or its authority with --ca")
            }
            ClientError::Unreachable { .. } => Self::fault(error.to_string())
                .hint("start one with `skep hive`, or give its address with --hive or SKEP_HIVE"),
            other => Self::fault(other.to_string()),
        }
    }
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Self {
        match error {
            ServeError::Model { message, hint } => Self::mistake(message).hint(hint),
            ServeError::Data(error) => error.into(),
            ServeError::Learn(error) => error.into(),
            ServeError::Client(error) => error.into(),
            other => Self::fault(causes(&other)),
        }
    }
}

impl From<WorkerError> for Failure {
    fn from(error: WorkerError) -> Self {
        match error {
            WorkerError::Client(error) => error.into(),
            WorkerError::UnknownModel { .. } | WorkerError::OtherSchema { .. } => {
                Self::mistake(error.to_string())
            }
            WorkerError::NotKept { .. } => Self::mistake(error.to_string())
                .hint("start a worker of the program that made the run, where the data is"),
            other => Self::fault(causes(&other)),
        }
    }
}
