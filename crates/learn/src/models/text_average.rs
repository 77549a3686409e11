//! Reaches 88.3 % on the Large Movie Review Dataset in 5 epochs; 320,034 parameters.
//!
//! The mean of the vectors of a text's words, and a linear layer: no order of words, and still hard
//! to beat. `tests/torch.rs` checks it against PyTorch, and
//! `skep/tests/texts.rs` on the built-in texts (90 %).

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use serde_json::{Map, Value};
use skep_data::corpus::CLASSES;
use skep_data::{Dataset, Table};
use skep_wire::{EvaluationCounts, Job};

use super::text::{self, TextSettings, WordVectors};
use crate::fused::Activation::Identity;
use crate::tokens::Tokens;
use crate::{Assets, BurnTask, Encoder, Inference, LearnError, classify, fused};

/// The model.
#[derive(Module, Debug)]
pub struct Model {
    embedding: WordVectors,
    fc: Linear,
}

impl Model {
    /// Logits `[batch, 2]`.
    pub fn forward(&self, tokens: &Tokens) -> Tensor<2> {
        let mean = fused::mean_of_words(self.embedding.weight.val(), tokens);
        fused::linear(mean, &self.fc, Identity)
    }
}

/// The task: whether a review praises or blames.
#[derive(Clone, Copy, Debug)]
pub struct TextAverage(TextSettings);

impl Default for TextAverage {
    fn default() -> Self {
        Self(TextSettings { words: 20_000, length: 400, dimension: 16, hidden: 0 })
    }
}

impl BurnTask for TextAverage {
    type Model = Model;

    fn name(&self) -> &str {
        "text-average"
    }

    fn about(&self) -> &str {
        "the mean of word vectors and a linear layer, for reviews that praise or blame"
    }

    fn aliases(&self) -> &[&str] {
        &["imdb"]
    }

    fn configured(&self, settings: &Map<String, Value>) -> Result<Self, LearnError> {
        self.0.changed(self.name(), settings).map(Self)
    }

    fn defaults(&self) -> Job {
        text::defaults(5, 0.0125)
    }

    fn dataset(&self, source: &str) -> Result<Dataset, LearnError> {
        self.0.dataset(source)
    }

    fn model(&self, device: &Device) -> Model {
        Model {
            embedding: WordVectors::new(self.0, device),
            fc: LinearConfig::new(self.0.dimension, CLASSES.len()).init(device),
        }
    }

    fn loss(&self, model: &Model, batch: &Table, device: &Device) -> Result<Tensor<1>, LearnError> {
        let labels = text::labels(batch, device)?;
        Ok(classify::cross_entropy(model.forward(&self.0.tokens(batch)?), labels))
    }

    fn evaluate(
        &self,
        model: &Model,
        batch: &Table,
        device: &Device,
    ) -> Result<EvaluationCounts, LearnError> {
        let labels = text::labels(batch, device)?;
        Ok(classify::counts(model.forward(&self.0.tokens(batch)?), labels))
    }

    fn inference(&self, _job: &Job) -> Option<Inference> {
        Some(text::inference())
    }

    fn assets(&self) -> &[&str] {
        text::ASSETS
    }

    fn encoder(&self, assets: &Assets) -> Result<Box<dyn Encoder>, LearnError> {
        self.0.encoder(assets)
    }

    fn infer(
        &self,
        model: &Model,
        batch: &Table,
        _device: &Device,
    ) -> Result<Tensor<2>, LearnError> {
        Ok(model.forward(&self.0.tokens(batch)?))
    }
}
