//! What is asked: a task with what it takes and tells apart, and one version of its parameters.

use std::sync::Arc;

use skep_data::{Column, Table};
use skep_learn::{Compute, ImageForm, Inference, Input, Task};
use skep_wire::{Dtype, Frame, Job, Layout, Schema};

use crate::{ApiError, ServeError, picture};

/// What is asked.
pub struct Model {
    /// Its name in addresses: the run's, or the file's.
    pub name: String,
    /// What it takes and tells apart.
    pub inference: Inference,
    task: Arc<dyn Task>,
    job: Job,
    layout: Arc<Layout>,
}

/// One version of a model's parameters.
pub struct Loaded {
    /// Its name in answers.
    pub version: String,
    /// The numbers.
    pub parameters: Frame,
}

impl Model {
    /// The model of a task, if it is one that can be asked.
    pub fn new(name: &str, task: Arc<dyn Task>, job: Job) -> Result<Self, ServeError> {
        let inference = task.inference(&job).ok_or_else(|| {
            ServeError::model(
                format!("models of the kind `{}` cannot be asked", task.name()),
                "`lenet5` can, and so can a task of one's own that has `inference` and `infer`",
            )
        })?;
        let compute = task.compute(&job)?;
        let layout = Layout::of_version(compute.schema(), skep_wire::Encoding::F32)
            .map_err(skep_learn::LearnError::from)?;
        Ok(Self { name: name.to_owned(), inference, task, job, layout: Arc::new(layout) })
    }

    /// What kind of model it is.
    pub fn kind(&self) -> &str {
        self.task.name()
    }

    /// Where its tensors lie in a version.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Its tensors.
    pub fn schema(&self) -> Result<Schema, ServeError> {
        Ok(self.compute()?.schema().clone())
    }

    /// The numbers of one thread.
    pub fn compute(&self) -> Result<Box<dyn Compute>, ServeError> {
        Ok(self.task.compute(&self.job)?)
    }

    /// What it takes, in a word.
    pub(crate) fn takes(&self) -> &'static str {
        match self.inference.input {
            Input::Image { .. } => "image",
            Input::Text => "text",
            _ => "tensor",
        }
    }

    /// A batch of one picture, from the bytes of a PNG or JPEG file.
    pub(crate) fn batch_of_picture(&self, file: &[u8]) -> Result<Table, ApiError> {
        let Input::Image { column, shape, form } = &self.inference.input else {
            return Err(self.other_kind("an image"));
        };
        let bytes = picture::to_bytes(file, *shape, *form)?;
        let column =
            Column { name: column.clone(), dtype: Dtype::U8, shape: shape.to_vec(), bytes };
        Table::new(vec![column]).map_err(|error| ApiError::internal(&error))
    }

    /// A batch with a row per text.
    pub(crate) fn batch_of_texts(&self, texts: &[String]) -> Result<Table, ApiError> {
        if self.inference.input != Input::Text {
            return Err(self.other_kind("a text"));
        }
        Ok(self.task.encode(&self.job, texts)?)
    }

    fn other_kind(&self, given: &str) -> ApiError {
        let takes = self.takes();
        let article = if takes == "image" { "an" } else { "a" };
        ApiError::bad(
            format!("the model `{}` takes {article} {takes}, not {given}", self.name),
            "serve a model of the other task, or ask for what this one takes",
        )
    }

    /// Whether pictures are brought into the form of figures in ink.
    pub(crate) fn is_ink(&self) -> bool {
        matches!(self.inference.input, Input::Image { form: ImageForm::Ink, .. })
    }
}
