//! Heartbeats on a thread of their own, so that a long backward pass does not cost the lease.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use skep_wire::LeaseId;

use crate::{Client, ClientSettings, WorkerError};

/// What the beating thread is told.
#[derive(Default)]
struct State {
    lease: Option<(String, LeaseId, Duration)>,
    lost: bool,
    ended: bool,
}

/// Renews the lease that is held, until it is told otherwise.
pub(crate) struct Heartbeat {
    shared: Arc<(Mutex<State>, Condvar)>,
}

impl Heartbeat {
    pub(crate) fn start(settings: &ClientSettings) -> Result<Self, WorkerError> {
        let shared = Arc::new((Mutex::new(State::default()), Condvar::new()));
        let mut settings = settings.clone();
        settings.patience = Duration::ZERO;
        let client = Client::new(settings)?;
        let theirs = shared.clone();
        std::thread::Builder::new()
            .name("heartbeat".to_owned())
            .stack_size(256 << 10)
            .spawn(move || beat(&theirs, &client))
            .map_err(|error| WorkerError::System(format!("starting a thread: {error}")))?;
        Ok(Self { shared })
    }

    /// Renews this lease from now on.
    pub(crate) fn hold(&self, run: &str, lease: LeaseId, every: Duration) {
        self.change(|state| {
            state.lease = Some((run.to_owned(), lease, every));
            state.lost = false;
        });
    }

    /// Renews nothing from now on.
    pub(crate) fn release(&self) {
        self.change(|state| state.lease = None);
    }

    /// Whether the hive said that the lease is gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner).lost
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.shared.0.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.1.notify_all();
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.change(|state| state.ended = true);
    }
}

fn beat(shared: &(Mutex<State>, Condvar), client: &Client) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return;
    };
    let mut state = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if state.ended {
            return;
        }
        let held = state.lease.clone();
        let Some((run, lease, every)) = held else {
            state = shared.1.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let (next, waited) =
            shared.1.wait_timeout(state, every).unwrap_or_else(PoisonError::into_inner);
        state = next;
        let same = state.lease.as_ref().is_some_and(|(_, now, _)| *now == lease);
        if !waited.timed_out() || !same {
            continue;
        }
        drop(state);
        let renewed = runtime.block_on(client.renew(&run, lease));
        state = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        let same = state.lease.as_ref().is_some_and(|(_, now, _)| *now == lease);
        // A hive that cannot be reached may come back; one that refuses has decided.
        if same && renewed.is_err_and(|error| error.code().is_some() && !error.is_passing()) {
            state.lost = true;
            state.lease = None;
        }
    }
}
