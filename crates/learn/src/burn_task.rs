//! What a user writes on Burn: a model and its loss. Everything else (schema, initial parameters,
//! frames in and out, evaluation mode) is derived here, so that a model and a dataset of one's own
//! fit on a page.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use serde_json::{Map, Value};
use skep_data::{Dataset, Table, Vocabulary};
use skep_wire::{EvaluationCounts, Frame, Job, Layout, Schema};

use crate::state::State;
use crate::threads;
use crate::{Assets, Compute, Encoder, Inference, LearnError, Task, onnx};

/// A task whose model is a Burn module; wrap it in [`Burn`] to get a [`Task`].
pub trait BurnTask: Clone + Send + Sync + 'static {
    /// The model. Its fields name the tensors: a field `conv1: Conv2d` gives `conv1.weight`.
    type Model: Module + 'static;

    /// The model's kind in a job.
    fn name(&self) -> &str;

    /// One line for people.
    fn about(&self) -> &str;

    /// Settings that give good results without a flag; `model.kind` is filled in.
    fn defaults(&self) -> Job;

    /// Other names that `skep train NAME` finds it by.
    fn aliases(&self) -> &[&str] {
        &[]
    }

    /// Whether its own data stands in where one of its other names is given and no data.
    fn stands_in(&self, _alias: &str) -> bool {
        true
    }

    /// The task with the settings of `model.settings`. One without any refuses them.
    fn configured(&self, settings: &Map<String, Value>) -> Result<Self, LearnError> {
        match settings.keys().next() {
            None => Ok(self.clone()),
            Some(name) => Err(LearnError::Setting {
                model: self.name().to_owned(),
                reason: format!("there is no `{name}`; it has none"),
            }),
        }
    }

    /// Opens the data, in any form that is the task's own; folders that `skep data split` wrote are
    /// opened without it.
    fn dataset(&self, source: &str) -> Result<Dataset, LearnError>;

    /// Writes into a job what follows from its data and was not said.
    fn settle(&self, _job: &mut Job, _dataset: &Dataset) -> Result<(), LearnError> {
        Ok(())
    }

    /// Builds the model. Its values do not matter: parameters come from the hive.
    fn model(&self, device: &Device) -> Self::Model;

    /// The mean loss of a batch.
    fn loss(
        &self,
        model: &Self::Model,
        batch: &Table,
        device: &Device,
    ) -> Result<Tensor<1>, LearnError>;

    /// Sums over a batch; the model records no graph here.
    fn evaluate(
        &self,
        model: &Self::Model,
        batch: &Table,
        device: &Device,
    ) -> Result<EvaluationCounts, LearnError>;

    /// What the trained model can be asked; goes with [`BurnTask::infer`].
    fn inference(&self, _job: &Job) -> Option<Inference> {
        None
    }

    /// The run's assets that the trained model needs to be asked.
    fn assets(&self) -> &[&str] {
        &[]
    }

    /// What makes batches of texts, for a model that takes texts.
    fn encoder(&self, _assets: &Assets) -> Result<Box<dyn Encoder>, LearnError> {
        Err(LearnError::NoInference(self.name().to_owned()))
    }

    /// The rows that a trained model is measured on, with `assets` where they are its run's.
    fn test_rows(&self, source: &str, _assets: &Assets) -> Result<Table, LearnError> {
        Ok(self.dataset(source)?.test)
    }

    /// The trained model as an ONNX file; its kind and assets are added to it.
    fn onnx(&self, _parameters: &Frame) -> Result<onnx::Model, LearnError> {
        Err(LearnError::NoExport(self.name().to_owned()))
    }

    /// The scores `[batch, classes]` of a batch without labels; the model records no graph here.
    fn infer(
        &self,
        _model: &Self::Model,
        _batch: &Table,
        _device: &Device,
    ) -> Result<Tensor<2>, LearnError> {
        Err(LearnError::NoInference(self.name().to_owned()))
    }

    /// So many rows are given to [`BurnTask::infer`] at once, always: what is missing is filled up.
    /// Then every row takes the same way through the kernels, whether it came alone or with others,
    /// and its scores are the same to the last bit. That holds for layers that keep rows apart and
    /// treat all of them alike; a test should show it. `None` gives a batch as it comes.
    fn rows_at_once(&self) -> Option<usize> {
        None
    }
}

/// Makes a [`Task`] of a [`BurnTask`].
#[derive(Clone, Debug)]
pub struct Burn<T>(pub T);

impl<T: BurnTask> Task for Burn<T> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn about(&self) -> &str {
        self.0.about()
    }

    fn defaults(&self) -> Job {
        let mut job = self.0.defaults();
        self.0.name().clone_into(&mut job.model.kind);
        job
    }

    fn aliases(&self) -> &[&str] {
        self.0.aliases()
    }

    fn stands_in(&self, alias: &str) -> bool {
        self.0.stands_in(alias)
    }

    fn dataset(&self, job: &Job) -> Result<Dataset, LearnError> {
        let task = self.0.configured(&job.model.settings)?;
        // What `skep data split` wrote is the same for every task.
        match skep_data::split::open(&job.data.source)? {
            Some(dataset) => Ok(dataset),
            None => task.dataset(&job.data.source),
        }
    }

    fn settle(&self, job: &mut Job, dataset: &Dataset) -> Result<(), LearnError> {
        self.0.settle(job, dataset)
    }

    fn compute(&self, job: &Job) -> Result<Box<dyn Compute>, LearnError> {
        threads::use_one();
        let task = self.0.configured(&job.model.settings)?;
        Ok(Box::new(BurnCompute::new(task, Device::flex())?))
    }

    fn inference(&self, job: &Job) -> Option<Inference> {
        self.0.inference(job)
    }

    fn assets(&self) -> &[&str] {
        self.0.assets()
    }

    fn encoder(&self, job: &Job, assets: &Assets) -> Result<Box<dyn Encoder>, LearnError> {
        self.0.configured(&job.model.settings)?.encoder(assets)
    }

    fn test_rows(&self, job: &Job, assets: &Assets) -> Result<Table, LearnError> {
        let task = self.0.configured(&job.model.settings)?;
        let Some(dataset) = skep_data::split::open(&job.data.source)? else {
            return task.test_rows(&job.data.source, assets);
        };
        // Rows that were made with another vocabulary would mean other words.
        let is_the_same = |name: &str| {
            let its = dataset.assets.iter().find(|asset| asset.name == name);
            its.map(|asset| &asset.bytes[..]) == assets.get(name).map(|bytes| &bytes[..])
        };
        match self.0.assets().iter().find(|name| !is_the_same(name)) {
            Some(name) => Err(LearnError::Asset {
                name: (*name).to_owned(),
                reason: format!("of the model is not that of {}", job.data.source),
            }),
            None => Ok(dataset.test),
        }
    }

    fn onnx(
        &self,
        job: &Job,
        parameters: &Frame,
        assets: &Assets,
    ) -> Result<onnx::Model, LearnError> {
        let mut model = self.0.configured(&job.model.settings)?.onnx(parameters)?;
        model.note(onnx::KIND, self.0.name());
        if let Some(vocabulary) = assets.get(Vocabulary::ASSET) {
            model.note(onnx::VOCABULARY, &String::from_utf8_lossy(vocabulary));
        }
        Ok(model)
    }
}

/// The numbers of one worker on Burn.
struct BurnCompute<T: BurnTask> {
    task: T,
    /// Without autodiff.
    device: Device,
    state: State,
    version: Arc<Layout>,
    gradient: Arc<Layout>,
    /// `None` only while a load is under way.
    model: Option<T::Model>,
    /// The model in evaluation mode. A forward pass on a model that records a graph without a
    /// backward pass behind it would keep that graph for ever.
    valid: Option<T::Model>,
    batches: Vec<i64>,
    /// What was loaded, where buffers have to be set back to it.
    loaded: Option<Arc<Frame>>,
    /// Whether a batch has changed buffers since.
    changed: bool,
}

impl<T: BurnTask> BurnCompute<T> {
    fn new(task: T, device: Device) -> Result<Self, LearnError> {
        let model = task.model(&device.clone().autodiff());
        let state = State::of(&model, task.name())?;
        let version = Arc::new(state.version.clone());
        let gradient = Arc::new(state.gradient.clone());
        let model = Some(model);
        Ok(Self {
            task,
            device,
            state,
            version,
            gradient,
            model,
            valid: None,
            batches: Vec::new(),
            loaded: None,
            changed: false,
        })
    }

    fn refuse(&self, what: &'static str) -> LearnError {
        LearnError::Layout { what, model: self.task.name().to_owned() }
    }

    fn model(&self) -> &T::Model {
        self.model.as_ref().expect("a load puts the model back")
    }

    fn valid(&mut self) -> &T::Model {
        if self.valid.is_none() {
            self.valid = Some(self.model().valid());
        }
        self.valid.as_ref().expect("made above")
    }
}

fn same(ours: &Arc<Layout>, theirs: &Arc<Layout>) -> bool {
    // A header with metadata differs in its bytes, not in where the tensors lie.
    Arc::ptr_eq(ours, theirs)
        || ours.prefix() == theirs.prefix()
        || ours.places() == theirs.places()
}

impl<T: BurnTask> Compute for BurnCompute<T> {
    fn schema(&self) -> &Schema {
        &self.state.schema
    }

    fn initial(&self, seed: u64) -> Result<Frame, LearnError> {
        let mut frame = Frame::zeros(self.version.clone());
        // For tensors that belong to no known layer and that the module draws itself.
        self.device.seed(seed);
        let module = self.task.model(&self.device);
        self.state.initial(&module, seed, &mut frame);
        Ok(frame)
    }

    fn load(&mut self, parameters: &Frame) -> Result<(), LearnError> {
        if !same(&self.version, parameters.layout()) {
            return Err(self.refuse("version"));
        }
        let model = self.model.take().expect("a load puts the model back");
        let device = self.device.clone().autodiff();
        self.model = Some(self.state.load(model, &device, parameters));
        self.valid = None;
        self.batches = self.state.batches(parameters);
        if self.state.has_buffers() {
            self.loaded = Some(Arc::new(parameters.clone()));
            self.changed = false;
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<(), LearnError> {
        match self.loaded.clone() {
            Some(loaded) if self.changed => self.load(&loaded),
            _ => Ok(()),
        }
    }

    fn gradient(
        &mut self,
        batch: &Table,
        seed: u64,
        gradient: &mut Frame,
    ) -> Result<f64, LearnError> {
        if !same(&self.gradient, gradient.layout()) {
            return Err(self.refuse("gradient"));
        }
        let device = self.device.clone().autodiff();
        // Dropout and the like draw from the device's own generator.
        self.device.seed(seed);
        let loss = self.task.loss(self.model(), batch, &device)?;
        let gradients = loss.backward();
        let loss = f64::from(loss.inner().into_scalar::<f32>());
        if !loss.is_finite() {
            return Err(LearnError::NotFinite(loss));
        }
        self.state.take_gradients(self.model(), gradients, gradient);
        if self.state.has_buffers() {
            self.valid = None;
            self.changed = true;
            for count in &mut self.batches {
                *count += 1;
            }
            self.state.take_buffers(&self.model().valid(), &self.batches, gradient)?;
        }
        Ok(loss)
    }

    fn evaluate(&mut self, batch: &Table) -> Result<EvaluationCounts, LearnError> {
        let (task, device) = (self.task.clone(), self.device.clone());
        task.evaluate(self.valid(), batch, &device)
    }

    fn infer(&mut self, batch: &Table) -> Result<Vec<f32>, LearnError> {
        let (task, device) = (self.task.clone(), self.device.clone());
        let valid = self.valid();
        let infer = |batch: &Table| -> Result<Vec<f32>, LearnError> {
            let scores = task.infer(valid, batch, &device)?.into_data();
            Ok(scores.iter::<f32>().collect())
        };
        let rows = batch.rows();
        let Some(at_once) = task.rows_at_once().filter(|_| rows > 0) else {
            return infer(batch);
        };
        let mut scores = Vec::new();
        for first in (0..rows).step_by(at_once) {
            // The last row stands in for those that are missing.
            let places: Vec<u64> =
                (first..first + at_once).map(|row| row.min(rows - 1) as u64).collect();
            let part = infer(&batch.gather(&places)?)?;
            let classes = part.len() / at_once;
            scores.extend_from_slice(&part[..classes * at_once.min(rows - first)]);
        }
        Ok(scores)
    }

    fn rows_at_once(&self) -> Option<usize> {
        self.task.rows_at_once()
    }
}
