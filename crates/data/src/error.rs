//! What can go wrong with data: stores, files and tables. Variants are named by what a caller can
//! do about them; messages say what was wrong, where, and what helps.

use std::error::Error as StdError;
use std::io;

use thiserror::Error;

/// What went wrong with a store, a file or a table.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// A text that cannot be opened as a store.
    #[error("`{text}` cannot be opened as a store: {reason}")]
    Location {
        /// The text.
        text: String,
        /// Why, and what to give instead.
        reason: String,
    },
    /// A path or name that cannot be one.
    #[error("`{path}` cannot be a path in a store: {reason}")]
    Path {
        /// The path or name.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A create-only write found something there.
    #[error("`{path}` is already there")]
    Exists {
        /// Where.
        path: String,
    },
    /// Nothing there.
    #[error("`{path}` is not there")]
    NotFound {
        /// Where.
        path: String,
    },
    /// The disk or quota is full.
    #[error(
        "no space left to write `{path}`; free some, or give a store elsewhere (what is there is unharmed)"
    )]
    NoSpace {
        /// What could not be written.
        path: String,
        /// What the store said.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The store does not allow it.
    #[error(
        "no permission for `{path}`; check its owner and mode, and the user this program runs as"
    )]
    NoPermission {
        /// What could not be used.
        path: String,
        /// What the store said.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The store failed in another way; trying again may help.
    #[error("the store failed at `{path}`")]
    Store {
        /// Where.
        path: String,
        /// What the store said.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The bytes in the store are not the ones that were written.
    #[error("`{path}` is damaged: {reason}")]
    Damaged {
        /// Where.
        path: String,
        /// How that shows.
        reason: String,
    },
    /// Written by a newer version of the program.
    #[error("`{path}` has format {found}; this binary reads up to {known}: use a newer one")]
    Format {
        /// Where.
        path: String,
        /// Its format.
        found: u64,
        /// The newest known here.
        known: u64,
    },
    /// Columns that do not make a table, or rows that it does not have.
    #[error("table: {0}")]
    Table(String),
    /// A dataset that cannot be used, or settings that do not fit it.
    #[error("dataset `{source_name}`: {reason}")]
    Dataset {
        /// Which dataset.
        source_name: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A file from outside that cannot be read for what it should be.
    #[error("`{path}`: {reason}")]
    File {
        /// Which file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A pickle that is no plain state dict, or is broken.
    #[error("pickle, at byte {at}: {reason}")]
    Pickle {
        /// Where in the pickle.
        at: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A model file whose tensors are not the model's.
    #[error("the tensors differ from the model's: {}", .0.join("; "))]
    Mismatch(Vec<String>),
    /// Models that have no mean.
    #[error("these have no mean with `{first}`:{files}")]
    NoAverage {
        /// What all were held against.
        first: String,
        /// What is in the way, a line each.
        files: String,
    },
}

impl DataError {
    pub(crate) fn damaged(path: &str, reason: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn file(path: &str, reason: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), reason: reason.into() }
    }

    /// Sorts what an object store said by what can be done about it.
    pub(crate) fn of_store(path: &str, error: object_store::Error) -> Self {
        let path = path.to_owned();
        match error {
            object_store::Error::NotFound { .. } => Self::NotFound { path },
            object_store::Error::AlreadyExists { .. } => Self::Exists { path },
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => {
                Self::NoPermission { path, source: error.into() }
            }
            error => {
                let kind = kind_of(&error);
                Self::of_kind(path, kind, error.into())
            }
        }
    }

    /// Sorts what the system said by what can be done about it.
    pub fn of_io(path: &str, error: io::Error) -> Self {
        let kind = Some(error.kind());
        Self::of_kind(path.to_owned(), kind, error.into())
    }

    fn of_kind(
        path: String,
        kind: Option<io::ErrorKind>,
        source: Box<dyn StdError + Send + Sync>,
    ) -> Self {
        use io::ErrorKind as Kind;
        match kind {
            Some(Kind::StorageFull | Kind::QuotaExceeded | Kind::FileTooLarge) => {
                Self::NoSpace { path, source }
            }
            Some(Kind::PermissionDenied | Kind::ReadOnlyFilesystem) => {
                Self::NoPermission { path, source }
            }
            Some(Kind::NotFound) => Self::NotFound { path },
            _ => Self::Store { path, source },
        }
    }
}

/// The kind of the system error at the bottom of an object store's, if there is one.
fn kind_of(error: &(dyn StdError + 'static)) -> Option<io::ErrorKind> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return Some(error.kind());
        }
        next = error.source();
    }
    None
}
