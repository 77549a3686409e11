//! A lock on a store in a folder: two commands on one machine do not take a store from each other
//! by accident. (Hives on different machines have generations for that.)

use std::fs::{File, TryLockError};

use skep_data::Store;

/// Held as long as it lives; the operating system lets go of it with the process.
pub(crate) struct StoreLock {
    _file: Option<File>,
}

impl StoreLock {
    /// Takes the lock, or says that another process has it. A store without files has none.
    pub(crate) fn take(store: &Store) -> Option<Self> {
        let file = store
            .local_path("hive.lock")
            .and_then(|path| File::options().create(true).append(true).open(path).ok());
        match &file {
            Some(open) if matches!(open.try_lock(), Err(TryLockError::WouldBlock)) => None,
            _ => Some(Self { _file: file }),
        }
    }
}
