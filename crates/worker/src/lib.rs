//! The worker's loop, and the client of a hive with its retries.
//!
//! A worker needs no rank, no shared disk and no open port: it asks a hive for a lease, pulls the
//! parameters and the data over the same connection, computes, and pushes. Whatever it is killed
//! in the middle of is somebody else's work soon after.

mod client;
mod connection;
mod error;
mod heartbeat;
mod local;
mod shards;
mod web;
mod worker;

pub use client::{Client, ClientSettings, Pulled};
pub use error::{ClientError, WorkerError};
pub use web::Web;
pub use worker::{WorkEnd, WorkerSettings, work};
