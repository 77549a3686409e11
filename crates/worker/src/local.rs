//! Local training: what a worker does between pulling a version and bringing home a model.
//!
//! The worker's optimiser starts afresh with every lease: its momentum and averages never outlive
//! one, so what a slot brings home depends on the slot and its base version alone, not on which
//! worker has it or what that one did before.

use std::sync::Arc;

use serde_json::Value;
use skep_math::{Optimiser, OptimiserSettings, Segment};
use skep_wire::{Frame, Layout, Role, RunView};

use crate::WorkerError;

/// A worker's own copy of the parameters, and how it moves.
pub(crate) struct LocalTraining {
    settings: OptimiserSettings,
    segments: Vec<Segment>,
    buffers: Vec<String>,
    /// How many versions the run makes: the schedule goes by them.
    versions: Option<u64>,
    /// How often a worker goes through its shard, where models are averaged once.
    once: Option<u64>,
    /// The version that was pulled.
    base: Option<Frame>,
    work: Option<Work>,
}

/// Training under one lease.
struct Work {
    optimiser: Optimiser,
    current: Frame,
    /// Where the next step writes.
    next: Frame,
}

impl LocalTraining {
    /// For runs that exchange models; nothing for others.
    pub(crate) fn of(
        view: &RunView,
        version: &Layout,
        gradient: &Layout,
    ) -> Result<Option<Self>, WorkerError> {
        let wrong = |message: String| WorkerError::System(format!("run {}: {message}", view.name));
        let job = &view.job;
        match job.run.exchange.as_str() {
            "gradients" => return Ok(None),
            "models" => {}
            other => return Err(wrong(format!("this worker knows no exchange `{other}`"))),
        }
        let settings = serde_json::from_value(Value::Object(job.optimiser.clone()))
            .map_err(|error| wrong(format!("optimiser: {error}")))?;
        let mut segments = Vec::new();
        let mut buffers = Vec::new();
        for tensor in view.schema.tensors() {
            let name = &tensor.name;
            match &tensor.role {
                Role::Trainable { group } => {
                    let places = version.float_range(name).zip(gradient.float_range(name));
                    let (parameter, gradient) =
                        places.ok_or_else(|| wrong(format!("`{name}` has no place")))?;
                    segments.push(Segment { parameter, gradient, group: group.clone() });
                }
                Role::Buffer { .. } => buffers.push(name.clone()),
                _ => {}
            }
        }
        let once = job.policy.get("rounds").and_then(Value::as_str) == Some("once");
        Ok(Some(Self {
            settings,
            segments,
            buffers,
            versions: view.versions,
            once: once.then_some(job.run.epochs),
            base: None,
            work: None,
        }))
    }

    /// How often a slot is gone through.
    pub(crate) fn epochs(&self) -> u64 {
        self.once.unwrap_or(1)
    }

    /// A version was pulled.
    pub(crate) fn pulled(&mut self, version: Frame) {
        self.base = Some(version);
        self.work = None;
    }

    /// The version that was pulled.
    pub(crate) fn base(&self) -> Option<&Frame> {
        self.base.as_ref()
    }

    /// Begins to train from the version that was pulled, which has this number, for so many steps.
    pub(crate) fn begin(&mut self, number: u64, steps: u64) -> Result<(), WorkerError> {
        let base = self.base.as_ref().ok_or_else(|| missing("no version was pulled"))?;
        // The schedule goes by versions and stands still within one; where there is only one, it
        // goes by local steps.
        let settings = match self.once {
            Some(_) => self.settings.clone(),
            None => self.settings.at(number, self.versions),
        };
        let optimiser = Optimiser::new(settings, self.segments.clone(), Some(steps))
            .map_err(|error| WorkerError::System(error.to_string()))?;
        self.work = Some(Work { optimiser, current: base.clone(), next: base.clone() });
        Ok(())
    }

    /// The parameters now.
    pub(crate) fn parameters(&self) -> Result<&Frame, WorkerError> {
        let work = self.work.as_ref().ok_or_else(|| missing("training has not begun"))?;
        Ok(&work.current)
    }

    /// Moves by a batch's gradient; says whether everything stayed finite.
    pub(crate) fn step(&mut self, gradient: &Frame) -> Result<bool, WorkerError> {
        let work = self.work.as_mut().ok_or_else(|| missing("training has not begun"))?;
        let report = work
            .optimiser
            .stage(work.current.floats(), gradient.floats(), 1.0, work.next.floats_mut())
            .map_err(|error| WorkerError::System(error.to_string()))?;
        if !report.finite {
            return Ok(false);
        }
        work.optimiser.commit();
        for name in &self.buffers {
            if let (Some(from), Some(into)) = (gradient.tensor(name), work.next.tensor_mut(name)) {
                into.copy_from_slice(from);
            }
        }
        std::mem::swap(&mut work.current, &mut work.next);
        Ok(true)
    }

    /// What training has changed, in a gradient's layout: differences of what trains, values of
    /// buffers.
    pub(crate) fn difference(&self, into: &mut Frame) -> Result<(), WorkerError> {
        let base = self.base.as_ref().ok_or_else(|| missing("no version was pulled"))?;
        let current = self.parameters()?;
        for segment in &self.segments {
            let old = &base.floats()[segment.parameter.clone()];
            let new = &current.floats()[segment.parameter.clone()];
            let into = &mut into.floats_mut()[segment.gradient.clone()];
            for ((into, new), old) in into.iter_mut().zip(new).zip(old) {
                *into = new - old;
            }
        }
        for name in &self.buffers {
            if let (Some(from), Some(into)) = (current.tensor(name), into.tensor_mut(name)) {
                into.copy_from_slice(from);
            }
        }
        Ok(())
    }
}

fn missing(what: &str) -> WorkerError {
    WorkerError::System(what.to_owned())
}

/// A frame that nobody else holds: the one there, or a new one if a request still has it.
pub(crate) fn own(frame: &mut Arc<Frame>) -> &mut Frame {
    if Arc::get_mut(frame).is_none() {
        *frame = Arc::new(Frame::zeros(frame.layout().clone()));
    }
    Arc::get_mut(frame).expect("the frame was made or is held by us alone")
}
