//! From a job to a run: data into shards, version 0 from a seed or a file.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use skep_data::{PrepareSettings, Prepared, RowSplit, model_file};
use skep_learn::Task;
use skep_wire::{Frame, Layout, RUN_METADATA, RunSpec};

use crate::failure::Failure;
use crate::job_file::TaskJob;
use crate::progress::reading;

/// Everything that creates a run.
pub(crate) struct PreparedRun {
    pub(crate) spec: RunSpec,
    pub(crate) version0: Frame,
    pub(crate) data: Prepared,
}

/// Opens the data and makes version 0.
pub(crate) fn prepare(task_job: &TaskJob, name: String) -> Result<PreparedRun, Failure> {
    let task = &task_job.task;
    let mut job = task_job.job.clone();
    let dataset = reading(&job.data.source, || task.dataset(&job))?;
    task.settle(&mut job, &dataset)?;
    let split = match job.data.split.as_str() {
        "shuffled" => RowSplit::Shuffled,
        "label" => RowSplit::Label,
        other => {
            return Err(Failure::mistake(format!("data.split is `{other}`"))
                .hint("it can be `shuffled` or `label`"));
        }
    };
    let data = dataset.prepare(&PrepareSettings {
        shards: job.data.shards,
        copies: job.data.copies,
        validation: job.data.validation,
        split,
    })?;
    let mut compute = task.compute(&job)?;
    let mut version0 = compute.initial(job.run.seed)?;
    if let Some(path) = &job.model.init {
        let loaded = model_file::load(path)?;
        model_file::apply(&mut version0, &loaded).map_err(|error| {
            let failure = Failure::from(error);
            Failure { message: format!("{path}: {}", failure.message), ..failure }
        })?;
    }
    // Data that does not fit the model is found here, not by every worker.
    compute.load(&version0)?;
    compute.evaluate(&dataset.train.slice(0..1)?)?;
    let spec = RunSpec {
        name,
        job,
        schema: compute.schema().clone(),
        manifest: data.manifest.clone(),
        made_by: format!("skep {}", env!("CARGO_PKG_VERSION")),
    };
    Ok(PreparedRun { spec, version0, data })
}

impl PreparedRun {
    /// A run of the same data and job that starts from another seed: the member of an ensemble that
    /// comes so many after this one.
    pub(crate) fn sibling(&self, task: &dyn Task, name: &str, at: u64) -> Result<Self, Failure> {
        let mut spec = self.spec.clone();
        name.clone_into(&mut spec.name);
        spec.job.run.name = spec.job.run.name.map(|_| name.to_owned());
        spec.job.run.seed = spec.job.run.seed.wrapping_add(at);
        let version0 = match &spec.job.model.init {
            Some(_) => self.version0.clone(),
            None => task.compute(&spec.job)?.initial(spec.job.run.seed)?,
        };
        Ok(Self { spec, version0, data: self.data.clone() })
    }

    /// The file that creates the run over the wire.
    pub(crate) fn file(&self) -> Result<Bytes, Failure> {
        let wrong = |error: &dyn std::fmt::Display| Failure::fault(error.to_string());
        let text = serde_json::to_string(&self.spec).map_err(|error| wrong(&error))?;
        let tensors = self.version0.layout().places().iter();
        let tensors = tensors.map(|place| (place.name.clone(), place.dtype, place.shape.clone()));
        let metadata = HashMap::from([(RUN_METADATA.to_owned(), text)]);
        let layout = Layout::with_metadata(tensors.collect(), Some(metadata))
            .map_err(|error| wrong(&error))?;
        let mut file = Frame::zeros(Arc::new(layout));
        file.data_mut().copy_from_slice(self.version0.data());
        Ok(Bytes::from_owner(file))
    }
}

/// The first of `name`, `name-2`, `name-3`, … that is not taken.
pub(crate) fn free_name(usual: &str, taken: &[String]) -> String {
    let is_taken = |name: &str| taken.iter().any(|known| known == name);
    if !is_taken(usual) {
        return usual.to_owned();
    }
    (2..).map(|n| format!("{usual}-{n}")).find(|name| !is_taken(name)).unwrap_or_default()
}
