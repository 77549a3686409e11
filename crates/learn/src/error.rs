//! What can go wrong between a batch and its gradient.

use skep_wire::WireError;

/// Why a task could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LearnError {
    /// The dataset could not be opened.
    #[error("the data cannot be used")]
    Data(#[from] skep_data::DataError),
    /// A schema or frame could not be made.
    #[error("the tensors cannot be laid out")]
    Wire(#[from] WireError),
    /// A frame has other tensors than the model.
    #[error("the {what} has other tensors than model `{model}`")]
    Layout {
        /// Parameters or gradient.
        what: &'static str,
        /// Whose.
        model: String,
    },
    /// A batch lacks a column, or the column is of another kind.
    #[error("column `{name}` {reason}")]
    Column {
        /// The column.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The model holds something that has no place in a run.
    #[error("model `{model}` cannot be trained: {reason}")]
    Model {
        /// Which.
        model: String,
        /// What is in the way.
        reason: String,
    },
    /// A setting of the model's own that cannot be.
    #[error("model.settings of `{model}`: {reason}")]
    Setting {
        /// Which model.
        model: String,
        /// What is wrong, and what there is.
        reason: String,
    },
    /// What a model needs besides its parameters is missing, or another's.
    #[error("the asset `{name}` {reason}")]
    Asset {
        /// Which.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The model is trained, but says nothing about new samples.
    #[error("the model `{0}` cannot be asked: its task has no inference")]
    NoInference(String),
    /// The numbers left the range of floats.
    #[error("the loss is {0}: the model diverged")]
    NotFinite(f64),
}
