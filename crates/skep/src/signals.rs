//! SIGTERM and SIGINT: the first asks to end in good order, the second ends at once.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM};

use crate::failure::Failure;

/// A flag that either signal sets. A second one ends the process with 143 or 130.
pub(crate) fn flag() -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    for (signal, code) in [(SIGTERM, 143), (SIGINT, 130)] {
        signal_hook::flag::register_conditional_shutdown(signal, code, flag.clone())
            .and_then(|_| signal_hook::flag::register(signal, flag.clone()))
            .map_err(|error| Failure::fault(format!("signal handlers: {error}")))?;
    }
    Ok(flag)
}

/// Resolves when the flag is set.
pub(crate) async fn raised(flag: &AtomicBool) {
    while !flag.load(std::sync::atomic::Ordering::Relaxed) {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}
