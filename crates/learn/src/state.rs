//! A Burn module's tensors as PyTorch's state dict: the names, shapes and layouts that travel and
//! are stored. Burn differs in three ways that are undone here, so that no one else ever sees
//! them: `Linear` keeps its weight as `[in, out]`, norms call their weights `gamma` and `beta`,
//! and BatchNorm does not count its batches.
//!
//! A module is always walked in the same order, so each tensor is found by its place in that walk
//! and never by its name while training.

use std::ops::Range;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Device, Gradients, Int, Tensor, TensorData};
use skep_wire::{BufferMerge, Dtype, Encoding, Frame, Layout, Role, Schema, TensorSpec, WireError};

use crate::LearnError;
use crate::random::Generator;

/// How version 0 of a tensor is drawn: PyTorch's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Start {
    /// From -bound to bound: `kaiming_uniform_(a=sqrt(5))`, which is 1/sqrt(fan_in).
    Uniform(f32),
    /// Standard normal: embeddings.
    Normal,
    /// All the same: norms.
    Constant(f32),
    /// As the module itself made it: a tensor that is not part of a known layer.
    Own,
}

/// Keras' bound for embeddings. PyTorch's standard normal drowns a mean over hundreds of words in
/// noise that a few epochs do not take away.
const WORD_BOUND: f32 = 0.05;

/// One float tensor of the module.
#[derive(Clone, Debug)]
struct Slot {
    name: String,
    /// The module's own shape.
    shape: Vec<usize>,
    role: Role,
    start: Start,
    /// The module has it transposed.
    transposed: bool,
    /// Its floats in a frame of a version.
    version: Range<usize>,
    /// Its floats in a frame of a gradient, unless it is frozen.
    gradient: Option<Range<usize>>,
}

impl Slot {
    fn wire_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if self.transposed {
            shape.reverse();
        }
        shape
    }
}

/// The tensors of one module, in the order of a walk.
#[derive(Clone, Debug)]
pub(crate) struct State {
    slots: Vec<Slot>,
    /// PyTorch's `num_batches_tracked`, one per BatchNorm.
    counters: Vec<String>,
    pub(crate) schema: Schema,
    pub(crate) version: Layout,
    pub(crate) gradient: Layout,
}

impl State {
    pub(crate) fn of<M: Module>(module: &M, model: &str) -> Result<Self, LearnError> {
        let mut walk = Walk::default();
        module.visit(&mut walk);
        if let Some(name) = walk.not_float.first() {
            return Err(LearnError::Model {
                model: model.to_owned(),
                reason: format!("`{name}` is not a float tensor"),
            });
        }
        let mut slots = walk.slots;
        share_fan_in(&mut slots);
        let mut specs: Vec<_> = slots
            .iter()
            .map(|slot| TensorSpec {
                name: slot.name.clone(),
                dtype: Dtype::F32,
                shape: slot.wire_shape(),
                role: slot.role.clone(),
            })
            .collect();
        let counters: Vec<_> = slots
            .iter()
            .filter(|slot| matches!(slot.role, Role::Buffer { .. }))
            .filter_map(|slot| slot.name.strip_suffix("running_mean"))
            .map(|module| format!("{module}num_batches_tracked"))
            .collect();
        specs.extend(counters.iter().map(|name| TensorSpec {
            name: name.clone(),
            dtype: Dtype::I64,
            shape: Vec::new(),
            role: Role::Buffer { merge: BufferMerge::Max },
        }));
        let schema = Schema::new(specs)?;
        let version = Layout::of_version(&schema, Encoding::F32)?;
        let gradient = Layout::of_gradient(&schema, Encoding::F32)?;
        for slot in &mut slots {
            let missing = || WireError::Schema(format!("`{}` has no place", slot.name));
            slot.version = version.float_range(&slot.name).ok_or_else(missing)?;
            slot.gradient = gradient.float_range(&slot.name);
        }
        Ok(Self { slots, counters, schema, version, gradient })
    }

    pub(crate) fn has_buffers(&self) -> bool {
        !self.counters.is_empty()
            || self.slots.iter().any(|slot| matches!(slot.role, Role::Buffer { .. }))
    }

    /// Draws version 0. `module` is asked only for tensors that belong to no known layer.
    pub(crate) fn initial<M: Module>(&self, module: &M, seed: u64, frame: &mut Frame) {
        let mut own = Read { state: self, at: 0, floats: frame.floats_mut() };
        module.visit(&mut own);
        let floats = frame.floats_mut();
        for slot in &self.slots {
            let into = &mut floats[slot.version.clone()];
            let mut generator = Generator::of(seed, &slot.name);
            match slot.start {
                Start::Uniform(bound) => {
                    into.fill_with(|| generator.symmetric() * bound);
                }
                Start::Normal => into.fill_with(|| generator.normal()),
                Start::Constant(value) => into.fill(value),
                Start::Own => {}
            }
        }
    }

    /// Puts a version into the module.
    pub(crate) fn load<M: Module>(&self, module: M, device: &Device, frame: &Frame) -> M {
        module.map(&mut Load { state: self, at: 0, device, floats: frame.floats() })
    }

    /// Takes every gradient out of `gradients`; a tensor the loss does not depend on gets zeros.
    pub(crate) fn take_gradients<M: Module>(
        &self,
        module: &M,
        gradients: Gradients,
        frame: &mut Frame,
    ) {
        module.visit(&mut Take { state: self, at: 0, gradients, floats: frame.floats_mut() });
    }

    /// Takes the values of the buffers out of a module that is in its evaluation mode: only that
    /// transition brings pending updates of running statistics in.
    pub(crate) fn take_buffers<M: Module>(
        &self,
        valid: &M,
        batches: &[i64],
        frame: &mut Frame,
    ) -> Result<(), LearnError> {
        valid.visit(&mut TakeBuffers { state: self, at: 0, floats: frame.floats_mut() });
        for (name, count) in self.counters.iter().zip(batches) {
            if let Some(bytes) = frame.tensor_mut(name) {
                bytes.copy_from_slice(&count.to_le_bytes());
            }
        }
        Ok(())
    }

    /// How many batches each BatchNorm has seen.
    pub(crate) fn batches(&self, frame: &Frame) -> Vec<i64> {
        let read = |name: &String| {
            let bytes = frame.tensor(name).and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(0, i64::from_le_bytes)
        };
        self.counters.iter().map(read).collect()
    }
}

/// A bias is drawn with the fan-in of the weight beside it.
fn share_fan_in(slots: &mut [Slot]) {
    for at in 0..slots.len() {
        let Some(layer) = slots[at].name.strip_suffix("bias").map(str::to_owned) else { continue };
        if slots[at].start != Start::Uniform(0.0) {
            continue;
        }
        let weight = format!("{layer}weight");
        if let Some(beside) = slots.iter().find(|slot| slot.name == weight) {
            slots[at].start = beside.start;
        }
    }
}

/// Collects slots.
#[derive(Default)]
struct Walk {
    path: Vec<(String, String)>,
    slots: Vec<Slot>,
    not_float: Vec<String>,
}

impl Walk {
    fn name(&self) -> String {
        let names: Vec<_> = self.path.iter().map(|(name, _)| name.as_str()).collect();
        names.join(".")
    }
}

impl ModuleVisitor for Walk {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push((name.to_owned(), container.to_owned()));
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (field, container) = self.path.last().cloned().unwrap_or_default();
        let layer = container.strip_prefix("Struct:").unwrap_or_default();
        let norm = layer.ends_with("Norm");
        let renamed = match field.as_str() {
            "gamma" if norm => "weight",
            "beta" if norm => "bias",
            same => same,
        };
        if let Some(last) = self.path.last_mut() {
            renamed.clone_into(&mut last.0);
        }
        let name = self.name();
        let shape = param.lazy_shape().to_vec();
        let role = if param.val().is_require_grad() {
            Role::trainable()
        } else if norm && field.starts_with("running_") {
            Role::Buffer { merge: BufferMerge::Mean }
        } else {
            Role::Frozen
        };
        let transposed = layer == "Linear" && field == "weight" && D == 2;
        let fan_in: usize = match (transposed, D) {
            (true, _) => shape[0],
            (false, 0 | 1) => 0,
            (false, _) => shape[1..].iter().product(),
        };
        let uniform = if fan_in == 0 { 0.0 } else { (1.0 / (fan_in as f64).sqrt()) as f32 };
        let start = match (layer, field.as_str()) {
            (_, "gamma" | "running_var") if norm => Start::Constant(1.0),
            (_, "beta" | "running_mean") if norm => Start::Constant(0.0),
            ("Embedding", "weight") => Start::Normal,
            ("Linear", "weight" | "bias") => Start::Uniform(uniform),
            (layer, "weight" | "bias") if layer.starts_with("Conv") => Start::Uniform(uniform),
            ("WordVectors", "weight") => Start::Uniform(WORD_BOUND),
            // Three gates lie one above the other.
            ("BidirectionalGru", _) => Start::Uniform((3.0 / shape[0] as f64).sqrt() as f32),
            _ => Start::Own,
        };
        self.slots.push(Slot {
            name,
            shape,
            role,
            start,
            transposed,
            version: 0..0,
            gradient: None,
        });
    }

    fn visit_int<const D: usize>(&mut self, _param: &Param<Tensor<D, Int>>) {
        self.not_float.push(self.name());
    }

    fn visit_bool<const D: usize>(&mut self, _param: &Param<Tensor<D, Bool>>) {
        self.not_float.push(self.name());
    }
}

/// Copies a tensor out in PyTorch's layout.
fn copy_out<const D: usize>(slot: &Slot, tensor: Tensor<D>, into: &mut [f32]) {
    let tensor = if slot.transposed { tensor.swap_dims(0, 1) } else { tensor };
    let data = tensor.into_data();
    let values = data.as_slice::<f32>().expect("a run computes in f32");
    into.copy_from_slice(values);
}

/// Copies every tensor into a frame of a version.
struct Read<'a> {
    state: &'a State,
    at: usize,
    floats: &'a mut [f32],
}

impl ModuleVisitor for Read<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let slot = &self.state.slots[self.at];
        self.at += 1;
        copy_out(slot, param.val().inner(), &mut self.floats[slot.version.clone()]);
    }
}

/// Replaces every tensor by the frame's.
struct Load<'a> {
    state: &'a State,
    at: usize,
    device: &'a Device,
    floats: &'a [f32],
}

impl ModuleMapper for Load<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let slot = &self.state.slots[self.at];
        self.at += 1;
        let values = self.floats[slot.version.clone()].to_vec();
        let data = TensorData::new(values, slot.wire_shape());
        let (id, old, mapper) = param.consume();
        let trainable = old.is_require_grad();
        // The transposition is a view: the op that multiplies reads it with its strides.
        let tensor = Tensor::<D>::from_data(data, self.device);
        let tensor = if slot.transposed { tensor.swap_dims(0, 1).detach() } else { tensor };
        Param::from_mapped_value(id, tensor.set_require_grad(trainable), mapper)
    }
}

/// Copies every gradient into a frame.
struct Take<'a> {
    state: &'a State,
    at: usize,
    gradients: Gradients,
    floats: &'a mut [f32],
}

impl ModuleVisitor for Take<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let slot = &self.state.slots[self.at];
        self.at += 1;
        let (Role::Trainable { .. }, Some(range)) = (&slot.role, &slot.gradient) else { return };
        let into = &mut self.floats[range.clone()];
        match param.val().grad_remove(&mut self.gradients) {
            Some(gradient) => copy_out(slot, gradient, into),
            None => into.fill(0.0),
        }
    }
}

/// Copies the buffers into a frame of a gradient.
struct TakeBuffers<'a> {
    state: &'a State,
    at: usize,
    floats: &'a mut [f32],
}

impl ModuleVisitor for TakeBuffers<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let slot = &self.state.slots[self.at];
        self.at += 1;
        if let (Role::Buffer { .. }, Some(range)) = (&slot.role, &slot.gradient) {
            copy_out(slot, param.val().inner(), &mut self.floats[range.clone()]);
        }
    }
}
