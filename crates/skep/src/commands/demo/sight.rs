//! Looks at a run again and again, whether its hive is there or not.

use std::time::Duration;

use skep_wire::{Measurement, Progress};
use skep_worker::{Client, ClientSettings};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::failure::Failure;

/// How often the run is looked at.
const EVERY: Duration = Duration::from_millis(80);

/// What was last seen of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// How often the hive has answered.
    pub(super) looks: u64,
    /// Whether it answered the last time.
    pub(super) up: bool,
    pub(super) progress: Option<Progress>,
    pub(super) measured: Vec<Measurement>,
}

impl Seen {
    pub(super) fn version(&self) -> u64 {
        self.progress.as_ref().map_or(0, |progress| progress.version.number)
    }

    pub(super) fn durable(&self) -> u64 {
        self.progress.as_ref().map_or(0, |progress| progress.durable.number)
    }

    pub(super) fn samples(&self) -> u64 {
        self.progress.as_ref().map_or(0, |progress| progress.samples)
    }

    pub(super) fn is_over(&self) -> bool {
        self.progress.as_ref().is_some_and(|progress| progress.state.is_final())
    }
}

/// Whoever looks; ends when it is dropped.
pub(super) struct Sight {
    seen: watch::Receiver<Seen>,
    looking: JoinHandle<()>,
}

impl Sight {
    pub(super) fn new(url: &str, run: &str) -> Result<Self, Failure> {
        // One attempt each: a hive that is down is part of the picture.
        let client = Client::new(ClientSettings {
            url: url.to_owned(),
            patience: Duration::ZERO,
            ..ClientSettings::default()
        })?;
        let (sender, seen) = watch::channel(Seen::default());
        let run = run.to_owned();
        let looking = tokio::spawn(async move {
            let mut measured = Vec::new();
            loop {
                let progress = client.progress(&run).await.ok();
                if let Ok(history) = client.history(&run, 1).await {
                    measured = history.measured;
                }
                sender.send_modify(|seen| {
                    seen.up = progress.is_some();
                    seen.looks += u64::from(seen.up);
                    seen.progress = progress.or_else(|| seen.progress.take());
                    seen.measured.clone_from(&measured);
                });
                tokio::time::sleep(EVERY).await;
            }
        });
        Ok(Self { seen, looking })
    }

    pub(super) fn now(&self) -> Seen {
        self.seen.borrow().clone()
    }
}

impl Drop for Sight {
    fn drop(&mut self) {
        self.looking.abort();
    }
}
