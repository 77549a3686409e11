//! A dataset in a folder of its own: training shards, a test set and what belongs to them, described
//! by a `dataset.json`. It goes to other machines as a whole or shard by shard, and each shard can
//! be trained on by itself: the test set, the vocabulary and the names of the classes are found
//! through the description beside it.

mod description;
mod read;
mod write;

pub use description::{ClassCounts, CopyNumber, Description, KeptAsset, KeptFile, KeptSplit};
pub use read::{open, open_described};
pub use write::{SplitSettings, Writer};

/// The name of the description.
pub const DESCRIPTION: &str = "dataset.json";

#[cfg(test)]
mod tests;
