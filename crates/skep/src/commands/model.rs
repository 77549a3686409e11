//! `skep model`: what one does with trained models besides serving them.

use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Subcommand};
use skep_learn::Task;

use crate::failure::Failure;

mod average;
mod convert;
pub(crate) mod evaluate;
mod export;
mod inspect;
mod pull;

/// What to do with which models.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelFlags {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Clone, Debug)]
enum Action {
    /// Average models of the same layers: .safetensors, .npz, .h5, .keras, .pt, .pth
    Average(average::AverageFlags),
    /// Measure models on a task's test data, one by one and as an ensemble
    Evaluate(evaluate::EvaluateFlags),
    /// Show what is in a model file: tensors, numbers, layers
    Inspect(inspect::InspectFlags),
    /// Write a model file in another format, to the bit
    Convert(convert::ConvertFlags),
    /// Fetch a version of a run from a hive or a store, with all that is needed to use it
    Pull(Box<pull::PullFlags>),
    /// Write a trained model as ONNX
    Export(export::ExportFlags),
}

pub(crate) fn model(flags: ModelFlags, tasks: &[Arc<dyn Task>]) -> Result<ExitCode, Failure> {
    match flags.action {
        Action::Average(flags) => average::average(&flags),
        Action::Evaluate(flags) => evaluate::evaluate(&flags, tasks),
        Action::Inspect(flags) => inspect::inspect(&flags),
        Action::Convert(flags) => convert::convert(&flags),
        Action::Pull(flags) => pull::pull(&flags),
        Action::Export(flags) => export::export(&flags, tasks),
    }
}
