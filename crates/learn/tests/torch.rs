//! The same numbers as PyTorch: loss and every gradient, per tensor, to 1e-5 of its norm.
//! `fixtures/make.py` made the expectations with PyTorch 1.13.

use std::sync::Arc;

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use skep_data::{Column, Dataset, Table};
use skep_learn::random::Generator;
use skep_learn::{Burn, BurnTask, LearnError, Task, classify, models};
use skep_wire::{
    BufferMerge, Dtype, Encoding, EvaluationCounts, Frame, FrameView, Job, Layout, Role,
};

fn batch() -> Table {
    let mut generator = Generator::of(7, "image");
    Table::new(vec![
        Column {
            name: "image".to_owned(),
            dtype: Dtype::U8,
            shape: vec![28, 28],
            bytes: (0..8 * 784).map(|_| (generator.bits() >> 56) as u8).collect(),
        },
        Column {
            name: "label".to_owned(),
            dtype: Dtype::U8,
            shape: Vec::new(),
            bytes: (0..8).collect(),
        },
    ])
    .expect("a good table")
}

/// Texts of different lengths, in words 1 to 49.
fn texts() -> Table {
    let mut generator = Generator::of(7, "tokens");
    let mut rows: Vec<u16> = Vec::new();
    for length in [12, 1, 5, 12, 3, 7, 2, 9] {
        let end = rows.len() + 12;
        rows.extend((0..length).map(|_| 1 + (generator.bits() % 49) as u16));
        rows.resize(end, 0);
    }
    Table::new(vec![
        Column {
            name: "tokens".to_owned(),
            dtype: Dtype::U16,
            shape: vec![12],
            bytes: rows.into_iter().flat_map(u16::to_le_bytes).collect(),
        },
        Column {
            name: "label".to_owned(),
            dtype: Dtype::U8,
            shape: Vec::new(),
            bytes: (0..8).map(|row| row % 2).collect(),
        },
    ])
    .expect("a good table")
}

fn agree(task: &dyn Task, job: &Job, batch: &Table, expected: &[u8]) {
    let mut compute = task.compute(job).expect("a good model");
    let layout = Arc::new(Layout::of_gradient(compute.schema(), Encoding::F32).expect("lays out"));
    let theirs = Frame::read(&layout, expected).expect("the same tensors as PyTorch");
    let metadata = FrameView::parse(expected).expect("a good file").metadata;
    let mut ours = Frame::zeros(layout.clone());
    compute.load(&compute.initial(7).expect("draws")).expect("loads");
    let counts = compute.evaluate(batch).expect("evaluates");
    let loss = compute.gradient(batch, 0, &mut ours).expect("computes");

    let expected: f64 = metadata["loss"].parse().expect("a number");
    assert!((loss - expected).abs() < 1e-5 * expected, "loss {loss}, PyTorch {expected}");
    for place in layout.places() {
        if place.dtype == Dtype::I64 {
            assert_eq!(ours.tensor(&place.name), theirs.tensor(&place.name), "{}", place.name);
            continue;
        }
        let ours = ours.floats_of(&place.name).expect("there");
        let theirs = theirs.floats_of(&place.name).expect("there");
        let norm = |values: &mut dyn Iterator<Item = f32>| {
            values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
        };
        let size = norm(&mut theirs.iter().copied());
        let distance = norm(&mut ours.iter().zip(theirs).map(|(a, b)| a - b));
        // A bias before a BatchNorm has no gradient but noise.
        // Burn's running variance is the population's (divided by n, not by n - 1).
        let share = if place.name.ends_with("running_var") { 1e-3 } else { 1e-5 };
        assert!(distance < share * size.max(0.1), "{}: {distance} of {size}", place.name);
    }
    // Without a norm, evaluation sees the same model as training.
    if !layout.places().iter().any(|place| place.name.contains("running")) {
        assert!((counts.loss_sum - 8.0 * expected).abs() < 1e-4, "{}", counts.loss_sum);
        assert_eq!(counts.correct, metadata["correct"].parse().ok());
    }
}

#[test]
fn lenet5_computes_what_pytorch_computes() {
    let task = Burn(models::lenet5::LeNet5::default());
    agree(&task, &task.defaults(), &batch(), include_bytes!("fixtures/lenet5.safetensors"));
    let compute = task.compute(&task.defaults()).expect("a good model");
    assert_eq!(compute.schema().trainable_elements(), 61_706);
    let shape = |name: &str| compute.schema().get(name).map(|tensor| tensor.shape.clone());
    assert_eq!(shape("conv2.weight"), Some(vec![16, 6, 5, 5]));
    assert_eq!(shape("fc1.weight"), Some(vec![120, 400]));
}

fn small(task: &dyn Task, settings: &[(&str, u64)]) -> Job {
    let mut job = task.defaults();
    job.model.settings =
        settings.iter().map(|&(name, value)| (name.to_owned(), value.into())).collect();
    job
}

#[test]
fn text_average_computes_what_pytorch_computes() {
    let task = Burn(models::text_average::TextAverage::default());
    let job = small(&task, &[("words", 50), ("length", 12), ("dimension", 6)]);
    agree(&task, &job, &texts(), include_bytes!("fixtures/text-average.safetensors"));
}

#[test]
fn text_bigru_computes_what_pytorch_computes() {
    let task = Burn(models::text_bigru::TextBigru::default());
    let sizes = [("words", 50), ("length", 12), ("dimension", 6), ("hidden", 5)];
    let job = small(&task, &sizes);
    agree(&task, &job, &texts(), include_bytes!("fixtures/text-bigru.safetensors"));
    let compute = task.compute(&job).expect("a good model");
    let shape = |name: &str| compute.schema().get(name).map(|tensor| tensor.shape.clone());
    assert_eq!(shape("gru2.weight_ih_l0_reverse"), Some(vec![15, 10]));
    for (name, value, part) in
        [("wrods", 5, "`wrods`"), ("words", 2, "3 to 65536"), ("hidden", 0, "1 to 4096")]
    {
        let error = task.compute(&small(&task, &[(name, value)])).err().expect("a mistake");
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[derive(Module, Debug)]
struct NormedModel {
    conv: Conv2d,
    norm: BatchNorm,
    fc: Linear,
}

#[derive(Clone)]
struct Normed;

impl Normed {
    fn logits(
        model: &NormedModel,
        batch: &Table,
        device: &Device,
    ) -> Result<Tensor<2>, LearnError> {
        let images = classify::column(batch, "image")?;
        let x = model.conv.forward(classify::images(images, [1, 28, 28], 0.1307, 0.3081, device)?);
        Ok(model.fc.forward(relu(model.norm.forward(x)).flatten(1, 3)))
    }
}

impl BurnTask for Normed {
    type Model = NormedModel;

    fn name(&self) -> &str {
        "normed"
    }

    fn about(&self) -> &str {
        "a model with a BatchNorm"
    }

    fn defaults(&self) -> Job {
        Job::default()
    }

    fn dataset(&self, source: &str) -> Result<Dataset, LearnError> {
        Ok(skep_data::mnist::open(source)?)
    }

    fn model(&self, device: &Device) -> NormedModel {
        let padding = PaddingConfig2d::Explicit(1, 1, 1, 1);
        NormedModel {
            conv: Conv2dConfig::new([1, 3], [5, 5])
                .with_stride([3, 3])
                .with_padding(padding)
                .init(device),
            norm: BatchNormConfig::new(3).init(device),
            fc: LinearConfig::new(243, 10).init(device),
        }
    }

    fn loss(
        &self,
        model: &NormedModel,
        batch: &Table,
        device: &Device,
    ) -> Result<Tensor<1>, LearnError> {
        let labels = classify::labels(classify::column(batch, "label")?, 10, device)?;
        Ok(classify::cross_entropy(Self::logits(model, batch, device)?, labels))
    }

    fn evaluate(
        &self,
        model: &NormedModel,
        batch: &Table,
        device: &Device,
    ) -> Result<EvaluationCounts, LearnError> {
        let labels = classify::labels(classify::column(batch, "label")?, 10, device)?;
        Ok(classify::counts(Self::logits(model, batch, device)?, labels))
    }
}

#[test]
fn a_batch_norm_computes_what_pytorch_computes() {
    let task = Burn(Normed);
    agree(&task, &task.defaults(), &batch(), include_bytes!("fixtures/normed.safetensors"));
    let compute = task.compute(&task.defaults()).expect("a good model");
    let role = |name: &str| compute.schema().get(name).map(|tensor| tensor.role.clone());
    assert_eq!(role("norm.weight"), Some(Role::trainable()));
    assert_eq!(role("norm.running_var"), Some(Role::Buffer { merge: BufferMerge::Mean }));
    assert_eq!(role("norm.num_batches_tracked"), Some(Role::Buffer { merge: BufferMerge::Max }));
}

#[test]
fn a_contribution_starts_from_the_buffers_of_its_version() {
    let task = Burn(Normed);
    let mut compute = task.compute(&task.defaults()).expect("a good model");
    let version = compute.initial(0).expect("a version");
    compute.load(&version).expect("its own layout");
    let batch = batch();
    let layout = Layout::of_gradient(compute.schema(), Encoding::F32).expect("a good schema");
    let mut brought = || {
        compute.begin().expect("the version is loaded");
        let mut gradient = Frame::zeros(Arc::new(layout.clone()));
        compute.gradient(&batch, 0, &mut gradient).expect("a gradient");
        gradient.as_bytes().to_vec()
    };
    assert_eq!(brought(), brought());
}
