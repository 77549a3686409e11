//! What a trained model takes from people and answers with: enough for a server to turn a
//! photograph or a sentence into a batch, without knowing the model.

use std::collections::BTreeMap;

use skep_data::Table;

use crate::LearnError;

/// A run's assets by name: what a model needs besides its parameters.
pub type Assets = BTreeMap<String, Vec<u8>>;

/// Makes batches of texts. It is made once and asked by many threads.
pub trait Encoder: Send + Sync {
    /// A batch with a row per text.
    fn encode(&self, texts: &[String]) -> Result<Table, LearnError>;
}

/// What a model can be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inference {
    /// What it takes.
    pub input: Input,
    /// What it tells apart, in the order of its scores.
    pub classes: Vec<String>,
}

/// What a model takes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Input {
    /// A picture: bytes of `shape` in the column `column` of a batch.
    Image {
        /// The column.
        column: String,
        /// Channels (1 or 3), height, width.
        shape: [usize; 3],
        /// How the pictures it was trained on were made.
        form: ImageForm,
    },
    /// A text, which the [`Encoder`] of the task makes a batch of.
    Text,
}

/// How a model's pictures were made, so that others can be made the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageForm {
    /// One figure in light ink on black, fitted into the middle and centred by its mass: MNIST's.
    Ink,
    /// The whole picture, resized.
    Photograph,
}
