//! One thread that computes: its own copy of the model's numbers, and the ways to ask it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use skep_data::Table;
use skep_learn::Compute;
use skep_wire::Dtype;

use crate::model::Engine;
use crate::step::Step;
use crate::tensor::{Elements, Tensor};
use crate::{ApiError, Loaded, Model, ServeError};

/// A text is taken apart into at most so many parts to see what each is worth.
const MOST_PARTS: usize = 256;

/// So many texts go through the model at once.
const TEXTS_AT_ONCE: usize = 64;

/// What a person asks.
pub(crate) enum Question {
    /// The bytes of a PNG or JPEG file.
    Picture(Bytes),
    Text(String),
}

impl Question {
    /// How many bytes it has.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Picture(file) => file.len(),
            Self::Text(text) => text.len(),
        }
    }
}

/// What comes of it.
pub(crate) struct Verdict {
    /// The probability of every class.
    pub(crate) shares: Vec<f32>,
    /// The words of a text, with what each adds to the log-odds of the answer.
    pub(crate) words: Vec<(String, f32)>,
}

/// One thread's model.
pub(crate) struct Thread {
    model: Arc<Model>,
    /// `None` for a graph, which all threads share.
    compute: Option<Box<dyn Compute>>,
    /// The version that is loaded.
    now: Option<Arc<Loaded>>,
}

impl Thread {
    pub(crate) fn new(model: Arc<Model>) -> Result<Self, ServeError> {
        let compute = match &model.engine {
            Engine::Task(_) => Some(model.compute()?),
            Engine::Graph(_) => None,
        };
        Ok(Self { model, compute, now: None })
    }

    /// Answers with a version. An input that a model or decoder trips over must cost its own answer
    /// only.
    pub(crate) fn answer<T>(
        &mut self,
        loaded: &Arc<Loaded>,
        question: impl FnOnce(&mut Self) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let answered = catch_unwind(AssertUnwindSafe(|| {
            self.load(loaded)?;
            question(self)
        }));
        answered.unwrap_or_else(|_| {
            *self = Self::new(self.model.clone()).map_err(|error| ApiError::internal(&error))?;
            Err(ApiError::internal(&"a question made the model panic"))
        })
    }

    fn load(&mut self, loaded: &Arc<Loaded>) -> Result<(), ApiError> {
        if let Some(compute) = &mut self.compute
            && !self.now.as_ref().is_some_and(|now| Arc::ptr_eq(now, loaded))
        {
            self.now = None;
            compute.load(&loaded.parameters)?;
            self.now = Some(loaded.clone());
        }
        Ok(())
    }

    /// What is asked.
    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// The scores of a batch, row by row.
    pub(crate) fn scores(&mut self, batch: &Table) -> Result<Vec<f32>, ApiError> {
        let compute = self.compute.as_mut();
        let compute = compute.ok_or_else(|| ApiError::internal(&"a batch for a graph"))?;
        Ok(compute.infer(batch)?)
    }

    /// Answers a person.
    pub(crate) fn predict(&mut self, question: &Question) -> Result<Step<Verdict>, ApiError> {
        let file = match question {
            Question::Text(text) => return Ok(Step::Answered(self.read(text)?)),
            Question::Picture(file) => file,
        };
        let pixels = self.model.pixels(file)?;
        let verdict = |shares| Verdict { shares, words: Vec::new() };
        match &self.model.engine {
            Engine::Graph(graph) => Ok(Step::Answered(verdict(graph.shares(&pixels)?))),
            Engine::Task(_) => {
                let batch = self.model.batch_of_images(Dtype::U8, pixels)?;
                Ok(Step::Scores(batch, Box::new(move |_, scores| Ok(verdict(softmax(scores))))))
            }
        }
    }

    /// Asks about a text and about the same text without each of its words: what the answer loses
    /// is what the word was worth, in log-odds: where a model is very sure, probabilities hardly
    /// move. This needs nothing of a model but its answers. In a long text neighbours are left out
    /// together.
    fn read(&mut self, text: &str) -> Result<Verdict, ApiError> {
        let whole = self.model.batch_of_texts(&[text.to_owned()])?;
        // By itself, so that it does not depend on what else is asked.
        let scores = self.scores(&whole)?;
        let shares = softmax(&scores);
        let answer = highest(&shares);
        let words: Vec<&str> = text.split_whitespace().collect();
        if words.len() < 2 || shares.len() < 2 {
            return Ok(Verdict { shares, words: Vec::new() });
        }
        let size = words.len().div_ceil(MOST_PARTS);
        let without: Vec<String> = (0..words.len())
            .step_by(size)
            .map(|from| {
                let (before, rest) = words.split_at(from);
                let after = &rest[size.min(rest.len())..];
                [before, after].concat().join(" ")
            })
            .collect();
        let odds = log_odds(&scores, answer);
        let mut worth = Vec::with_capacity(without.len());
        for texts in without.chunks(TEXTS_AT_ONCE) {
            let batch = self.model.batch_of_texts(texts)?;
            let scores = self.scores(&batch)?;
            let rows = scores.chunks_exact(shares.len());
            worth.extend(rows.map(|row| (odds - log_odds(row, answer)) as f32));
        }
        let worth = worth.iter().flat_map(|worth| std::iter::repeat_n(*worth, size));
        let words = words.iter().map(|word| (*word).to_owned()).zip(worth).collect();
        Ok(Verdict { shares, words })
    }

    /// Answers tensors with tensors, all outputs of the model, of which `finish` makes an answer.
    pub(crate) fn infer<T: 'static>(
        &mut self,
        inputs: Vec<Tensor>,
        finish: impl FnOnce(&Model, &[Tensor]) -> Result<T, ApiError> + 'static,
    ) -> Result<Step<T>, ApiError> {
        if let Engine::Graph(graph) = &self.model.engine {
            let outputs = graph.run(inputs)?;
            return Ok(Step::Answered(finish(&self.model, &outputs)?));
        }
        let Some(Tensor { shape, datatype, elements, .. }) = inputs.into_iter().next() else {
            return Err(ApiError::internal(&"no input"));
        };
        let batch = match elements {
            Elements::Texts(texts) => self.model.batch_of_texts(&texts)?,
            Elements::Numbers(bytes) => {
                let dtype = datatype.in_table();
                let dtype = dtype.ok_or_else(|| ApiError::internal(&"a type no task takes"))?;
                self.model.batch_of_images(dtype, bytes)?
            }
        };
        let rows = shape.first().copied().unwrap_or(0);
        let finish = move |model: &Model, logits: &[f32]| {
            let classes = model.classes().len();
            if classes == 0 || logits.len() != rows * classes {
                return Err(ApiError::internal(&"the model gave another number of scores"));
            }
            let shares: Vec<f32> = logits.chunks_exact(classes).flat_map(softmax).collect();
            let shape = vec![rows, classes];
            let outputs = [
                Tensor::floats("probabilities", shape.clone(), &shares),
                Tensor::floats("logits", shape, logits),
            ];
            finish(model, &outputs)
        };
        Ok(Step::Scores(batch, Box::new(finish)))
    }
}

/// Probabilities from scores.
pub(crate) fn softmax(logits: &[f32]) -> Vec<f32> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = logits.iter().map(|&score| f64::from(score - highest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| (power / sum) as f32).collect()
}

/// The logarithm of how much likelier one of several classes is than all others together.
fn log_odds(logits: &[f32], class: usize) -> f64 {
    let others = || logits.iter().enumerate().filter(|(at, _)| *at != class).map(|(_, it)| *it);
    let highest = f64::from(others().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = others().map(|score| (f64::from(score) - highest).exp()).sum();
    f64::from(logits[class]) - highest - sum.ln()
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
