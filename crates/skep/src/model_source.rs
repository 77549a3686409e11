//! What people name a model by: a file, or a run in a store, with a version of it behind an `@`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use skep_data::{LoadedTensor, RunFiles, Store, model_file};
use skep_learn::{Assets, Compute, Task, onnx};
use skep_wire::{Encoding, Frame, Job, Layout, RunSpec, Version};

use crate::failure::Failure;

/// What a file that `skep model pull` wrote says of itself, in safetensors' metadata. The kind and
/// the vocabulary are under the names that ONNX files have them under.
pub(crate) const RUN: &str = "skep.run";
pub(crate) const VERSION: &str = "skep.version";
pub(crate) const SAMPLES: &str = "skep.samples";
pub(crate) const DATA: &str = "skep.data";
pub(crate) const SETTINGS: &str = "skep.settings";

/// Which version of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
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
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        Ok(match text {
            "best" => Self::Best,
            "final" => Self::Final,
            "newest" => Self::Newest,
            version => Self::Version(version.parse().map_err(|_| {
                Failure::mistake(format!("`@{version}` is no version"))
                    .hint("it can be @best, @final, @newest, or a version such as @1.140")
            })?),
        })
    }
}

/// `RUN@best` apart: the run and which version of it, if it says.
pub(crate) fn split(text: &str) -> Result<(&str, Option<Which>), Failure> {
    match text.rsplit_once('@') {
        // A file may have an `@` in its name.
        Some((run, which)) if !Path::new(text).exists() => Ok((run, Some(Which::parse(which)?))),
        _ => Ok((text, None)),
    }
}

/// A model with what is known of it.
pub(crate) struct FoundModel {
    /// As it was named.
    pub(crate) name: String,
    /// The run it is from.
    pub(crate) run: Option<String>,
    /// The version it is.
    pub(crate) version: Option<String>,
    /// How many samples it has learned from.
    pub(crate) samples: Option<u64>,
    /// Kind, settings and data, where a run or the file says so.
    pub(crate) job: Option<Job>,
    /// What it needs besides its parameters.
    pub(crate) assets: Assets,
    pub(crate) tensors: BTreeMap<String, LoadedTensor>,
}

impl FoundModel {
    /// Opens what a text names.
    pub(crate) async fn open(text: &str) -> Result<Self, Failure> {
        let (path, which) = split(text)?;
        if Path::new(path).is_file() {
            return open_file(Path::new(path)).await;
        }
        let files = run_files(Path::new(path))?.ok_or_else(|| {
            Failure::mistake(format!("there is no model at {path}"))
                .hint("give a model file, or STORE/RUN such as skep-runs/mnist")
        })?;
        of_run(&files, which, text).await
    }

    /// Its task, and its settings; `kind` is what the user says it is.
    pub(crate) fn task(
        &self,
        tasks: &[Arc<dyn Task>],
        kind: Option<&str>,
    ) -> Result<(Arc<dyn Task>, Job), Failure> {
        let own = self.job.as_ref().map(|job| job.model.kind.as_str());
        let kind = kind.or(own.filter(|kind| !kind.is_empty())).ok_or_else(|| {
            Failure::mistake(format!("{} does not say what kind of model it is", self.name))
                .hint("say it with --model, such as --model lenet5")
        })?;
        let task = skep_serve::task_of(tasks, kind)?;
        let mut job = task.defaults();
        if let Some(own) = self.job.as_ref().filter(|own| own.model.kind == task.name()) {
            job = own.clone();
        }
        Ok((task, job))
    }

    /// The model with its numbers, ready to compute.
    pub(crate) fn load(
        &self,
        task: &dyn Task,
        job: &Job,
    ) -> Result<(Box<dyn Compute>, Frame), Failure> {
        let mut compute = task.compute(job)?;
        let layout = Layout::of_version(compute.schema(), Encoding::F32)
            .map_err(|error| Failure::fault(error.to_string()))?;
        let mut frame = Frame::zeros(Arc::new(layout));
        model_file::apply(&mut frame, &self.tensors).map_err(|error| {
            let failure = Failure::from(error);
            Failure { message: format!("{}: {}", self.name, failure.message), ..failure }
        })?;
        compute.load(&frame)?;
        Ok((compute, frame))
    }

    /// What is known of it, as metadata of a file.
    pub(crate) fn metadata(&self) -> BTreeMap<String, String> {
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
pub(crate) fn run_files(path: &Path) -> Result<Option<RunFiles>, Failure> {
    let within = path.parent().zip(path.file_name()).map(|(store, run)| {
        let store = if store.as_os_str().is_empty() { Path::new(".") } else { store };
        store.join("runs").join(run)
    });
    let folders = [Some(path.to_owned()), within];
    let found = folders.into_iter().flatten().find(|folder| folder.join("run.json").is_file());
    found.map(|folder| files_of(&folder)).transpose()
}

fn files_of(folder: &Path) -> Result<RunFiles, Failure> {
    let whole = std::fs::canonicalize(folder)
        .map_err(|error| Failure::mistake(format!("{}: {error}", folder.display())))?;
    let store = whole.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    let run = whole.file_name().unwrap_or_default().to_string_lossy();
    Ok(RunFiles::new(Store::open(&store.to_string_lossy())?, &run)?)
}

/// A version of a run in a store.
async fn of_run(files: &RunFiles, which: Option<Which>, name: &str) -> Result<FoundModel, Failure> {
    let run = files.run();
    let none = |what: String, hint: &str| Failure::mistake(what).hint(hint);
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
                eprintln!("warning: {warning}");
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
    })
}

fn samples_of(state: &Value) -> Option<u64> {
    state.pointer("/run/samples")?.as_u64()
}

async fn assets_of(files: &RunFiles, spec: &RunSpec) -> Result<Assets, Failure> {
    let mut assets = Assets::new();
    for asset in &spec.manifest.assets {
        if let Some(bytes) = files.asset(&asset.name).await? {
            assets.insert(asset.name.clone(), bytes.to_vec());
        }
    }
    Ok(assets)
}

/// A file, with the run that it lies in or what its metadata says.
async fn open_file(path: &Path) -> Result<FoundModel, Failure> {
    let name = path.to_string_lossy().into_owned();
    let file = model_file::read(&name, &model_file::read_bytes(path)?)?;
    let mut found = FoundModel {
        run: file.metadata.get(RUN).cloned(),
        version: file.metadata.get(VERSION).cloned(),
        samples: file.metadata.get(SAMPLES).and_then(|text| text.parse().ok()),
        job: job_of(&file.metadata),
        assets: Assets::new(),
        tensors: file.tensors,
        name,
    };
    if let Some(vocabulary) = file.metadata.get(onnx::VOCABULARY) {
        let name = skep_data::Vocabulary::ASSET.to_owned();
        found.assets.insert(name, vocabulary.clone().into_bytes());
    }
    if let Some(folder) = run_around(path) {
        let files = files_of(&folder)?;
        let spec = files.spec().await?;
        let newest = files.newest_checkpoint().await?.checkpoint;
        found.samples = found.samples.or(newest.and_then(|newest| samples_of(&newest.state)));
        found.assets = assets_of(&files, &spec).await?;
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
