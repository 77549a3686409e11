//! The files of one run in a store: its description, version 0, checkpoints, hints and final
//! model. See [`crate::checkpoint`] for where they lie.
//!
//! One hive at a time owns a store's runs (it claimed the newest generation), so nothing here
//! locks; but every sequence of writes is ordered such that one that is cut short anywhere leaves
//! a state that reads as before or after, never as something in between.

use std::collections::BTreeSet;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use skep_wire::{RunSpec, Version};

use crate::checkpoint::{
    CheckpointManifest, FORMAT, FileRef, get_shard, newest_generation, now, parse_digits,
    read_json, to_json,
};
use crate::{Checkpoint, DataError, NewestCheckpoint, Store};

/// `run.json`: what makes a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    format: u64,
    /// What the run was told.
    pub spec: RunSpec,
    /// When it was created, in milliseconds since 1970.
    pub created: u64,
    version0: FileRef,
    /// Where it came from, and whatever else the hive noted.
    pub extra: Value,
}

/// The names of all runs in a store, sorted. One whose creation or deletion was cut short is none.
pub async fn list_runs(store: &Store) -> Result<Vec<String>, DataError> {
    let mut runs = Vec::new();
    for name in store.list_folders("runs").await? {
        if RunSpec::is_name(&name) && store.exists(&format!("runs/{name}/run.json")).await? {
            runs.push(name);
        }
    }
    Ok(runs)
}

/// The files of one run.
#[derive(Clone, Debug)]
pub struct RunFiles {
    store: Store,
    run: String,
}

impl RunFiles {
    /// The files of the run of this name, whether it is there or not.
    pub fn new(store: Store, run: &str) -> Result<Self, DataError> {
        if !RunSpec::is_name(run) {
            return Err(DataError::Path {
                path: run.chars().take(80).collect(),
                reason: "a run's name has lower-case letters, digits, `-`, `_` and `.`, at most 63"
                    .to_owned(),
            });
        }
        Ok(Self { store, run: run.to_owned() })
    }

    /// The run's name.
    pub fn run(&self) -> &str {
        &self.run
    }

    /// The store they lie in.
    pub fn store(&self) -> &Store {
        &self.store
    }

    fn path(&self, file: &str) -> String {
        format!("runs/{}/{file}", self.run)
    }

    fn folder_of(&self, version: Version) -> String {
        self.path(&format!("checkpoints/{:012}-{:012}", version.generation, version.number))
    }

    /// Creates the run: [`DataError::Exists`] if it is there. What a deletion or creation that was
    /// cut short left under its name is removed first, so that no old checkpoint becomes the new
    /// run's.
    pub async fn create(
        &self,
        spec: &RunSpec,
        version0: Bytes,
        extra: Value,
    ) -> Result<(), DataError> {
        if spec.name != self.run {
            return Err(DataError::Path {
                path: self.run.clone(),
                reason: format!("the description is of a run `{}`", spec.name),
            });
        }
        let path = self.path("run.json");
        if self.store.exists(&path).await? {
            return Err(DataError::Exists { path });
        }
        self.store.delete_all(&format!("runs/{}", self.run)).await?;
        let record = RunRecord {
            format: FORMAT,
            spec: spec.clone(),
            created: now(),
            version0: FileRef::of(&version0).await,
            extra,
        };
        self.store.put(&self.path("version0.safetensors"), version0).await?;
        // Copied, not only named: whoever takes the run's folder has all that the model needs.
        for asset in &spec.manifest.assets {
            let bytes = get_shard(&self.store, &asset.hash).await?;
            self.store.put(&self.asset_path(&asset.name)?, bytes).await?;
        }
        self.store.create(&path, to_json(&record)).await
    }

    /// `run.json`.
    pub async fn record(&self) -> Result<RunRecord, DataError> {
        read_json(&self.store, &self.path("run.json")).await
    }

    /// What the run was told.
    pub async fn spec(&self) -> Result<RunSpec, DataError> {
        Ok(self.record().await?.spec)
    }

    /// The safetensors file of version 0, checked.
    pub async fn version0(&self) -> Result<Bytes, DataError> {
        let record = self.record().await?;
        record.version0.read(&self.store, &self.path("version0.safetensors")).await
    }

    /// One of the run's assets, such as its vocabulary, if it has it.
    pub async fn asset(&self, name: &str) -> Result<Option<Bytes>, DataError> {
        match self.store.get(&self.asset_path(name)?).await {
            Err(DataError::NotFound { .. }) => Ok(None),
            result => result.map(Some),
        }
    }

    fn asset_path(&self, name: &str) -> Result<String, DataError> {
        if !RunSpec::is_name(name) {
            return Err(DataError::Path {
                path: name.chars().take(80).collect(),
                reason: "an asset's name is like a run's".to_owned(),
            });
        }
        Ok(self.path(&format!("assets/{name}")))
    }

    /// Writes a checkpoint; when this returns, it survives a power cut. One of the same version
    /// that is complete is never touched: writing the same again is fine (an answer may have been
    /// lost), anything else is [`DataError::Exists`].
    pub async fn write_checkpoint(&self, checkpoint: &Checkpoint) -> Result<(), DataError> {
        let folder = self.folder_of(checkpoint.version);
        let manifest_path = format!("{folder}/manifest.json");
        let manifest = CheckpointManifest {
            format: FORMAT,
            version: checkpoint.version,
            created: now(),
            model: FileRef::of(&checkpoint.model).await,
            optimiser: FileRef::of(&checkpoint.optimiser).await,
            state: checkpoint.state.clone(),
            provenance: checkpoint.provenance.clone(),
        };
        match read_json::<CheckpointManifest>(&self.store, &manifest_path).await {
            Err(DataError::NotFound { .. }) => {}
            Err(error) => return Err(error),
            Ok(there) => {
                let same = there.model == manifest.model
                    && there.optimiser == manifest.optimiser
                    && there.state == manifest.state;
                return if same { Ok(()) } else { Err(DataError::Exists { path: manifest_path }) };
            }
        }
        // The two files may go out at once; only the manifest has to come after both.
        let (model, optimiser) = (model_path(&folder), optimiser_path(&folder));
        futures::future::try_join(
            self.store.put(&model, checkpoint.model.clone()),
            self.store.put(&optimiser, checkpoint.optimiser.clone()),
        )
        .await?;
        self.store.create(&manifest_path, to_json(&manifest)).await
    }

    /// The newest checkpoint that is complete and undamaged. Damaged ones are passed over with a
    /// warning each; a store that fails is an error, never a reason to go back in time.
    pub async fn newest_checkpoint(&self) -> Result<NewestCheckpoint, DataError> {
        let mut found = NewestCheckpoint::default();
        for version in self.folders().await?.into_iter().rev() {
            match self.checkpoint(version).await {
                Ok(Some(checkpoint)) => {
                    found.checkpoint = Some(checkpoint);
                    break;
                }
                Ok(None) => {}
                Err(error @ DataError::Damaged { .. }) => {
                    found.warnings.push(format!("checkpoint {version} is passed over: {error}"));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    async fn manifest(&self, version: Version) -> Result<Option<CheckpointManifest>, DataError> {
        let path = format!("{}/manifest.json", self.folder_of(version));
        let manifest: CheckpointManifest = match read_json(&self.store, &path).await {
            Err(DataError::NotFound { .. }) => return Ok(None),
            manifest => manifest?,
        };
        if manifest.version != version {
            let reason = format!("it is the manifest of version {}", manifest.version);
            return Err(DataError::damaged(&path, reason));
        }
        Ok(Some(manifest))
    }

    /// The model of one checkpoint, checked; nothing if there is none or it is gone, which it may
    /// be at any time.
    pub async fn checkpoint_model(&self, version: Version) -> Result<Option<Bytes>, DataError> {
        let Some(manifest) = self.manifest(version).await? else { return Ok(None) };
        match manifest.model.read(&self.store, &model_path(&self.folder_of(version))).await {
            Err(DataError::NotFound { .. }) => Ok(None),
            model => model.map(Some),
        }
    }

    /// One checkpoint, checked; nothing if there is none or it was never completed.
    pub async fn checkpoint(&self, version: Version) -> Result<Option<Checkpoint>, DataError> {
        let folder = self.folder_of(version);
        let Some(manifest) = self.manifest(version).await? else { return Ok(None) };
        let read = async |file: &FileRef, path: String| match file.read(&self.store, &path).await {
            Err(DataError::NotFound { path }) => Err(DataError::damaged(&path, "it is missing")),
            result => result,
        };
        Ok(Some(Checkpoint {
            version,
            model: read(&manifest.model, model_path(&folder)).await?,
            optimiser: read(&manifest.optimiser, optimiser_path(&folder)).await?,
            state: manifest.state,
            provenance: manifest.provenance,
        }))
    }

    /// The versions that have a folder, complete or not.
    async fn folders(&self) -> Result<BTreeSet<Version>, DataError> {
        let names = self.store.list_folders(&self.path("checkpoints")).await?;
        let version = |name: &String| {
            let (generation, number) = name.split_once('-')?;
            Some(Version::new(parse_digits(generation)?, parse_digits(number)?))
        };
        Ok(names.iter().filter_map(version).collect())
    }

    /// Deletes all checkpoints but the `keep` newest (at least one) that look undamaged and those
    /// in `also`, and folders of older generations that were never completed. A folder of the
    /// newest generation without a manifest stays: it may be in the making. Returns what went.
    pub async fn retain(&self, keep: usize, also: &[Version]) -> Result<Vec<Version>, DataError> {
        let generation = newest_generation(&self.store).await?;
        let mut kept = 0;
        let mut gone = Vec::new();
        for version in self.folders().await?.into_iter().rev() {
            let folder = self.folder_of(version);
            let manifest_path = format!("{folder}/manifest.json");
            let manifest = match read_json::<CheckpointManifest>(&self.store, &manifest_path).await
            {
                Ok(manifest) => Some(manifest),
                Err(DataError::NotFound { .. }) if version.generation < generation => None,
                Err(DataError::NotFound { .. }) => continue,
                // Damaged: it goes when enough newer ones are sound, like any other.
                Err(DataError::Damaged { .. }) if kept >= keep.max(1) => None,
                Err(DataError::Damaged { .. }) => continue,
                Err(error) => return Err(error),
            };
            if let Some(manifest) = manifest {
                if kept < keep.max(1) {
                    kept += usize::from(self.looks_sound(&folder, &manifest).await?);
                    continue;
                }
                if also.contains(&version) {
                    continue;
                }
            }
            self.store.delete(&manifest_path).await?;
            self.store.delete_all(&folder).await?;
            gone.push(version);
        }
        Ok(gone)
    }

    /// Sizes only: hashing every checkpoint again and again would cost more than it saves.
    async fn looks_sound(
        &self,
        folder: &str,
        manifest: &CheckpointManifest,
    ) -> Result<bool, DataError> {
        let model = self.store.size(&model_path(folder)).await?;
        let optimiser = self.store.size(&optimiser_path(folder)).await?;
        Ok(model == Some(manifest.model.bytes) && optimiser == Some(manifest.optimiser.bytes))
    }

    /// Keeps what a run has become since the checkpoint of a version was written: a run can be
    /// paused, measured or ended without a new version, and checkpoints never change.
    pub async fn write_state(&self, version: Version, state: &Value) -> Result<(), DataError> {
        let later = LaterState { format: FORMAT, version, state: state.clone() };
        self.store.put(&self.path("state.json"), to_json(&later)).await
    }

    /// What was kept since the checkpoint of exactly this version, if anything was.
    pub async fn read_state(&self, version: Version) -> Result<Option<Value>, DataError> {
        match read_json::<LaterState>(&self.store, &self.path("state.json")).await {
            Ok(later) => Ok((later.version == version).then_some(later.state)),
            Err(DataError::NotFound { .. } | DataError::Damaged { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Notes a version under `latest` or `best`.
    pub async fn write_hint(&self, name: &str, version: Version) -> Result<(), DataError> {
        let hint = Hint { format: FORMAT, version };
        self.store.put(&self.hint_path(name)?, to_json(&hint)).await
    }

    /// The version noted under `latest` or `best`. It is a hint: one that is missing or unreadable
    /// is none, and the checkpoint it names may be gone.
    pub async fn read_hint(&self, name: &str) -> Result<Option<Version>, DataError> {
        match read_json::<Hint>(&self.store, &self.hint_path(name)?).await {
            Ok(hint) => Ok(Some(hint.version)),
            Err(DataError::NotFound { .. } | DataError::Damaged { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn hint_path(&self, name: &str) -> Result<String, DataError> {
        match name {
            "latest" | "best" => Ok(self.path(&format!("{name}.json"))),
            _ => Err(DataError::Path {
                path: name.to_owned(),
                reason: "hints are `latest` and `best`".to_owned(),
            }),
        }
    }

    /// Keeps an accepted model under a name until a checkpoint has it; when this returns, it
    /// survives a power cut.
    pub async fn spool(&self, name: &str, bytes: Bytes) -> Result<(), DataError> {
        self.store.put(&self.path(&format!("spool/{name}")), bytes).await
    }

    /// The names of the models that are spooled.
    pub async fn spooled(&self) -> Result<Vec<String>, DataError> {
        let paths = self.store.list(&self.path("spool")).await?;
        let name = |path: &String| path.rsplit('/').next().map(str::to_owned);
        Ok(paths.iter().filter_map(name).collect())
    }

    /// A spooled model.
    pub async fn read_spooled(&self, name: &str) -> Result<Bytes, DataError> {
        self.store.get(&self.path(&format!("spool/{name}"))).await
    }

    /// Deletes a spooled model. It is no error if it was not there.
    pub async fn unspool(&self, name: &str) -> Result<(), DataError> {
        self.store.delete(&self.path(&format!("spool/{name}"))).await
    }

    /// Deletes all spooled models.
    pub async fn clear_spool(&self) -> Result<(), DataError> {
        self.store.delete_all(&self.path("spool")).await
    }

    /// Writes the final model.
    pub async fn write_final_model(&self, model: Bytes) -> Result<(), DataError> {
        self.store.put(&self.final_model_path(), model).await
    }

    /// The final model, if it has been written.
    pub async fn final_model(&self) -> Result<Option<Bytes>, DataError> {
        match self.store.get(&self.final_model_path()).await {
            Err(DataError::NotFound { .. }) => Ok(None),
            result => result.map(Some),
        }
    }

    /// Where the final model lies in the store.
    pub fn final_model_path(&self) -> String {
        self.path("model.safetensors")
    }

    /// Writes a file of metrics, such as `metrics.csv`, replacing what was there.
    pub async fn write_metrics(&self, file: &str, bytes: Bytes) -> Result<(), DataError> {
        self.store.put(&self.path(&format!("metrics/{file}")), bytes).await
    }

    /// A file of metrics, if it is there.
    pub async fn metrics(&self, file: &str) -> Result<Option<Bytes>, DataError> {
        match self.store.get(&self.path(&format!("metrics/{file}"))).await {
            Err(DataError::NotFound { .. }) => Ok(None),
            result => result.map(Some),
        }
    }

    /// Deletes the run: `run.json` first, so that a run half deleted is no run. Shards stay: other
    /// runs may use them.
    pub async fn delete(&self) -> Result<(), DataError> {
        self.store.delete(&self.path("run.json")).await?;
        self.store.delete_all(&format!("runs/{}", self.run)).await
    }
}

#[derive(Serialize, Deserialize)]
struct LaterState {
    format: u64,
    version: Version,
    state: Value,
}

#[derive(Serialize, Deserialize)]
struct Hint {
    format: u64,
    version: Version,
}

fn model_path(folder: &str) -> String {
    format!("{folder}/model.safetensors")
}

fn optimiser_path(folder: &str) -> String {
    format!("{folder}/optimiser.safetensors")
}
