//! Datasets, manifests, shards, batches; stores; checkpoints; model files: everything that lies
//! somewhere before or after it travels.
//!
//! A dataset becomes shards ([`Dataset::prepare`]), shards go into a [`Store`] under the hash of
//! their bytes, a shard is read as a [`Table`] and rows of it are gathered into a batch. A run's
//! versions come back to the same store as checkpoints ([`RunFiles`]).

pub mod checkpoint;
pub mod classes;
pub mod corpus;
mod dataset;
mod error;
mod fault;
mod global;
pub mod idx;
pub mod images;
mod ink;
pub mod mnist;
pub mod model_file;
mod npy;
mod pickle;
pub mod picture;
mod run_files;
pub mod split;
mod state_dict;
mod store;
mod table;
pub mod table_file;
pub mod tokeniser;
pub mod vocabulary;

pub use checkpoint::{
    Checkpoint, NewestCheckpoint, claim_generation, get_shard, get_shard_range, newest_generation,
    put_shard, shard_path,
};
pub use corpus::Corpus;
pub use dataset::{Asset, Dataset, PrepareSettings, Prepared, RowSplit};
pub use error::DataError;
pub use fault::{Fault, Faults};
pub use model_file::{LoadedTensor, ModelFile, ModelFormat};
pub use pickle::MAX_PICKLE_BYTES;
pub use picture::ImageForm;
pub use run_files::{RunFiles, RunRecord, list_runs};
pub use state_dict::read_state_dict;
pub use store::Store;
pub use table::{Column, Table, shard_hash};
pub use vocabulary::{Vocabulary, VocabularySettings};
