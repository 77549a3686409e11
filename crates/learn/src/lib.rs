//! Models, and the numbers of one worker: parameters in, gradients and counts out.
//!
//! [`Task`] ties a model to its data and is what the binary looks up by name; [`Compute`] is what
//! a worker's loop calls. [`BurnTask`] is what one writes to bring a model of one's own: a Burn
//! module, its loss and its data; [`Burn`] makes a [`Task`] of it. [`models`] has those that come
//! with Skep.
//!
//! Names, shapes and layouts in frames are PyTorch's. A worker computes on one thread; see
//! [`threads`].

pub mod classify;
pub mod fused;
pub mod models;
pub mod random;
pub mod threads;
pub mod tokens;

mod burn_task;
mod error;
mod inference;
mod state;
mod task;

pub use burn_task::{Burn, BurnTask};
pub use error::LearnError;
pub use inference::{Assets, Encoder, ImageForm, Inference, Input};
pub use models::tasks;
pub use task::{Compute, Task};
