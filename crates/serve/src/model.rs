//! What is asked: a task or an ONNX graph, with what it takes and tells apart, and one version of
//! its parameters.

use std::sync::Arc;

use skep_data::{Column, Table};
use skep_learn::{Assets, Compute, Encoder, ImageForm, Inference, Input, Task};
use skep_wire::{Dtype, Frame, Job, Layout, Schema};

use crate::datatype::Datatype;
use crate::onnx::Graph;
use crate::tensor::TensorSpec;
use crate::{ApiError, ServeError, picture};

/// What is asked.
pub struct Model {
    /// Its name in addresses: the run's, or the file's.
    pub name: String,
    /// What people can ask it; `None` where it takes nothing but tensors.
    pub inference: Option<Inference>,
    pub(crate) inputs: Vec<TensorSpec>,
    pub(crate) outputs: Vec<TensorSpec>,
    pub(crate) engine: Engine,
    /// So many questions can be computed together without a trace in their answers.
    pub(crate) at_once: usize,
}

/// What computes.
pub(crate) enum Engine {
    Task(Trained),
    Graph(Graph),
}

/// A task of this program.
pub(crate) struct Trained {
    task: Arc<dyn Task>,
    job: Job,
    layout: Arc<Layout>,
    /// For models of texts.
    encoder: Option<Box<dyn Encoder>>,
}

/// One version of a model's parameters.
pub struct Loaded {
    /// Its name in answers.
    pub version: String,
    /// The numbers; none for a graph, which holds its own.
    pub parameters: Frame,
}

impl Model {
    /// The model of a task, if it is one that can be asked, with the assets that the task names.
    pub fn new(
        name: &str,
        task: Arc<dyn Task>,
        job: Job,
        assets: &Assets,
    ) -> Result<Self, ServeError> {
        let inference = task.inference(&job).ok_or_else(|| {
            ServeError::model(
                format!("models of the kind `{}` cannot be asked", task.name()),
                "`lenet5` and `text-average` can, and so can a task of one's own that has \
                 `inference` and `infer`",
            )
        })?;
        let encoder = match inference.input {
            Input::Text => Some(task.encoder(&job, assets)?),
            _ => None,
        };
        let compute = task.compute(&job)?;
        let layout = Layout::of_version(compute.schema(), skep_wire::Encoding::F32)
            .map_err(skep_learn::LearnError::from)?;
        let classes = inference.classes.len();
        let output = |name: &str| TensorSpec {
            name: name.to_owned(),
            datatypes: vec![Datatype::Fp32],
            shape: vec![None, Some(classes)],
        };
        Ok(Self {
            name: name.to_owned(),
            inputs: vec![input_of(&inference.input)],
            outputs: vec![output("probabilities"), output("logits")],
            inference: Some(inference),
            at_once: compute.rows_at_once().unwrap_or(1),
            engine: Engine::Task(Trained { task, job, layout: Arc::new(layout), encoder }),
        })
    }

    /// The model that an ONNX file holds.
    pub(crate) fn of_graph(name: &str, graph: Graph) -> Self {
        Self {
            name: name.to_owned(),
            inference: graph.inference(),
            inputs: graph.inputs().to_vec(),
            outputs: graph.outputs().to_vec(),
            engine: Engine::Graph(graph),
            at_once: 1,
        }
    }

    /// What kind of model it is.
    pub fn kind(&self) -> &str {
        match &self.engine {
            Engine::Task(trained) => trained.task.name(),
            Engine::Graph(_) => "onnx",
        }
    }

    fn trained(&self) -> Result<&Trained, ServeError> {
        match &self.engine {
            Engine::Task(trained) => Ok(trained),
            Engine::Graph(_) => Err(ServeError::System("a graph is no task".to_owned())),
        }
    }

    /// Where its tensors lie in a version.
    pub fn layout(&self) -> Result<&Arc<Layout>, ServeError> {
        Ok(&self.trained()?.layout)
    }

    /// Its tensors.
    pub fn schema(&self) -> Result<Schema, ServeError> {
        Ok(self.compute()?.schema().clone())
    }

    /// The numbers of one thread.
    pub fn compute(&self) -> Result<Box<dyn Compute>, ServeError> {
        let trained = self.trained()?;
        Ok(trained.task.compute(&trained.job)?)
    }

    /// What it tells apart.
    pub(crate) fn classes(&self) -> &[String] {
        self.inference.as_ref().map_or(&[], |inference| &inference.classes)
    }

    /// What it takes, in a word: `image`, `text` or `tensor`.
    pub fn takes(&self) -> &'static str {
        match self.inference.as_ref().map(|inference| &inference.input) {
            Some(Input::Image { .. }) => "image",
            Some(Input::Text) => "text",
            _ => "tensor",
        }
    }

    /// The bytes of one picture as the model sees it, from a PNG or JPEG file.
    pub(crate) fn pixels(&self, file: &[u8]) -> Result<Vec<u8>, ApiError> {
        match self.inference.as_ref().map(|inference| &inference.input) {
            Some(Input::Image { shape, form, .. }) => picture::to_bytes(file, *shape, *form),
            _ => Err(self.other_kind("an image")),
        }
    }

    /// A batch of pictures, in the type they came in.
    pub(crate) fn batch_of_images(&self, dtype: Dtype, bytes: Vec<u8>) -> Result<Table, ApiError> {
        let Some(Input::Image { column, shape, .. }) =
            self.inference.as_ref().map(|inference| &inference.input)
        else {
            return Err(self.other_kind("an image"));
        };
        let column = Column { name: column.clone(), dtype, shape: shape.to_vec(), bytes };
        Table::new(vec![column]).map_err(|error| ApiError::bad(error.to_string(), ""))
    }

    /// A batch with a row per text.
    pub(crate) fn batch_of_texts(&self, texts: &[String]) -> Result<Table, ApiError> {
        match &self.engine {
            Engine::Task(Trained { encoder: Some(encoder), .. }) => Ok(encoder.encode(texts)?),
            _ => Err(self.other_kind("a text")),
        }
    }

    fn other_kind(&self, given: &str) -> ApiError {
        let takes = match self.takes() {
            "image" => "an image",
            "text" => "a text",
            _ => {
                return ApiError::bad(
                    format!("the model `{}` takes tensors, not {given}", self.name),
                    format!("ask it at /v2/models/{}/infer", self.name),
                );
            }
        };
        ApiError::bad(
            format!("the model `{}` takes {takes}, not {given}", self.name),
            "serve a model of the other task, or ask for what this one takes",
        )
    }

    /// Whether pictures are brought into the form of figures in ink.
    pub(crate) fn is_ink(&self) -> bool {
        let input = self.inference.as_ref().map(|inference| &inference.input);
        matches!(input, Some(Input::Image { form: ImageForm::Ink, .. }))
    }
}

fn input_of(input: &Input) -> TensorSpec {
    match input {
        Input::Image { column, shape, .. } => TensorSpec {
            name: column.clone(),
            datatypes: vec![Datatype::Fp32, Datatype::Uint8],
            shape: std::iter::once(None).chain(shape.iter().copied().map(Some)).collect(),
        },
        _ => TensorSpec {
            name: "text".to_owned(),
            datatypes: vec![Datatype::Bytes],
            shape: vec![None],
        },
    }
}
