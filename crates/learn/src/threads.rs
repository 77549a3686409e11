//! One thread per worker process: at these sizes more processes scale better than more threads,
//! and a second thread would take the core of another worker.

use std::sync::Once;

/// Keeps Burn's thread pool at one thread, unless `RAYON_NUM_THREADS` asks for another number.
/// Called by every task before it computes; it takes effect once per process and has no effect on
/// a pool that is already running.
pub fn use_one() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("RAYON_NUM_THREADS").is_none() {
            // An error means that someone else has set the pool up: theirs is the choice.
            let _ = rayon::ThreadPoolBuilder::new().num_threads(1).build_global();
        }
    });
}
