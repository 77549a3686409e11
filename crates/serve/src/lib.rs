//! `skep serve`: answers questions with a trained model, over HTTP and on a page of its own.
//!
//! A [`Model`] is what is asked, [`Loaded`] is one version of its parameters, [`Serving`] holds the
//! version that answers now and the threads that compute. A question takes the version once, at its
//! start, and names it in the answer; so a new version never changes an answer under way. [`app`]
//! is the whole server as a router, [`run`] serves it, [`follow`] takes each new version of a run
//! live.

mod address;
mod assets;
mod body;
mod datatype;
mod elements;
mod error;
mod fetch;
mod follow;
pub mod found;
mod model;
mod onnx;
mod picture;
mod pool;
mod routes;
mod server;
mod serving;
mod source;
mod step;
mod tensor;
mod thread;

pub use assets::of_run as assets_of_run;
pub use error::{ApiError, ServeError};
pub use fetch::{FetchSettings, Fetcher};
pub use follow::follow;
pub use model::{Loaded, Model};
pub use onnx::GraphSettings;
pub use picture::to_bytes as picture_to_bytes;
pub use routes::app;
pub use server::run;
pub use serving::{Serving, ServingSettings};
pub use skep_data::picture::MOST_PIXELS;
pub use source::{Source, open, task_of};
