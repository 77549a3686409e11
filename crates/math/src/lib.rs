//! Numbers on flat `f32` buffers: tree sums, optimisers, merges, clipping and finite checks.
//!
//! This is the arithmetic of a hive, kept apart from everything that decides *when* it happens.
//! Nothing here knows of tensors' names, of versions, workers or the wire: a caller lays its
//! tensors out in one flat buffer and says which ranges train.
//!
//! Two promises hold throughout. The same inputs give the same bits: every sum has a written
//! order, and that order never depends on arrival, threads or how a buffer was cut. And a step
//! either happens as a whole or not at all: what is not finite is found before it is kept.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test that unwraps an error has failed"))]

mod clip;
mod damping;
mod error;
mod finite;
mod merge;
mod optimiser;
mod outer;
mod rule;
mod schedule;
mod segment;
mod settings;
mod sum;

pub use damping::damping;
pub use error::MathError;
pub use finite::all_finite;
pub use merge::{FloatMerge, IntegerMerge, MergeRule, ema};
pub use optimiser::{Optimiser, OptimiserState, StepReport};
pub use outer::{OuterKind, OuterSettings};
pub use schedule::Schedule;
pub use segment::Segment;
pub use settings::{GroupSettings, Kind, OptimiserSettings};
pub use sum::{TreeSum, add, add_scaled, scale};
