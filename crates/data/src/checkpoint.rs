//! What survives a crash: claims of generations, shards, and the checkpoints of a run.
//!
//! A checkpoint is complete once its manifest is there. The manifest is written last, create-only,
//! and holds size and hash of the two files beside it, so a reader never mixes two versions and a
//! writer that is killed anywhere leaves the former checkpoint as it was. [`crate::RunFiles`] has
//! the run's side of this.
//!
//! ```text
//! generations/{generation}.json            create-only claim by a starting hive
//! shards/{sha256}.safetensors              data
//! runs/{run}/version0.safetensors          written before run.json
//! runs/{run}/assets/{name}                 what the model needs besides, likewise
//! runs/{run}/run.json                      create-only: it makes the run
//! runs/{run}/spool/{epoch}-{first}.safetensors accepted models that no checkpoint holds yet
//! runs/{run}/checkpoints/{generation}-{number}/model.safetensors, optimiser.safetensors
//! runs/{run}/checkpoints/{generation}-{number}/manifest.json     create-only, last
//! runs/{run}/state.json                    what became of the run since that checkpoint
//! runs/{run}/latest.json, best.json        hints
//! runs/{run}/model.safetensors             the final model
//! ```

use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use skep_wire::{ShardRef, Version};

use crate::{DataError, Store, shard_hash};

/// The format of the JSON files here.
pub(crate) const FORMAT: u64 = 1;

/// One version of a run, with everything needed to go on from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// Which version.
    pub version: Version,
    /// Its parameters, a safetensors file.
    pub model: Bytes,
    /// The optimiser's state, a safetensors file.
    pub optimiser: Bytes,
    /// The ledger and whatever else the hive keeps. Floating-point numbers in it go through
    /// decimal digits; what must come back to the last bit belongs in a safetensors file or is
    /// kept as an integer of its bits.
    pub state: Value,
    /// What made it: binary version, hashes of job and data.
    pub provenance: Value,
}

/// What [`crate::RunFiles::newest_checkpoint`] found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewestCheckpoint {
    /// The newest complete checkpoint whose files are as they were written.
    pub checkpoint: Option<Checkpoint>,
    /// One line for each newer one that was passed over since it is damaged. To be shown.
    pub warnings: Vec<String>,
}

/// A file named in a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileRef {
    pub(crate) sha256: String,
    pub(crate) bytes: u64,
}

impl FileRef {
    /// Hashes off the async threads: models are large.
    pub(crate) async fn of(bytes: &Bytes) -> Self {
        Self { sha256: hash(bytes.clone()).await, bytes: bytes.len() as u64 }
    }

    /// Reads the file and compares.
    pub(crate) async fn read(&self, store: &Store, path: &str) -> Result<Bytes, DataError> {
        let bytes = store.get(path).await?;
        if bytes.len() as u64 != self.bytes {
            let reason = format!("{} bytes were expected, {} are there", self.bytes, bytes.len());
            return Err(DataError::damaged(path, reason));
        }
        let found = hash(bytes.clone()).await;
        if found != self.sha256 {
            let reason = format!("its SHA-256 is {found}, not {}", self.sha256);
            return Err(DataError::damaged(path, reason));
        }
        Ok(bytes)
    }
}

/// `manifest.json` of a checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CheckpointManifest {
    pub(crate) format: u64,
    pub(crate) version: Version,
    pub(crate) created: u64,
    pub(crate) model: FileRef,
    pub(crate) optimiser: FileRef,
    pub(crate) state: Value,
    pub(crate) provenance: Value,
}

/// Claims the next generation for a hive that starts on this store, by a create-only write: of
/// several that start at once, each gets its own. `by` says who, for people.
pub async fn claim_generation(store: &Store, by: &str) -> Result<u64, DataError> {
    let mut generation = newest_generation(store).await?;
    loop {
        generation = generation.checked_add(1).ok_or_else(|| DataError::Path {
            path: "generations".to_owned(),
            reason: "the last generation has been claimed".to_owned(),
        })?;
        let path = format!("generations/{generation:012}.json");
        let claim = serde_json::json!({ "generation": generation, "by": by, "created": now() });
        match store.create(&path, to_json(&claim)).await {
            Err(DataError::Exists { .. }) => {}
            result => return result.map(|()| generation),
        }
    }
}

/// The newest generation that was claimed; 0 if none was.
pub async fn newest_generation(store: &Store) -> Result<u64, DataError> {
    let paths = store.list("generations").await?;
    let number = |path: &String| {
        let digits = path.strip_prefix("generations/")?.strip_suffix(".json")?;
        parse_digits(digits)
    };
    Ok(paths.iter().filter_map(number).max().unwrap_or(0))
}

/// A shard's path in the store.
pub fn shard_path(hash: &str) -> Result<String, DataError> {
    if !ShardRef::is_hash(hash) {
        return Err(DataError::Path {
            path: hash.chars().take(80).collect(),
            reason: "a shard's hash has 64 hexadecimal digits".to_owned(),
        });
    }
    Ok(format!("shards/{hash}.safetensors"))
}

/// Keeps a shard under its hash, which is checked. Nothing is written if it is there already.
pub async fn put_shard(store: &Store, hash: &str, bytes: Bytes) -> Result<(), DataError> {
    let path = shard_path(hash)?;
    if self::hash(bytes.clone()).await != hash {
        return Err(DataError::damaged(&path, "its bytes do not have this hash"));
    }
    if store.size(&path).await? == Some(bytes.len() as u64) {
        return Ok(());
    }
    store.put(&path, bytes).await
}

/// Reads a shard and checks its hash.
pub async fn get_shard(store: &Store, hash: &str) -> Result<Bytes, DataError> {
    let path = shard_path(hash)?;
    let bytes = store.get(&path).await?;
    if self::hash(bytes.clone()).await != hash {
        return Err(DataError::damaged(&path, "its bytes do not have this hash; upload it again"));
    }
    Ok(bytes)
}

/// Reads a part of a shard, which is not checked: who has all parts checks the hash.
pub async fn get_shard_range(
    store: &Store,
    hash: &str,
    range: Range<u64>,
) -> Result<Bytes, DataError> {
    store.get_range(&shard_path(hash)?, range).await
}

/// Short inputs are hashed here and now; long ones off the async threads.
async fn hash(bytes: Bytes) -> String {
    if bytes.len() < 64 << 10 {
        return shard_hash(&bytes);
    }
    let again = bytes.clone();
    match tokio::task::spawn_blocking(move || shard_hash(&bytes)).await {
        Ok(hash) => hash,
        // The runtime is going down: finish here.
        Err(_) => shard_hash(&again),
    }
}

/// Milliseconds since 1970, for people: nothing is decided by it.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Digits and nothing else, so that a foreign file is not taken for ours.
pub(crate) fn parse_digits(text: &str) -> Option<u64> {
    (text.len() >= 12 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok())?
}

pub(crate) fn to_json(value: &impl Serialize) -> Bytes {
    serde_json::to_vec_pretty(value)
        .expect("keys are strings and nothing fails to serialise")
        .into()
}

/// Reads a JSON file of ours: broken and newer ones are told apart.
pub(crate) async fn read_json<T: DeserializeOwned>(
    store: &Store,
    path: &str,
) -> Result<T, DataError> {
    #[derive(Deserialize)]
    struct Header {
        format: u64,
    }
    let bytes = store.get(path).await?;
    let broken = |error: serde_json::Error| DataError::damaged(path, error.to_string());
    let header: Header = serde_json::from_slice(&bytes).map_err(broken)?;
    if header.format > FORMAT {
        let path = path.to_owned();
        return Err(DataError::Format { path, found: header.format, known: FORMAT });
    }
    serde_json::from_slice(&bytes).map_err(broken)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use object_store::memory::InMemory;

    use super::*;
    use crate::{Fault, Faults};

    #[tokio::test(flavor = "multi_thread")]
    async fn no_two_claimers_get_the_same_generation() {
        let folder = tempfile::tempdir().expect("a folder");
        let local = Store::open(&folder.path().to_string_lossy()).expect("opens");
        for store in [local, Store::with(Arc::new(InMemory::new()))] {
            assert_eq!(newest_generation(&store).await.expect("asks"), 0);
            let claims: Vec<_> = (0..8)
                .map(|by| {
                    let store = store.clone();
                    tokio::spawn(async move { claim_generation(&store, &by.to_string()).await })
                })
                .collect();
            let mut seen = BTreeSet::new();
            for claim in claims {
                seen.insert(claim.await.expect("no panic").expect("claims"));
            }
            assert_eq!(seen, (1..=8).collect());
            assert_eq!(newest_generation(&store).await.expect("asks"), 8);
            store.put("generations/readme.txt", "x".into()).await.expect("writes");
            store.put("generations/9.json", "x".into()).await.expect("writes");
            assert_eq!(claim_generation(&store, "late").await.expect("claims"), 9);
        }
    }

    #[tokio::test]
    async fn a_claim_that_was_cut_short_is_never_given_again() {
        let store = Store::with(Arc::new(InMemory::new()));
        let faults = Faults::new(&store, Fault::KilledAfter, 0);
        assert!(claim_generation(&faults.store(), "killed").await.is_err());
        assert_eq!(claim_generation(&store, "next").await.expect("claims"), 2);
    }

    #[tokio::test]
    async fn shards_are_what_their_name_says() {
        let store = Store::with(Arc::new(InMemory::new()));
        let bytes = Bytes::from(vec![7u8; 100_000]);
        let name = shard_hash(&bytes);
        put_shard(&store, &name, bytes.clone()).await.expect("puts");
        let faults = Faults::new(&store, Fault::DiskFull, 0);
        put_shard(&faults.store(), &name, bytes.clone()).await.expect("is there: writes nothing");
        assert_eq!(faults.writes(), 0);
        assert_eq!(get_shard(&store, &name).await.expect("gets"), bytes);
        assert_eq!(get_shard_range(&store, &name, 5..9).await.expect("gets"), [7; 4][..]);
        assert!(put_shard(&store, &name, "other".into()).await.is_err());
        for bad in ["", "../../etc/passwd", &name.to_uppercase(), &name[1..]] {
            assert!(put_shard(&store, bad, bytes.clone()).await.is_err(), "{bad}");
            assert!(get_shard(&store, bad).await.is_err(), "{bad}");
        }
        let path = shard_path(&name).expect("a hash");
        store.put(&path, vec![8u8; 100_000].into()).await.expect("writes");
        assert!(matches!(get_shard(&store, &name).await, Err(DataError::Damaged { .. })));
        store.put(&path, "cut".into()).await.expect("writes");
        put_shard(&store, &name, bytes.clone()).await.expect("heals one of another size");
        assert_eq!(get_shard(&store, &name).await.expect("gets"), bytes);
    }
}
