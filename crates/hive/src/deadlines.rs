//! How long a hive waits for others.

use std::time::Duration;

/// The slowest that a body may come, once a first grace is used up.
const SLOWEST_BYTES_PER_SECOND: u64 = 32 << 10;

/// How long a hive waits for others before it lets them go.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// For a handshake, and for the head of a request.
    pub head: Duration,
    /// For the next bytes of a body; also the grace before its rate counts.
    pub body: Duration,
    /// For a client to take some of what it asked for.
    pub write: Duration,
    /// For open requests, once the hive goes down.
    pub drain: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            head: Duration::from_secs(10),
            body: Duration::from_secs(20),
            write: Duration::from_secs(30),
            drain: Duration::from_secs(5),
        }
    }
}

/// The time that so many bytes may take at the slowest.
pub(crate) fn time_for(bytes: usize) -> Duration {
    Duration::from_secs_f64(bytes as f64 / SLOWEST_BYTES_PER_SECOND as f64)
}
