//! Writes checkpoints in the background, so that updates never wait for a disk.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use skep_core::Status;
use skep_data::{Checkpoint, DataError, RunFiles, newest_generation};
use skep_math::OptimiserState;
use skep_wire::{Dtype, Frame, FrameView, Layout, LeaseId, Version, WireError};
use tokio::sync::{mpsc, oneshot, watch};

use crate::budget::Spent;
use crate::keeper::Command;
use crate::metrics_files::MetricsFiles;
use crate::published::frame_bytes;
use crate::spool::SpoolEntry;

/// One version with everything needed to go on from it. Holding it copies nothing.
#[derive(Clone)]
pub(crate) struct Material {
    pub(crate) version: Version,
    pub(crate) frame: Arc<Frame>,
    pub(crate) optimiser: OptimiserState,
    pub(crate) status: Status,
    pub(crate) state: Value,
}

/// What a keeper wants written.
pub(crate) enum Write {
    /// A checkpoint.
    Latest(Material),
    /// A checkpoint that is the best so far.
    Best(Material),
    /// The history, with a measurement that is new.
    Measured,
    /// The final model.
    Final(Arc<Frame>),
    /// An accepted model, whose worker waits for it to be safe.
    Spool {
        entry: SpoolEntry,
        frame: Arc<Frame>,
        /// Its bytes count as long as they are held.
        spent: Spent,
        lease: LeaseId,
        sequence: u64,
    },
    /// Spooled models that nobody needs any more.
    Unspool(Vec<String>),
    /// All that is spooled: the run has ended.
    ClearSpool,
    /// Nothing: tell when everything before is done.
    Flush(oneshot::Sender<()>),
}

/// The background writer of one run.
pub(crate) struct Checkpointer {
    pub(crate) files: RunFiles,
    pub(crate) generation: u64,
    pub(crate) keep: usize,
    pub(crate) provenance: Value,
    pub(crate) keeper: Sender<Command>,
    /// Set to a newer generation when another hive has claimed the store.
    pub(crate) replaced: watch::Sender<Option<u64>>,
    pub(crate) best: Option<Version>,
}

impl Checkpointer {
    pub(crate) async fn run(
        mut self,
        mut wishes: mpsc::UnboundedReceiver<Write>,
        mut metrics: MetricsFiles,
    ) {
        let mut written = BTreeSet::new();
        while let Some(wish) = wishes.recv().await {
            let is_end = matches!(wish, Write::Final(_));
            if matches!(wish, Write::Latest(_) | Write::Best(_) | Write::Measured) {
                // First, so that the history of a run that goes on from here has no hole.
                self.write_metrics(metrics.write_history()).await;
            }
            let result = match wish {
                Write::Measured => continue,
                Write::Flush(done) => {
                    self.write_metrics(metrics.write()).await;
                    let _ = done.send(());
                    continue;
                }
                Write::ClearSpool => {
                    if let Err(error) = self.guarded(self.files.clear_spool()).await {
                        tracing::warn!(run = self.files.run(), "spool: {error}");
                    }
                    continue;
                }
                Write::Unspool(names) => {
                    for name in names {
                        if let Err(error) = self.guarded(self.files.unspool(&name)).await {
                            tracing::warn!(run = self.files.run(), "spool: {error}");
                        }
                    }
                    continue;
                }
                Write::Spool { entry, frame, spent, lease, sequence } => {
                    let trouble = self.spool(entry, frame).await.err();
                    drop(spent);
                    Ok(Command::Spooled { lease, sequence, trouble })
                }
                Write::Latest(material) => {
                    let status = Some(material.status.clone());
                    let version = self.write_latest(&mut written, material).await;
                    version.map(|version| Command::Written { version, status })
                }
                Write::Best(material) => {
                    self.best = Some(material.version);
                    let version = self.write(&mut written, material, "best").await;
                    version.map(|version| Command::Written { version, status: None })
                }
                Write::Final(frame) => self
                    .guarded(self.files.write_final_model(frame_bytes(&frame)))
                    .await
                    .map(|()| Command::FinalWritten)
                    .map_err(|error| error.to_string()),
            };
            let message = result.unwrap_or_else(|error| {
                tracing::warn!(run = self.files.run(), "checkpoint: {error}");
                Command::Trouble(error)
            });
            // A keeper that is gone may have left more to write, and someone who waits for the end.
            let _ = self.keeper.send(message);
            if is_end {
                self.write_metrics(metrics.write_end()).await;
            } else {
                self.write_metrics(metrics.write_if_due()).await;
            }
        }
    }

    /// A store that fails for a moment is given time; a model is worth waiting for.
    async fn spool(&self, entry: SpoolEntry, frame: Arc<Frame>) -> Result<(), String> {
        let name = entry.name();
        let bytes = tokio::task::spawn_blocking(move || entry.encode(&frame));
        let bytes = bytes.await.map_err(|error| error.to_string())?;
        let bytes = bytes.map_err(|error| error.to_string())?;
        let mut pause = Duration::from_millis(100);
        loop {
            match self.guarded(self.files.spool(&name, bytes.clone())).await {
                Ok(()) => return Ok(()),
                Err(error) if pause > Duration::from_secs(1) => {
                    tracing::warn!(run = self.files.run(), "spool: {error}");
                    return Err(error.to_string());
                }
                Err(_) => tokio::time::sleep(pause).await,
            }
            pause *= 2;
        }
    }

    /// What cannot be written of metrics is no reason to stop training.
    async fn write_metrics(&self, work: impl Future<Output = Result<(), DataError>>) {
        if let Err(error) = self.guarded(work).await {
            tracing::warn!(run = self.files.run(), "metrics: {error}");
        }
    }

    /// Writes only as long as no newer hive has claimed the store.
    async fn guarded<T>(
        &self,
        work: impl Future<Output = Result<T, DataError>>,
    ) -> Result<T, DataError> {
        let newest = newest_generation(self.files.store()).await?;
        if newest > self.generation {
            self.replaced.send_replace(Some(newest));
            // The process is about to stop; nothing of ours may be written any more.
            std::future::pending::<()>().await;
        }
        work.await
    }

    /// A version whose checkpoint is there already may have become something else since: paused,
    /// measured, ended.
    async fn write_latest(
        &self,
        written: &mut BTreeSet<Version>,
        material: Material,
    ) -> Result<Version, String> {
        let version = material.version;
        if !written.contains(&version) {
            return self.write(written, material, "latest").await;
        }
        self.guarded(self.files.write_state(version, &material.state))
            .await
            .map(|()| version)
            .map_err(|error| error.to_string())
    }

    async fn write(
        &self,
        written: &mut BTreeSet<Version>,
        material: Material,
        hint: &str,
    ) -> Result<Version, String> {
        let explain = |error: DataError| error.to_string();
        let version = material.version;
        if !written.contains(&version) {
            let optimiser = tokio::task::spawn_blocking(move || encode(&material.optimiser));
            let optimiser = optimiser.await.map_err(|error| error.to_string())?;
            let checkpoint = Checkpoint {
                version,
                model: frame_bytes(&material.frame),
                optimiser: optimiser.map_err(|error| error.to_string())?,
                state: material.state,
                provenance: self.provenance.clone(),
            };
            match self.guarded(self.files.write_checkpoint(&checkpoint)).await {
                Ok(()) | Err(DataError::Exists { .. }) => {}
                Err(error) => return Err(explain(error)),
            }
            written.insert(version);
            while written.len() > 64 {
                written.pop_first();
            }
        }
        self.files.write_hint(hint, version).await.map_err(explain)?;
        let also: Vec<_> = self.best.into_iter().collect();
        self.files.retain(self.keep, &also).await.map_err(explain)?;
        Ok(version)
    }
}

/// The optimiser's state as a safetensors file.
fn encode(state: &OptimiserState) -> Result<Bytes, WireError> {
    let tensors = state
        .buffers
        .iter()
        .map(|(name, values)| (name.clone(), Dtype::F32, vec![values.len()]))
        .collect();
    let metadata = [("steps".to_owned(), state.steps.to_string())].into();
    let layout = Layout::with_metadata(tensors, Some(metadata))?;
    let mut frame = Frame::zeros(Arc::new(layout));
    for (name, values) in &state.buffers {
        if let Some(into) = frame.floats_of_mut(name) {
            into.copy_from_slice(values);
        }
    }
    Ok(frame_bytes(&Arc::new(frame)))
}

/// The optimiser's state from a safetensors file.
pub(crate) fn decode(bytes: &[u8]) -> Result<OptimiserState, WireError> {
    let view = FrameView::parse(bytes)?;
    let steps = view.metadata.get("steps").and_then(|text| text.parse().ok());
    let steps = steps.ok_or_else(|| WireError::Safetensors("no step count".to_owned()))?;
    let mut buffers = Vec::new();
    for (name, tensor) in view.tensors.tensors() {
        if tensor.dtype() != Dtype::F32 {
            return Err(WireError::Safetensors(format!("`{name}` is not F32")));
        }
        buffers.push((name, Arc::new(bytemuck::pod_collect_to_vec(tensor.data()))));
    }
    Ok(OptimiserState { steps, buffers })
}

/// Watches for a newer hive on the same store.
pub(crate) async fn watch_generation(
    store: skep_data::Store,
    own: u64,
    replaced: watch::Sender<Option<u64>>,
) {
    loop {
        tokio::time::sleep(Duration::from_secs(2)).await;
        match newest_generation(&store).await {
            Ok(newest) if newest > own => {
                replaced.send_replace(Some(newest));
                return;
            }
            Ok(_) => {}
            Err(error) => tracing::warn!("looking for a newer hive: {error}"),
        }
    }
}
