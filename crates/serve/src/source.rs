//! What `skep serve MODEL` names: a run in a store, one of its checkpoints, or a file of tensors
//! that others trained.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};
use skep_data::{RunFiles, RunRecord, Store, model_file};
use skep_learn::Task;
use skep_wire::{Frame, Job, Layout, Version};

use crate::assets::Beside;
use crate::onnx::Graph;
use crate::{GraphSettings, Loaded, Model, ServeError};

/// A model and the version of it that was found.
pub struct Source {
    /// The model.
    pub model: Model,
    /// Its parameters.
    pub loaded: Loaded,
}

/// The task of a model's kind.
pub fn task_of(tasks: &[Arc<dyn Task>], kind: &str) -> Result<Arc<dyn Task>, ServeError> {
    let named = tasks.iter().find(|task| task.name() == kind);
    named
        .or_else(|| tasks.iter().find(|task| task.defaults().data.source == kind))
        .cloned()
        .ok_or_else(|| {
            let known: Vec<_> = tasks.iter().map(|task| task.name()).collect();
            ServeError::model(
                format!("there is no kind of model `{kind}`"),
                format!("this program knows {}", known.join(", ")),
            )
        })
}

/// The kind of a file that brings its own graph.
const ONNX: &str = "onnx";

/// Opens what a path names; `kind` is what the user says it is, and `settings` hold for a graph.
pub async fn open(
    path: &Path,
    kind: Option<&str>,
    tasks: &[Arc<dyn Task>],
    settings: &GraphSettings,
) -> Result<Source, ServeError> {
    let ends_so = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case(ONNX));
    if path.is_file() && kind.map_or(ends_so, |kind| kind == ONNX) {
        return open_graph(path, settings);
    }
    if let Some(flag) = settings.given() {
        return Err(ServeError::model(
            format!("{flag} is for ONNX files, which {} is not", path.display()),
            "a model that Skep trained knows its classes and its pictures",
        ));
    }
    if path.is_file() {
        return open_file(path, kind, tasks).await;
    }
    let folder = run_folder(path).ok_or_else(|| {
        ServeError::model(
            format!("there is no model at {}", path.display()),
            "give a model file, an ONNX file, or STORE/RUN such as skep-runs/mnist",
        )
    })?;
    let final_model = folder.join("model.safetensors");
    if final_model.is_file() {
        return open_file(&final_model, kind, tasks).await;
    }
    let files = run_files(&folder)?;
    let newest = files.newest_checkpoint().await?;
    for warning in &newest.warnings {
        tracing::warn!("{warning}");
    }
    let (version, bytes) = match newest.checkpoint {
        Some(checkpoint) => (checkpoint.version, checkpoint.model),
        None => (Version::default(), files.version0().await?),
    };
    let job = files.record().await?.spec.job;
    let assets = Beside::Run(&folder);
    let version = version.to_string();
    let found = Found { name: files.run(), kind, job: Some(job), version, assets };
    found.source(&folder.to_string_lossy(), &bytes, tasks)
}

fn open_graph(path: &Path, settings: &GraphSettings) -> Result<Source, ServeError> {
    let bytes = read(path)?;
    let graph = Graph::open(path, &bytes, settings)?;
    let layout = Layout::new(Vec::new()).map_err(skep_learn::LearnError::from)?;
    let parameters = Frame::zeros(Arc::new(layout));
    let loaded = Loaded { version: hash(&bytes), parameters };
    Ok(Source { model: Model::of_graph(&stem(path), graph), loaded })
}

fn read(path: &Path) -> Result<Vec<u8>, ServeError> {
    std::fs::read(path).map_err(|error| ServeError::System(format!("{}: {error}", path.display())))
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into())
}

/// The folder of a run: as it is, or as STORE/RUN.
fn run_folder(path: &Path) -> Option<PathBuf> {
    let within = path.parent().zip(path.file_name()).map(|(store, run)| {
        let store = if store.as_os_str().is_empty() { Path::new(".") } else { store };
        store.join("runs").join(run)
    });
    [Some(path.to_owned()), within]
        .into_iter()
        .flatten()
        .find(|folder| folder.join("run.json").is_file())
}

fn run_files(folder: &Path) -> Result<RunFiles, ServeError> {
    let whole = std::fs::canonicalize(folder)
        .map_err(|error| ServeError::System(format!("{}: {error}", folder.display())))?;
    let store = whole.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    let run = whole.file_name().unwrap_or_default().to_string_lossy();
    Ok(RunFiles::new(Store::open(&store.to_string_lossy())?, &run)?)
}

async fn open_file(
    path: &Path,
    kind: Option<&str>,
    tasks: &[Arc<dyn Task>],
) -> Result<Source, ServeError> {
    let shown = path.to_string_lossy();
    let bytes = read(path)?;
    let whole = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = whole.parent().unwrap_or(Path::new("/"));
    // A run's final model lies beside its description, a checkpoint two folders below it.
    let run = [Some(folder), folder.parent().and_then(Path::parent)]
        .into_iter()
        .flatten()
        .find(|folder| folder.join("run.json").is_file());
    let record = match run {
        Some(run) => Some(read_record(&run.join("run.json"))?),
        None => None,
    };
    let name = record.as_ref().map_or_else(|| stem(path), |record| record.spec.name.clone());
    let version = match run {
        Some(run) => version_within(run, folder, &bytes).await,
        None => None,
    };
    let version = version.map_or_else(|| hash(&bytes), |version| version.to_string());
    let job = record.map(|record| record.spec.job);
    let assets = run.map_or(Beside::File(folder), Beside::Run);
    Found { name: &name, kind, job, version, assets }.source(&shown, &bytes, tasks)
}

fn read_record(path: &Path) -> Result<RunRecord, ServeError> {
    let text = read(path)?;
    serde_json::from_slice(&text)
        .map_err(|error| ServeError::System(format!("{}: {error}", path.display())))
}

/// Which version of a run a file is, if it is one.
async fn version_within(run: &Path, folder: &Path, bytes: &[u8]) -> Option<Version> {
    let name = folder.file_name()?.to_str()?;
    if let Some((generation, number)) = name.split_once('-')
        && let (Ok(generation), Ok(number)) = (generation.parse(), number.parse())
    {
        return Some(Version::new(generation, number));
    }
    let newest = run_files(run).ok()?.newest_checkpoint().await.ok()?.checkpoint?;
    (newest.model == bytes).then_some(newest.version)
}

/// A version's name where nobody gave it one.
fn hash(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256-{}", &hex[..12])
}

/// What is known of a file.
struct Found<'found> {
    name: &'found str,
    kind: Option<&'found str>,
    job: Option<Job>,
    version: String,
    assets: Beside<'found>,
}

impl Found<'_> {
    fn source(
        self,
        path: &str,
        bytes: &[u8],
        tasks: &[Arc<dyn Task>],
    ) -> Result<Source, ServeError> {
        let own = self.job.as_ref().map(|job| job.model.kind.as_str());
        let kind = self.kind.or(own).ok_or_else(|| {
            ServeError::model(
                format!("{path} does not say what kind of model it is"),
                "say it with --model, such as --model lenet5",
            )
        })?;
        let task = task_of(tasks, kind)?;
        let job = self.job.unwrap_or_else(|| task.defaults());
        let assets = self.assets.read(&*task)?;
        let model = Model::new(self.name, task, job, &assets)?;
        let mut parameters = Frame::zeros(model.layout()?.clone());
        model_file::apply(&mut parameters, &model_file::parse(path, bytes)?)?;
        Ok(Source { model, loaded: Loaded { version: self.version, parameters } })
    }
}
