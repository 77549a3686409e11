//! The threads that compute, each with a model of its own, behind one bounded queue. Decoding a
//! picture and reading JSON count as computing: nothing heavy runs on the async executor.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::oneshot;

use crate::step::{self, Scoring, Step};
use crate::thread::Thread;
use crate::{ApiError, Loaded, Model, ServeError};

/// Larger questions are answered by themselves: others should not wait while they are read.
const LARGEST_JOINED: usize = 64 << 10;

/// A question that waits.
struct Work {
    loaded: Arc<Loaded>,
    /// Whether it may be computed together with others.
    joins: bool,
    begin: Begin,
}

/// The first half of a question. It sends the answer itself, then or from the second half.
type Begin = Box<dyn FnOnce(&mut Thread) -> Option<Scoring> + Send>;

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
    /// So many questions are computed together at most.
    at_once: usize,
}

impl Queue {
    /// The next question and those behind it that can be computed together with it, which are
    /// shared with threads that have nothing to do; `None` when the pool is closed. Nothing is ever
    /// waited for to come along.
    fn next(&self) -> Option<Vec<Work>> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if line.closed {
                return None;
            }
            if let Some(first) = line.waiting.front() {
                let goes_along = |work: &&Work| {
                    first.joins && work.joins && Arc::ptr_eq(&work.loaded, &first.loaded)
                };
                let share = line.waiting.len().div_ceil(1 + line.idle).min(self.at_once);
                let along = line.waiting.iter().take(share).take_while(goes_along).count();
                return Some(line.waiting.drain(..along.max(1)).collect());
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
        let queue = Arc::new(Queue {
            line: Mutex::default(),
            arrived: Condvar::new(),
            most: most.max(1),
            at_once: model.at_once,
        });
        let mut pool = Self { queue: queue.clone(), threads: Vec::new() };
        for number in 0..threads.max(1) {
            let mut thread = Thread::new(model.clone())?;
            let queue = queue.clone();
            let started = std::thread::Builder::new()
                .name(format!("answer-{number}"))
                .spawn(move || {
                    while let Some(works) = queue.next() {
                        let Some(loaded) = works.first().map(|work| work.loaded.clone()) else {
                            continue;
                        };
                        let begun = works.into_iter().map(|work| (work.begin)(&mut thread));
                        let scorings = begun.flatten().collect();
                        step::finish(&mut thread, &loaded, scorings);
                    }
                })
                .map_err(|error| ServeError::System(format!("starting threads: {error}")))?;
            pool.threads.push(started);
        }
        Ok(pool)
    }

    /// Has a question of so many bytes answered by a version; a full queue is an answer too.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        loaded: Arc<Loaded>,
        bytes: usize,
        question: impl FnOnce(&mut Thread) -> Result<Step<T>, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        let version = loaded.clone();
        let begin = move |thread: &mut Thread| {
            // Whoever asked may have left: then nobody minds, and nothing is computed.
            if reply.is_closed() {
                return None;
            }
            let (batch, finish) = match thread.answer(&version, question) {
                Ok(Step::Scores(batch, finish)) => (batch, finish),
                Ok(Step::Answered(answer)) => {
                    let _ = reply.send(Ok(answer));
                    return None;
                }
                Err(error) => {
                    let _ = reply.send(Err(error));
                    return None;
                }
            };
            let finish = move |thread: &mut Thread, scores: Result<Vec<f32>, ApiError>| {
                let answer = scores.and_then(|scores| {
                    thread.answer(&version, |thread| finish(thread.model(), &scores))
                });
                let _ = reply.send(answer);
            };
            Some(Scoring { batch, finish: Box::new(finish) })
        };
        let joins = bytes <= LARGEST_JOINED;
        let work = Work { loaded, joins, begin: Box::new(begin) };
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
