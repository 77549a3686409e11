//! The threads that compute, each with a model of its own, behind one bounded queue. Decoding a
//! picture and reading JSON count as computing: nothing heavy runs on the async executor.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::oneshot;

use crate::thread::Thread;
use crate::{ApiError, Loaded, Model, ServeError};

/// What a thread does for one question; it sends the answer itself.
type Work = Box<dyn FnOnce(&mut Thread) + Send>;

#[derive(Default)]
struct Line {
    waiting: VecDeque<Work>,
    /// Threads that wait for work.
    idle: usize,
    closed: bool,
}

struct Queue {
    line: Mutex<Line>,
    arrived: Condvar,
    most: usize,
}

impl Queue {
    /// The next piece of work; `None` when the pool is closed.
    fn next(&self) -> Option<Work> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if line.closed {
                return None;
            }
            if let Some(work) = line.waiting.pop_front() {
                return Some(work);
            }
            line.idle += 1;
            line = self.arrived.wait(line).unwrap_or_else(PoisonError::into_inner);
            line.idle -= 1;
        }
    }
}

/// The threads.
pub(crate) struct Pool {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `threads`, which let at most `most` questions wait.
    pub(crate) fn start(
        model: &Arc<Model>,
        threads: usize,
        most: usize,
    ) -> Result<Self, ServeError> {
        let queue =
            Arc::new(Queue { line: Mutex::default(), arrived: Condvar::new(), most: most.max(1) });
        let mut pool = Self { queue: queue.clone(), threads: Vec::new() };
        for number in 0..threads.max(1) {
            let mut thread = Thread::new(model.clone())?;
            let queue = queue.clone();
            let started = std::thread::Builder::new()
                .name(format!("answer-{number}"))
                .spawn(move || {
                    while let Some(work) = queue.next() {
                        work(&mut thread);
                    }
                })
                .map_err(|error| ServeError::System(format!("starting threads: {error}")))?;
            pool.threads.push(started);
        }
        Ok(pool)
    }

    /// Has a question answered by a version; a full queue is an answer too.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        loaded: Arc<Loaded>,
        question: impl FnOnce(&mut Thread) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        let work: Work = Box::new(move |thread| {
            // Whoever asked may have left: then nobody minds, and nothing is computed.
            if !reply.is_closed() {
                let _ = reply.send(thread.answer(&loaded, question));
            }
        });
        let somebody_waits = {
            let mut line = self.queue.line.lock().unwrap_or_else(PoisonError::into_inner);
            if line.waiting.len() >= self.queue.most {
                return Err(ApiError::busy("too many questions are waiting"));
            }
            line.waiting.push_back(work);
            line.idle > 0
        };
        // Waking costs a call of the system; threads that are at work come back by themselves.
        if somebody_waits {
            self.queue.arrived.notify_one();
        }
        answer.await.map_err(|_| {
            ApiError::new(skep_wire::ErrorCode::Closing, "the server is going down", "")
        })?
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let waiting = {
            let mut line = self.queue.line.lock().unwrap_or_else(PoisonError::into_inner);
            line.closed = true;
            std::mem::take(&mut line.waiting)
        };
        drop(waiting);
        self.queue.arrived.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
