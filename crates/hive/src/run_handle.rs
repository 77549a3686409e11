//! What the rest of the hive holds of a run: its facts, its snapshots, and a way to its keeper.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use skep_wire::{Layout, RunSpec, ShardRef};
use tokio::sync::oneshot;

use crate::ApiError;
use crate::events::Events;
use crate::history::Recorder;
use crate::keeper::Command;
use crate::metrics::Counters;
use crate::published::Published;

/// A run, as routes see it.
pub(crate) struct RunHandle {
    pub(crate) spec: RunSpec,
    pub(crate) gradient_layout: Arc<Layout>,
    pub(crate) narrow_gradient_layout: Arc<Layout>,
    pub(crate) published: Arc<Published>,
    pub(crate) events: Arc<Events>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) recorder: Arc<Recorder>,
    /// By hash or name.
    pub(crate) shards: HashMap<String, ShardRef>,
    pub(crate) commands: Sender<Command>,
}

impl RunHandle {
    /// Sends a command to the keeper and waits for its answer.
    pub(crate) async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).map_err(|_| ApiError::closing())?;
        answer.await.map_err(|_| ApiError::closing())
    }
}
