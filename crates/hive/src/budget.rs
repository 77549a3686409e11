//! A global budget of bytes: how much of what others send may be in memory at once.

use std::sync::Arc;

use skep_wire::ErrorCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::ApiError;

/// Counted in blocks, because a semaphore's permits are 32 bits wide.
const BLOCK: usize = 4096;

/// The bytes that may be under way.
#[derive(Clone)]
pub(crate) struct Budget {
    blocks: Arc<Semaphore>,
}

/// Bytes that are under way; given back when dropped.
pub(crate) struct Spent {
    _permit: OwnedSemaphorePermit,
}

impl Budget {
    pub(crate) fn new(bytes: usize) -> Self {
        let blocks = (bytes / BLOCK).clamp(1, Semaphore::MAX_PERMITS);
        Self { blocks: Arc::new(Semaphore::new(blocks)) }
    }

    pub(crate) fn spend(&self, bytes: usize) -> Result<Spent, ApiError> {
        let busy = || {
            ApiError::new(
                ErrorCode::Busy,
                format!("{bytes} more bytes do not fit into the hive's byte budget now"),
                "try again after the time in Retry-After",
            )
        };
        let blocks = u32::try_from(bytes.div_ceil(BLOCK).max(1)).map_err(|_| busy())?;
        let permit = self.blocks.clone().try_acquire_many_owned(blocks).map_err(|_| busy())?;
        Ok(Spent { _permit: permit })
    }
}
