//! The threads that compute, each with a model of its own, behind one bounded queue. Decoding a
//! picture counts as computing: nothing heavy runs on the async executor.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use bytes::Bytes;
use skep_data::Table;
use skep_learn::Compute;
use tokio::sync::oneshot;

use crate::{ApiError, Loaded, Model, ServeError};

/// For so many words it is worked out how much each one counts.
const MOST_WORDS: usize = 256;

/// What is asked.
pub(crate) enum Question {
    /// The bytes of a PNG or JPEG file.
    Picture(Bytes),
    Text(String),
    Batch(Table),
}

/// What comes of it.
pub(crate) struct Scores {
    /// Of every class, row by row.
    pub(crate) logits: Vec<f32>,
    /// The words of a text, with what each adds to the probability of the answer.
    pub(crate) words: Vec<(String, f32)>,
}

struct Job {
    question: Question,
    /// The version that answers, from start to end.
    loaded: Arc<Loaded>,
    reply: oneshot::Sender<Result<Scores, ApiError>>,
}

#[derive(Default)]
struct Line {
    jobs: VecDeque<Job>,
    closed: bool,
}

struct Queue {
    line: Mutex<Line>,
    arrived: Condvar,
    most: usize,
}

impl Queue {
    /// The next job; `None` when the pool is closed.
    fn next(&self) -> Option<Job> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if line.closed {
                return None;
            }
            if let Some(job) = line.jobs.pop_front() {
                return Some(job);
            }
            line = self.arrived.wait(line).unwrap_or_else(PoisonError::into_inner);
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
            let mut thread = Thread { compute: model.compute()?, model: model.clone(), now: None };
            let queue = queue.clone();
            let started = std::thread::Builder::new()
                .name(format!("answer-{number}"))
                .spawn(move || {
                    while let Some(job) = queue.next() {
                        // Whoever asked may have left; then nobody minds.
                        let _ = job.reply.send(thread.answer(&job.question, &job.loaded));
                    }
                })
                .map_err(|error| ServeError::System(format!("starting threads: {error}")))?;
            pool.threads.push(started);
        }
        Ok(pool)
    }

    /// Asks; a full queue is an answer too.
    pub(crate) async fn ask(
        &self,
        question: Question,
        loaded: Arc<Loaded>,
    ) -> Result<Scores, ApiError> {
        let (reply, answer) = oneshot::channel();
        {
            let mut line = self.queue.line.lock().unwrap_or_else(PoisonError::into_inner);
            if line.jobs.len() >= self.queue.most {
                return Err(ApiError::busy("too many questions are waiting"));
            }
            line.jobs.push_back(Job { question, loaded, reply });
        }
        self.queue.arrived.notify_one();
        answer.await.map_err(|_| {
            ApiError::new(skep_wire::ErrorCode::Closing, "the server is going down", "")
        })?
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.queue.line.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.queue.arrived.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// One thread's model.
struct Thread {
    model: Arc<Model>,
    compute: Box<dyn Compute>,
    /// The version that is loaded.
    now: Option<Arc<Loaded>>,
}

impl Thread {
    fn answer(&mut self, question: &Question, loaded: &Arc<Loaded>) -> Result<Scores, ApiError> {
        // An input that a model or decoder trips over must cost its own answer only.
        match catch_unwind(AssertUnwindSafe(|| self.try_answer(question, loaded))) {
            Ok(answer) => answer,
            Err(_) => {
                self.now = None;
                self.compute = self.model.compute().map_err(|error| ApiError::internal(&error))?;
                Err(ApiError::internal(&"a question made the model panic"))
            }
        }
    }

    fn try_answer(
        &mut self,
        question: &Question,
        loaded: &Arc<Loaded>,
    ) -> Result<Scores, ApiError> {
        if !self.now.as_ref().is_some_and(|now| Arc::ptr_eq(now, loaded)) {
            self.now = None;
            self.compute.load(&loaded.parameters)?;
            self.now = Some(loaded.clone());
        }
        let batch = match question {
            Question::Picture(file) => &self.model.batch_of_picture(file)?,
            Question::Text(text) => return self.read(text),
            Question::Batch(batch) => batch,
        };
        Ok(Scores { logits: self.compute.infer(batch)?, words: Vec::new() })
    }

    /// Asks about a text and about the same text without each of its words: what the answer loses
    /// is what the word was worth. This needs nothing of a model but its answers.
    fn read(&mut self, text: &str) -> Result<Scores, ApiError> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let mut texts = vec![text.to_owned()];
        if (2..=MOST_WORDS).contains(&words.len()) {
            for left_out in 0..words.len() {
                let others = words.iter().enumerate().filter(|(at, _)| *at != left_out);
                texts.push(others.map(|(_, word)| *word).collect::<Vec<_>>().join(" "));
            }
        }
        let classes = self.model.inference.classes.len().max(1);
        let mut logits = self.compute.infer(&self.model.batch_of_texts(&texts)?)?;
        let mut rows = logits.chunks_exact(classes);
        let whole = softmax(rows.next().unwrap_or_default());
        let answer = highest(&whole);
        let worth = rows.map(|row| whole[answer] - softmax(row)[answer]);
        let words = words.iter().map(|word| (*word).to_owned()).zip(worth).collect();
        logits.truncate(classes);
        Ok(Scores { logits, words })
    }
}

/// Probabilities from scores.
pub(crate) fn softmax(logits: &[f32]) -> Vec<f32> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = logits.iter().map(|&score| f64::from(score - highest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| (power / sum) as f32).collect()
}

/// The place of the highest, the first one where several are equal.
pub(crate) fn highest(values: &[f32]) -> usize {
    let mut best = 0;
    for (at, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = at;
        }
    }
    best
}
