//! What `skep serve MODEL…` names, ready to be asked: a run in a store, a file of tensors, several of
//! them as an ensemble, or an ONNX file.

use std::path::Path;
use std::sync::Arc;

use skep_learn::{Assets, EnsembleTask, Task, Vote};
use skep_wire::{Frame, Layout};

use crate::found::{self, Member};
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

/// Opens what a text names, a file, STORE/RUN or STORE/RUN@VERSION; several are an ensemble. `kind` is
/// what the user says it is, and `settings` hold for a graph.
pub async fn open(
    names: &[String],
    kind: Option<&str>,
    tasks: &[Arc<dyn Task>],
    settings: &GraphSettings,
) -> Result<Source, ServeError> {
    let called = match names {
        [name] => Some(stem(Path::new(name))),
        _ => None,
    };
    let names = found::members(names)?;
    if let [name] = &names[..] {
        let path = Path::new(name);
        let ends_so = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case(ONNX));
        if path.is_file() && kind.map_or(ends_so, |kind| kind == ONNX) {
            return open_graph(path, settings);
        }
    }
    if let Some(flag) = settings.given() {
        return Err(ServeError::model(
            format!("{flag} is for ONNX files, which {} is not", names.join(", ")),
            "a model that Skep trained knows its classes and its pictures",
        ));
    }
    let mut members = Vec::new();
    for name in &names {
        members.push(Member::open(name, kind, tasks, &Assets::new()).await?);
    }
    Member::check(&members)?;
    ensemble(members, called)
}

/// One model, or several that answer as one by the mean of what they hold likely.
fn ensemble(mut members: Vec<Member>, called: Option<String>) -> Result<Source, ServeError> {
    let count = members.len();
    let Some(first) = members.first() else {
        return Err(ServeError::model("there is no model to serve", "name one, such as STORE/RUN"));
    };
    let name = first.served_as();
    let (job, assets) = (first.job.clone(), first.found.assets.clone());
    if count == 1 {
        let member = members.remove(0);
        let parameters = member.found.load(&*member.task, &job)?.1;
        let version = member.found.version.unwrap_or(member.found.hash);
        let model = Model::new(&name, member.task, job, &assets)?;
        return Ok(Source { model, loaded: Loaded { version, parameters } });
    }
    let task = EnsembleTask::new(first.task.clone(), count, Vote::Mean);
    let mut frames = Vec::new();
    let mut hashes = Vec::new();
    for member in &members {
        frames.push(member.found.load(&*member.task, &member.job)?.1);
        hashes.extend_from_slice(member.found.hash.as_bytes());
    }
    let parameters = task.ensemble(&job)?.join(&frames)?;
    let name = called.unwrap_or_else(|| format!("{name}-and-{}-more", count - 1));
    let model = Model::new(&name, Arc::new(task), job, &assets)?;
    Ok(Source { model, loaded: Loaded { version: found::hash(&hashes), parameters } })
}

fn open_graph(path: &Path, settings: &GraphSettings) -> Result<Source, ServeError> {
    let bytes = read(path)?;
    let graph = Graph::open(path, &bytes, settings)?;
    let layout = Layout::new(Vec::new()).map_err(skep_learn::LearnError::from)?;
    let parameters = Frame::zeros(Arc::new(layout));
    let loaded = Loaded { version: found::hash(&bytes), parameters };
    Ok(Source { model: Model::of_graph(&stem(path), graph), loaded })
}

fn read(path: &Path) -> Result<Vec<u8>, ServeError> {
    std::fs::read(path).map_err(|error| ServeError::System(format!("{}: {error}", path.display())))
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into())
}
