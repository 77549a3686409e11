//! Skep trains a model on machines that come and go.
//!
//! This crate is the facade: a program with a task of its own gets the whole command line from
//! [`main`].
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! fn main() -> ExitCode {
//!     // Put a task of your own in front: `vec![std::sync::Arc::new(skep::Burn(MyTask))]`.
//!     skep::main(skep::tasks())
//! }
//! ```
//!
//! `examples/own_task` has a model and a dataset of one's own in under 100 lines.

mod cli;
mod commands;
mod connect;
mod download;
mod failure;
mod job_file;
mod logging;
mod prepare;
mod progress;
mod signals;
mod store_lock;

pub use burn;
pub use skep_data::{Asset, Column, DataError, Dataset, Table, mnist};
pub use skep_learn::{
    Burn, BurnTask, Compute, ImageForm, Inference, Input, LearnError, Task, classify, tasks,
};
pub use skep_wire::{
    BufferMerge, Dtype, Encoding, EvaluationCounts, Frame, Job, Layout, Role, Schema, TensorSpec,
};

pub use cli::main;
