//! What the models of texts share: settings, data, and batches as numbers of words.

use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Int, Tensor};
use serde_json::{Map, Value, json};
use skep_data::vocabulary::{MOST_LENGTH, MOST_NUMBERS};
use skep_data::{Column, Corpus, Dataset, Table, Vocabulary, VocabularySettings, corpus};
use skep_wire::{Dtype, Job};

use crate::tokens::Tokens;
use crate::{Assets, Encoder, Inference, Input, LearnError, classify};

/// The most floats of a vector or state.
const MOST_SIZE: usize = 4096;

/// `model.settings` of a model of texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextSettings {
    /// Numbers of words, the two for padding and unknown words included.
    pub words: usize,
    /// How many words of a text count: its last ones.
    pub length: usize,
    /// Floats of a word's vector.
    pub dimension: usize,
    /// Floats of the state of each direction; 0 for models that have none.
    pub hidden: usize,
}

impl TextSettings {
    /// Takes over what a job says.
    pub fn changed(self, model: &str, settings: &Map<String, Value>) -> Result<Self, LearnError> {
        let mut changed = self;
        for (name, value) in settings {
            let (into, least, most) = match name.as_str() {
                "words" => (&mut changed.words, 3, MOST_NUMBERS),
                "length" => (&mut changed.length, 1, MOST_LENGTH),
                "dimension" => (&mut changed.dimension, 1, MOST_SIZE),
                "hidden" if self.hidden > 0 => (&mut changed.hidden, 1, MOST_SIZE),
                _ => {
                    let hidden = if self.hidden > 0 { ", hidden" } else { "" };
                    return Err(LearnError::Setting {
                        model: model.to_owned(),
                        reason: format!(
                            "there is no `{name}`; there are words, length, dimension{hidden}"
                        ),
                    });
                }
            };
            let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
            *into = number.filter(|number| (least..=most).contains(number)).ok_or_else(|| {
                LearnError::Setting {
                    model: model.to_owned(),
                    reason: format!("`{name}` is a whole number from {least} to {most}"),
                }
            })?;
        }
        Ok(changed)
    }

    /// Opens texts, and makes the vocabulary of the training texts.
    pub fn dataset(self, source: &str) -> Result<Dataset, LearnError> {
        let settings = VocabularySettings { words: self.words, length: self.length };
        Ok(Corpus::open(source)?.dataset(settings)?)
    }

    /// What makes batches of texts for a trained model: its run's vocabulary.
    pub fn encoder(self, assets: &Assets) -> Result<Box<dyn Encoder>, LearnError> {
        let name = Vocabulary::ASSET;
        let refuse = |reason: String| LearnError::Asset { name: name.to_owned(), reason };
        let bytes = assets.get(name).ok_or_else(|| refuse("is missing".to_owned()))?;
        let vocabulary = Vocabulary::parse(name, bytes)?;
        if vocabulary.numbers() > self.words {
            let (found, words) = (vocabulary.numbers(), self.words);
            return Err(refuse(format!("has {found} numbers, of which the model knows {words}")));
        }
        Ok(Box::new(ByVocabulary(vocabulary)))
    }

    /// The texts of a batch.
    pub fn tokens(self, batch: &Table) -> Result<Tokens, LearnError> {
        Tokens::of(classify::column(batch, "tokens")?, self.words)
    }
}

/// What the run of a model of texts keeps besides its parameters.
pub const ASSETS: &[&str] = &[Vocabulary::ASSET];

/// What the models of texts can be asked.
pub fn inference() -> Inference {
    Inference { input: Input::Text, classes: corpus::CLASSES.map(str::to_owned).to_vec() }
}

/// Cuts texts into words and looks up their numbers, as it was done with the training texts.
struct ByVocabulary(Vocabulary);

impl Encoder for ByVocabulary {
    fn encode(&self, texts: &[String]) -> Result<Table, LearnError> {
        let numbers = texts.iter().flat_map(|text| self.0.encode(text));
        Ok(Table::new(vec![Column {
            name: "tokens".to_owned(),
            dtype: Dtype::U16,
            shape: vec![self.0.length()],
            bytes: numbers.flat_map(u16::to_le_bytes).collect(),
        }])?)
    }
}

/// The verdicts of a batch.
pub fn labels(batch: &Table, device: &Device) -> Result<Tensor<1, Int>, LearnError> {
    classify::labels(classify::column(batch, "label")?, corpus::CLASSES.len(), device)
}

/// What the tasks of texts have in common. The rate holds for two workers with a batch of 100.
pub fn defaults(epochs: u64, rate: f64) -> Job {
    let settings = |value: Value| match value {
        Value::Object(settings) => settings,
        _ => Map::new(),
    };
    let mut job = Job {
        policy: settings(json!({ "kind": "sync", "slots": 2 })),
        optimiser: settings(json!({
            "kind": "adam",
            "rate": rate,
            "schedule": { "kind": "cosine" },
        })),
        ..Job::default()
    };
    corpus::BUILT_IN.clone_into(&mut job.data.source);
    job.run.epochs = epochs;
    job.train.batch = 100;
    job
}

/// A vector for each word: PyTorch's `Embedding`, drawn from a narrower range.
#[derive(Module, Debug)]
pub struct WordVectors {
    /// `[words, dimension]`.
    pub weight: Param<Tensor<2>>,
}

impl WordVectors {
    /// For so many words.
    pub fn new(settings: TextSettings, device: &Device) -> Self {
        let shape = [settings.words, settings.dimension];
        Self { weight: Initializer::Zeros.init(shape, device) }
    }
}
