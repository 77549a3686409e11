//! What people name a model by: a file, or a run in a store, with a version of it behind an `@`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use skep_data::{LoadedTensor, RunFiles, RunRecord, Store, model_file};
use skep_learn::{Assets, Compute, Task, onnx};
use skep_wire::{Encoding, Frame, Job, Layout, RunSpec, Version};

use crate::{ServeError, assets, task_of};

// What a file that `skep model pull` wrote says of itself, in safetensors' metadata. The kind and
// the vocabulary are under the names that ONNX files have them under.

/// Which run it is from.
pub const RUN: &str = "skep.run";
/// Which version it is.
pub const VERSION: &str = "skep.version";
/// How many samples it has learned from.
pub const SAMPLES: &str = "skep.samples";
/// What data those were of.
pub const DATA: &str = "skep.data";
/// The settings of the model's own, in JSON.
pub const SETTINGS: &str = "skep.settings";

/// Which version of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The one that did best on the validation split.
    Best,
    /// The one that training ended with.
    Final,
    /// The newest there is.
    Newest,
    /// By its name.
    Version(Version),
}

impl Which {
    /// `best`, `final`, `newest` or a version.
    pub fn parse(text: &str) -> Result<Self, ServeError> {
        Ok(match text {
            "best" => Self::Best,
            "final" => Self::Final,
            "newest" => Self::Newest,
            version => Self::Version(version.parse().map_err(|_| {
                ServeError::model(
                    format!("`@{version}` is no version"),
                    "it can be @best, @final, @newest, or a version such as @1.140",
                )
            })?),
        })
    }
}

/// `RUN@best` apart: the run and which version of it, if it says.
pub fn split(text: &str) -> Result<(&str, Option<Which>), ServeError> {
    match text.rsplit_once('@') {
        // A file may have an `@` in its name.
        Some((run, which)) if !Path::new(text).exists() => Ok((run, Some(Which::parse(which)?))),
        _ => Ok((text, None)),
    }
}

/// A model with what is known of it.
pub struct FoundModel {
    /// As it was named.
    pub name: String,
    /// The run it is from.
    pub run: Option<String>,
    /// The version it is.
    pub version: Option<String>,
    /// How many samples it has learned from.
    pub samples: Option<u64>,
    /// Kind, settings and data, where a run or the file says so.
    pub job: Option<Job>,
    /// What it needs besides its parameters.
    pub assets: Assets,
    /// Its tensors.
    pub tensors: BTreeMap<String, LoadedTensor>,
    /// What its file hashes to.
    pub hash: String,
    /// Folders in which assets may lie that nobody has named yet.
    pub folders: Vec<PathBuf>,
}

impl FoundModel {
    /// Opens what a text names.
    pub async fn open(text: &str) -> Result<Self, ServeError> {
        let (path, which) = split(text)?;
        if Path::new(path).is_file() {
            return open_file(Path::new(path)).await;
        }
        let files = run_files(Path::new(path))?.ok_or_else(|| {
            ServeError::model(
                format!("there is no model at {path}"),
                "give a model file, or STORE/RUN such as skep-runs/mnist",
            )
        })?;
        of_run(&files, which, text).await
    }

    /// Its task, and its settings; `kind` is what the user says it is.
    pub fn task(
        &self,
        tasks: &[Arc<dyn Task>],
        kind: Option<&str>,
    ) -> Result<(Arc<dyn Task>, Job), ServeError> {
        let own = self.job.as_ref().map(|job| job.model.kind.as_str());
        let kind = kind.or(own.filter(|kind| !kind.is_empty())).ok_or_else(|| {
            ServeError::model(
                format!("{} does not say what kind of model it is", self.name),
                "say it with --model, such as --model lenet5",
            )
        })?;
        let task = task_of(tasks, kind)?;
        let mut job = task.defaults();
        if let Some(own) = self.job.as_ref().filter(|own| own.model.kind == task.name()) {
            job = own.clone();
        }
        Ok((task, job))
    }

    /// The model with its numbers, ready to compute.
    pub fn load(
        &self,
        task: &dyn Task,
        job: &Job,
    ) -> Result<(Box<dyn Compute>, Frame), ServeError> {
        let mut compute = task.compute(job)?;
        let layout = Layout::of_version(compute.schema(), Encoding::F32)
            .map_err(|error| ServeError::Learn(error.into()))?;
        let mut frame = Frame::zeros(Arc::new(layout));
        model_file::apply(&mut frame, &self.tensors).map_err(|error| {
            ServeError::model(format!("{}: {error}", self.name), "is it a model of this kind?")
        })?;
        compute.load(&frame)?;
        Ok((compute, frame))
    }

    /// What is known of it, as metadata of a file.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        let mut metadata = BTreeMap::new();
        let mut note = |key: &str, value: Option<String>| {
            if let Some(value) = value {
                metadata.insert(key.to_owned(), value);
            }
        };
        note(RUN, self.run.clone());
        note(VERSION, self.version.clone());
        note(SAMPLES, self.samples.map(|samples| samples.to_string()));
        if let Some(job) = &self.job {
            note(onnx::KIND, Some(job.model.kind.clone()));
            note(SETTINGS, serde_json::to_string(&job.model.settings).ok());
            note(DATA, Some(job.data.source.clone()));
        }
        let vocabulary = self.assets.get(skep_data::Vocabulary::ASSET);
        note(onnx::VOCABULARY, vocabulary.map(|bytes| String::from_utf8_lossy(bytes).into_owned()));
        metadata
    }
}

/// The files of a run whose folder is named, as it is or as STORE/RUN.
pub fn run_files(path: &Path) -> Result<Option<RunFiles>, ServeError> {
    let within = path.parent().zip(path.file_name()).map(|(store, run)| {
        let store = if store.as_os_str().is_empty() { Path::new(".") } else { store };
        store.join("runs").join(run)
    });
    let folders = [Some(path.to_owned()), within];
    let found = folders.into_iter().flatten().find(|folder| folder.join("run.json").is_file());
    found.map(|folder| files_of(&folder)).transpose()
}

fn files_of(folder: &Path) -> Result<RunFiles, ServeError> {
    let whole = std::fs::canonicalize(folder)
        .map_err(|error| ServeError::System(format!("{}: {error}", folder.display())))?;
    let store = whole.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    let run = whole.file_name().unwrap_or_default().to_string_lossy();
    Ok(RunFiles::new(Store::open(&store.to_string_lossy())?, &run)?)
}

/// A version of a run in a store.
async fn of_run(
    files: &RunFiles,
    which: Option<Which>,
    name: &str,
) -> Result<FoundModel, ServeError> {
    let run = files.run();
    let none = |what: String, hint: &str| ServeError::model(what, hint);
    let (version, samples, bytes) = match which {
        Some(Which::Best) => {
            let best = files.read_hint("best").await?;
            let best = match best {
                Some(version) => files.checkpoint(version).await?,
                None => None,
            };
            let best = best.ok_or_else(|| {
                none(
                    format!("no version of run `{run}` has been validated"),
                    "@final is the one that training ended with; data.validation holds rows out",
                )
            })?;
            (Some(best.version), samples_of(&best.state), best.model)
        }
        Some(Which::Version(version)) => {
            let found = files.checkpoint(version).await?.ok_or_else(|| {
                none(
                    format!("run `{run}` has no checkpoint of version {version}"),
                    "older ones are deleted; checkpoint.keep says how many stay",
                )
            })?;
            (Some(version), samples_of(&found.state), found.model)
        }
        Some(Which::Final) | Some(Which::Newest) | None => {
            let newest = files.newest_checkpoint().await?;
            for warning in &newest.warnings {
                tracing::warn!("{warning}");
            }
            let last = match which {
                Some(Which::Newest) => None,
                _ => files.final_model().await?,
            };
            match (last, newest.checkpoint) {
                (Some(model), newest) => {
                    let newest = newest.filter(|newest| newest.model == model);
                    let samples = newest.as_ref().and_then(|newest| samples_of(&newest.state));
                    (newest.map(|newest| newest.version), samples, model)
                }
                (None, _) if which == Some(Which::Final) => {
                    return Err(none(
                        format!("run `{run}` has not ended"),
                        "@newest is what there is of it now",
                    ));
                }
                (None, Some(newest)) => {
                    (Some(newest.version), samples_of(&newest.state), newest.model)
                }
                (None, None) => (Some(Version::default()), Some(0), files.version0().await?),
            }
        }
    };
    let spec = files.spec().await?;
    Ok(FoundModel {
        name: name.to_owned(),
        run: Some(run.to_owned()),
        version: version.map(|version| version.to_string()),
        samples,
        assets: assets_of(files, &spec).await?,
        job: Some(spec.job),
        tensors: model_file::parse(name, &bytes)?,
        hash: hash(&bytes),
        folders: Vec::new(),
    })
}

fn samples_of(state: &Value) -> Option<u64> {
    state.pointer("/run/samples")?.as_u64()
}

async fn assets_of(files: &RunFiles, spec: &RunSpec) -> Result<Assets, ServeError> {
    let mut assets = Assets::new();
    for asset in &spec.manifest.assets {
        if let Some(bytes) = files.asset(&asset.name).await? {
            assets.insert(asset.name.clone(), bytes.to_vec());
        }
    }
    Ok(assets)
}

/// A file, with the run that it lies in or what its metadata says.
async fn open_file(path: &Path) -> Result<FoundModel, ServeError> {
    let name = path.to_string_lossy().into_owned();
    let bytes = model_file::read_bytes(path)?;
    let file = model_file::read(&name, &bytes)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut found = FoundModel {
        run: file.metadata.get(RUN).cloned(),
        version: file.metadata.get(VERSION).cloned(),
        samples: file.metadata.get(SAMPLES).and_then(|text| text.parse().ok()),
        job: job_of(&file.metadata),
        assets: Assets::new(),
        tensors: file.tensors,
        hash: hash(&bytes),
        folders: vec![folder.to_owned(), folder.join("assets")],
        name,
    };
    if let Some(vocabulary) = file.metadata.get(onnx::VOCABULARY) {
        let name = skep_data::Vocabulary::ASSET.to_owned();
        found.assets.insert(name, vocabulary.clone().into_bytes());
    }
    if let Some(folder) = run_around(path) {
        let spec = record_of(&folder)?.spec;
        // A run's folder may have been taken out of its store: then that is all there is.
        let is_in_store = folder.parent().is_some_and(|runs| runs.ends_with("runs"));
        if is_in_store {
            let files = files_of(&folder)?;
            let newest = files.newest_checkpoint().await?.checkpoint;
            let same = newest.as_ref().filter(|newest| newest.model == bytes);
            let version = version_within(path).or(same.map(|newest| newest.version));
            found.version = version.map(|version| version.to_string());
            found.samples = found.samples.or(newest.and_then(|newest| samples_of(&newest.state)));
            found.assets = assets_of(&files, &spec).await?;
        }
        found.folders = vec![folder.join("assets")];
        found.run = Some(spec.name.clone());
        found.job = Some(spec.job);
    }
    Ok(found)
}

/// A run's final model lies beside its description, a checkpoint two folders below it.
fn run_around(path: &Path) -> Option<PathBuf> {
    let whole = std::fs::canonicalize(path).ok()?;
    let folder = whole.parent()?;
    let folders = [Some(folder), folder.parent().and_then(Path::parent)];
    folders
        .into_iter()
        .flatten()
        .find(|folder| folder.join("run.json").is_file())
        .map(Path::to_owned)
}

fn record_of(folder: &Path) -> Result<RunRecord, ServeError> {
    let path = folder.join("run.json");
    let wrong =
        |error: &dyn std::fmt::Display| ServeError::System(format!("{}: {error}", path.display()));
    let text = std::fs::read(&path).map_err(|error| wrong(&error))?;
    serde_json::from_slice(&text).map_err(|error| wrong(&error))
}

/// Which version a checkpoint's file is: its folder says.
fn version_within(path: &Path) -> Option<Version> {
    let whole = std::fs::canonicalize(path).ok()?;
    let (generation, number) = whole.parent()?.file_name()?.to_str()?.split_once('-')?;
    Some(Version::new(generation.parse().ok()?, number.parse().ok()?))
}

/// A version's name where nobody gave it one.
pub(crate) fn hash(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256-{}", &hex[..12])
}

fn job_of(metadata: &BTreeMap<String, String>) -> Option<Job> {
    let mut job = Job::default();
    job.model.kind = metadata.get(onnx::KIND)?.clone();
    if let Some(text) = metadata.get(SETTINGS) {
        job.model.settings = serde_json::from_str(text).ok()?;
    }
    if let Some(source) = metadata.get(DATA) {
        source.clone_into(&mut job.data.source);
    }
    Some(job)
}

/// A model with its task and its settings.
pub struct Member {
    /// The model.
    pub found: FoundModel,
    /// What it is.
    pub task: Arc<dyn Task>,
    /// How it is set.
    pub job: Job,
}

impl Member {
    /// Opens what a text names, with all assets that its task needs; `kind` is what the user says it
    /// is, and `given` are assets that stand in for its own.
    pub async fn open(
        name: &str,
        kind: Option<&str>,
        tasks: &[Arc<dyn Task>],
        given: &Assets,
    ) -> Result<Self, ServeError> {
        let mut found = FoundModel::open(name).await?;
        let (task, job) = found.task(tasks, kind)?;
        found.assets.extend(given.clone());
        found.assets = assets::complete(found.assets, &found.folders, &*task)?;
        Ok(Self { found, task, job })
    }

    /// What it is called where it is asked: its run's name, or the file's.
    pub(crate) fn served_as(&self) -> String {
        let stem = || Path::new(&self.found.name).file_stem().map(|it| it.to_string_lossy().into());
        self.found.run.clone().or_else(stem).unwrap_or_default()
    }

    /// Whether all can answer the same questions.
    pub fn check(members: &[Self]) -> Result<(), ServeError> {
        let Some(first) = members.first() else { return Ok(()) };
        for member in members {
            let (name, usual) = (&member.found.name, &first.found.name);
            if member.task.name() != first.task.name() {
                let (kind, other) = (member.task.name(), first.task.name());
                return Err(ServeError::model(
                    format!("{name} is a {kind}, but {usual} is a {other}"),
                    "models of one kind answer the same questions",
                ));
            }
            if member.found.assets != first.found.assets {
                return Err(ServeError::model(
                    format!("{name} has another vocabulary than {usual}"),
                    "members of an ensemble are trained on the same data",
                ));
            }
            if member.job.model.settings != first.job.model.settings {
                return Err(ServeError::model(
                    format!("{name} has other settings of its model than {usual}"),
                    "members of an ensemble are alike but for their numbers",
                ));
            }
        }
        Ok(())
    }
}

/// What an ensemble's file holds: its members, from the folder of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnsembleFile {
    /// Models, as people name them.
    pub members: Vec<String>,
}

/// The models that names stand for: an ensemble's file stands for its members.
pub fn members(names: &[String]) -> Result<Vec<String>, ServeError> {
    let mut members = Vec::new();
    for name in names {
        let path = Path::new(name);
        if !path.is_file() || path.extension().is_none_or(|ending| ending != "json") {
            members.push(name.clone());
            continue;
        }
        let wrong = |error: &dyn std::fmt::Display| {
            ServeError::model(
                format!("{name} is not an ensemble: {error}"),
                "`skep train --ensemble N` writes such a file: {\"members\": [\"../runs/a-1\", …]}",
            )
        };
        let text = std::fs::read(path).map_err(|error| wrong(&error))?;
        let file: EnsembleFile = serde_json::from_slice(&text).map_err(|error| wrong(&error))?;
        if file.members.is_empty() {
            return Err(wrong(&"it has no members"));
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        members.extend(file.members.iter().map(|member| {
            let member = folder.join(member);
            std::fs::canonicalize(&member).unwrap_or(member).to_string_lossy().into_owned()
        }));
    }
    Ok(members)
}
