//! The hive: the server that keeps a run's parameters, versioned.
//!
//! It never runs a model: it adds, averages, stores and hands out. Each run has a thread of its
//! own (the keeper) that owns the control state (`core`) and the numbers (`model`), and takes one
//! command at a time; routes translate between HTTP and those commands.
//!
//! ```text
//! route (decode, check) → keeper (core event → policy) → model (sum, step) → published snapshot
//! ```

mod access;
mod body;
mod budget;
mod checkpointer;
mod deadlines;
mod error;
mod events;
mod history;
mod hive;
mod keeper;
mod metrics;
mod metrics_files;
mod model;
mod openapi;
mod published;
mod routes;
mod run_handle;
mod server;
mod spool;
mod tensorboard;
mod tls;

pub use access::{Access, IssuedKey};
pub use deadlines::Deadlines;
pub use error::{ApiError, HiveError};
pub use hive::{Hive, HiveSettings};
pub use openapi::document as openapi_document;
pub use routes::app;
pub use server::{Server, serve};
pub use tls::{TlsIdentity, fingerprint};
