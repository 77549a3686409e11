//! The two traits the rest of Skep sees: a [`Task`] is a model tied to its data, looked up by
//! name; a [`Compute`] is the numbers of one worker. Both are object-safe and say nothing of Burn,
//! so that `worker`, `serve` and the binary need no engine type, and another engine can stand
//! behind the same names.

use skep_data::{Dataset, Table};
use skep_wire::{EvaluationCounts, Frame, Job, Schema};

use crate::{Assets, Encoder, Inference, LearnError, onnx};

/// A model tied to its data, by name: what `skep train NAME` looks up.
pub trait Task: Send + Sync {
    /// The model's kind in a job, `lenet5`.
    fn name(&self) -> &str;

    /// One line for people.
    fn about(&self) -> &str;

    /// Settings that give good results without a flag.
    fn defaults(&self) -> Job;

    /// Other names that `skep train NAME` finds it by; several tasks may share one, and the first
    /// is meant unless a model is named too.
    fn aliases(&self) -> &[&str] {
        &[]
    }

    /// Whether its own data stands in where one of its other names is given and no data.
    fn stands_in(&self, _alias: &str) -> bool {
        true
    }

    /// Opens the data that a job names: a built-in name, a folder or a file.
    fn dataset(&self, job: &Job) -> Result<Dataset, LearnError>;

    /// Writes into a job what follows from its data and was not said: how many classes there are,
    /// and what they are called. Workers build the model from the job alone.
    fn settle(&self, _job: &mut Job, _dataset: &Dataset) -> Result<(), LearnError> {
        Ok(())
    }

    /// Builds the model for one worker.
    fn compute(&self, job: &Job) -> Result<Box<dyn Compute>, LearnError>;

    /// What the trained model can be asked; `None` where it is not for asking.
    fn inference(&self, _job: &Job) -> Option<Inference> {
        None
    }

    /// What the trained model needs besides its parameters to be asked, such as a vocabulary: names
    /// of the run's assets.
    fn assets(&self) -> &[&str] {
        &[]
    }

    /// What makes batches of texts, for a model that takes texts: the place of its tokeniser and
    /// vocabulary. `assets` has those that [`assets`](Self::assets) names.
    fn encoder(&self, _job: &Job, _assets: &Assets) -> Result<Box<dyn Encoder>, LearnError> {
        Err(LearnError::NoInference(self.name().to_owned()))
    }

    /// The rows that a trained model is measured on, with `assets` where they are its run's.
    fn test_rows(&self, job: &Job, _assets: &Assets) -> Result<Table, LearnError> {
        Ok(self.dataset(job)?.test)
    }

    /// The trained model as an ONNX file, where the task can write one.
    fn onnx(
        &self,
        _job: &Job,
        _parameters: &Frame,
        _assets: &Assets,
    ) -> Result<onnx::Model, LearnError> {
        Err(LearnError::NoExport(self.name().to_owned()))
    }
}

/// The numbers of one worker: parameters in, gradients and counts out. It computes on the thread
/// that calls it.
pub trait Compute: Send {
    /// The model's tensors under PyTorch's names, shapes and layouts.
    fn schema(&self) -> &Schema;

    /// Version 0: a function of the seed alone.
    fn initial(&self, seed: u64) -> Result<Frame, LearnError>;

    /// Takes a version over (layout: `Layout::of_version`, F32).
    fn load(&mut self, parameters: &Frame) -> Result<(), LearnError>;

    /// Sets buffers, such as BatchNorm's, back to those of the version that was loaded. What a
    /// contribution brings home must follow from the version and its own samples alone, not from
    /// what the worker did before.
    fn begin(&mut self) -> Result<(), LearnError> {
        Ok(())
    }

    /// Writes the mean gradient of the batch, and the buffers' new values, over `gradient`
    /// (layout: `Layout::of_gradient`, F32) and returns the mean loss. Everything random draws
    /// from `seed`, which the caller keys by (seed, epoch, position).
    fn gradient(
        &mut self,
        batch: &Table,
        seed: u64,
        gradient: &mut Frame,
    ) -> Result<f64, LearnError>;

    /// Sums over the batch, with the model in its evaluation mode.
    fn evaluate(&mut self, batch: &Table) -> Result<EvaluationCounts, LearnError>;

    /// The scores (logits) of every class for every row, row by row, with the model in its
    /// evaluation mode. The batch needs no labels.
    fn infer(&mut self, _batch: &Table) -> Result<Vec<f32>, LearnError> {
        Err(LearnError::NoInference("of this task".to_owned()))
    }

    /// How many rows [`infer`](Self::infer) computes together, where the scores of a row are the
    /// same to the last bit alone and among any others. `None` where they may not be: then a
    /// server asks each question by itself.
    fn rows_at_once(&self) -> Option<usize> {
        None
    }
}
