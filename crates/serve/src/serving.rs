//! A model being served: the version that answers now, the threads that compute, and what all
//! requests share.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::pool::Pool;
use crate::step::Step;
use crate::thread::Thread;
use crate::{ApiError, Fetcher, Loaded, Model, ServeError};

/// How to serve.
#[derive(Clone, Copy, Debug)]
pub struct ServingSettings {
    /// Threads that compute.
    pub threads: usize,
    /// Questions that may wait for a thread; further ones get 503.
    pub queue: usize,
    /// Bytes that a request may have, and that a picture on the web may have.
    pub most_bytes: usize,
    /// Bytes of requests that may be in memory at once; further ones get 503.
    pub byte_budget: usize,
    /// How long a body may take to arrive.
    pub patience: Duration,
}

impl Default for ServingSettings {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            threads: cores,
            queue: 256,
            most_bytes: 10_000_000,
            byte_budget: 256 << 20,
            patience: Duration::from_secs(20),
        }
    }
}

/// A model being served.
pub struct Serving {
    pub(crate) model: Arc<Model>,
    pub(crate) settings: ServingSettings,
    pub(crate) fetcher: Fetcher,
    now: watch::Sender<Option<Arc<Loaded>>>,
    pool: Pool,
    /// One permit per kibibyte.
    budget: Arc<Semaphore>,
}

impl Serving {
    /// Starts the threads; nothing is loaded yet.
    pub fn start(
        model: Model,
        fetcher: Fetcher,
        settings: ServingSettings,
    ) -> Result<Arc<Self>, ServeError> {
        let model = Arc::new(model);
        let pool = Pool::start(&model, settings.threads, settings.queue)?;
        let budget = Arc::new(Semaphore::new((settings.byte_budget >> 10).max(1)));
        let now = watch::Sender::new(None);
        Ok(Arc::new(Self { model, settings, fetcher, now, pool, budget }))
    }

    /// What is asked.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Makes a version the one that answers from now on. Questions under way keep theirs.
    pub fn publish(&self, loaded: Loaded) {
        self.now.send_replace(Some(Arc::new(loaded)));
    }

    /// The version that answers now.
    pub fn loaded(&self) -> Option<Arc<Loaded>> {
        self.now.borrow().clone()
    }

    pub(crate) fn ready(&self) -> Result<Arc<Loaded>, ApiError> {
        self.loaded().ok_or_else(|| ApiError::busy("no version of the model has arrived yet"))
    }

    /// Has a thread answer a question of so many bytes with a version.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        loaded: &Arc<Loaded>,
        bytes: usize,
        question: impl FnOnce(&mut Thread) -> Result<Step<T>, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.pool.ask(loaded.clone(), bytes, question).await
    }

    /// Takes memory for so many bytes, given back when the permit is dropped.
    pub(crate) fn spend(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let permits = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
        self.budget
            .clone()
            .try_acquire_many_owned(permits)
            .map_err(|_| ApiError::busy("too many bytes are under way"))
    }
}
