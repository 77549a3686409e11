//! The numbers of a run: the parameters, the optimiser, and what has come in for the next version.
//!
//! A version is written out of place: the buffer that a step fills *is* the snapshot that pulls
//! are served from, and nobody ever sees it change.

use std::sync::Arc;

use skep_math::{
    FloatMerge, IntegerMerge, MergeRule, Optimiser, OptimiserSettings, OptimiserState, Segment,
    StepReport, TreeSum, add_scaled, all_finite, ema, scale,
};
use skep_wire::{BufferMerge, Dtype, Encoding, Frame, Layout, Role, Schema, WireError};

/// What has come in for the next version.
enum Sum {
    Nothing,
    /// One contribution, untouched.
    One(Frame, u64),
    /// Several in the order of arrival, weighted.
    Running(Frame),
    /// Slots in a fixed tree, weighted.
    Tree(TreeSum),
}

/// The sum that a step moves by.
enum Gradient {
    Frame(Frame),
    Flat(Vec<f32>),
}

/// The buffers one contribution brought home.
struct Brought {
    slot: u64,
    samples: u64,
    values: Vec<Vec<u8>>,
}

/// How versions are made of what comes in.
pub(crate) enum Rules {
    /// Mean gradients, by this optimiser.
    Gradients(OptimiserSettings),
    /// Differences, which workers made with `inner`, by `outer`.
    Models {
        inner: OptimiserSettings,
        outer: OptimiserSettings,
        /// How long the workers' schedule is, where it does not follow the versions.
        local_steps: Option<u64>,
    },
}

/// The parameters of a run and how they move.
pub(crate) struct Model {
    schema: Schema,
    pub(crate) gradient_layout: Arc<Layout>,
    pub(crate) narrow_gradient_layout: Arc<Layout>,
    optimiser: Optimiser,
    /// 1 where gradients come in; -1 where differences do, which point the other way.
    direction: f32,
    current: Arc<Frame>,
    sum: Sum,
    brought: Vec<Brought>,
}

impl Model {
    pub(crate) fn new(
        schema: &Schema,
        rules: Rules,
        total_steps: Option<u64>,
        current: Frame,
    ) -> Result<Self, String> {
        let layout = |result: Result<Layout, WireError>| {
            result.map(Arc::new).map_err(|error| error.to_string())
        };
        let version_layout = current.layout().clone();
        let gradient_layout = layout(Layout::of_gradient(schema, Encoding::F32))?;
        let narrow_gradient_layout = layout(Layout::of_gradient(schema, Encoding::Bf16))?;
        let mut segments = Vec::new();
        for tensor in schema.tensors() {
            if let Role::Trainable { group } = &tensor.role {
                let places = version_layout
                    .float_range(&tensor.name)
                    .zip(gradient_layout.float_range(&tensor.name));
                let (parameter, gradient) =
                    places.ok_or_else(|| format!("`{}` has no place", tensor.name))?;
                segments.push(Segment { parameter, gradient, group: group.clone() });
            }
        }
        let groups: Vec<_> = segments.iter().map(|segment| segment.group.clone()).collect();
        let make = |settings: OptimiserSettings, segments: Vec<Segment>, total| {
            settings.validate_groups(groups.iter().map(String::as_str))?;
            Optimiser::new(settings, segments, total)
        };
        let (optimiser, direction) = match rules {
            Rules::Gradients(settings) => (make(settings, segments, total_steps), 1.0),
            Rules::Models { inner, outer, local_steps } => {
                // The workers' own optimiser is checked here, before any of them starts.
                make(inner, segments.clone(), local_steps.or(total_steps))
                    .map_err(|error| error.to_string())?;
                (make(outer, segments, total_steps), -1.0)
            }
        };
        let optimiser = optimiser.map_err(|error| error.to_string())?;
        Ok(Self {
            schema: schema.clone(),
            gradient_layout,
            narrow_gradient_layout,
            optimiser,
            direction,
            current: Arc::new(current),
            sum: Sum::Nothing,
            brought: Vec::new(),
        })
    }

    pub(crate) fn current(&self) -> &Arc<Frame> {
        &self.current
    }

    pub(crate) fn optimiser_state(&self) -> OptimiserState {
        self.optimiser.snapshot()
    }

    pub(crate) fn restore_optimiser(&mut self, state: OptimiserState) -> Result<(), String> {
        self.optimiser.restore(state).map_err(|error| error.to_string())
    }

    /// Takes an accepted contribution: the mean gradient of `samples` samples, or what training on
    /// them changed.
    pub(crate) fn take(
        &mut self,
        slot: u64,
        slots: Option<u64>,
        samples: u64,
        frame: Arc<Frame>,
    ) -> Result<(), String> {
        self.keep_buffers(slot, samples, &frame);
        let weight = samples as f32;
        self.sum = match (std::mem::replace(&mut self.sum, Sum::Nothing), slots) {
            (Sum::Nothing, Some(slots)) if slots > 1 => {
                let mut tree = TreeSum::new(slots as usize);
                push(&mut tree, slot, weight, &frame)?;
                Sum::Tree(tree)
            }
            (Sum::Tree(mut tree), _) => {
                push(&mut tree, slot, weight, &frame)?;
                Sum::Tree(tree)
            }
            (Sum::Nothing, _) => Sum::One(Arc::unwrap_or_clone(frame), samples),
            (Sum::One(mut first, count), _) => {
                scale(first.floats_mut(), count as f32);
                add_scaled(first.floats_mut(), frame.floats(), weight);
                Sum::Running(first)
            }
            (Sum::Running(mut sum), _) => {
                add_scaled(sum.floats_mut(), frame.floats(), weight);
                Sum::Running(sum)
            }
        };
        Ok(())
    }

    fn keep_buffers(&mut self, slot: u64, samples: u64, frame: &Frame) {
        let values: Vec<_> = buffers(&self.schema)
            .map(|(name, ..)| frame.tensor(name).unwrap_or_default().to_vec())
            .collect();
        if !values.is_empty() {
            self.brought.push(Brought { slot, samples, values });
        }
    }

    /// Drops what has come in.
    pub(crate) fn forget(&mut self) {
        self.sum = Sum::Nothing;
        self.brought.clear();
    }

    /// Makes the next version of what has come in, or says why that cannot be one. Either way,
    /// what had come in is gone.
    pub(crate) fn step(
        &mut self,
        samples: u64,
        missing: &[u64],
        damping: f64,
    ) -> Result<StepReport, String> {
        let brought = std::mem::take(&mut self.brought);
        let weighted = (damping / samples as f64) as f32 * self.direction;
        let (sum, factor) = match std::mem::replace(&mut self.sum, Sum::Nothing) {
            Sum::Nothing => return Err("nothing has come in".to_owned()),
            Sum::One(frame, _) => (Gradient::Frame(frame), damping as f32 * self.direction),
            Sum::Running(frame) => (Gradient::Frame(frame), weighted),
            Sum::Tree(mut tree) => {
                let length = self.gradient_layout.float_bytes().len() / 4;
                for slot in missing {
                    tree.push(*slot as usize, vec![0.0; length])
                        .map_err(|error| error.to_string())?;
                }
                (Gradient::Flat(tree.finish().map_err(|error| error.to_string())?), weighted)
            }
        };
        let gradient = match &sum {
            Gradient::Frame(frame) => frame.floats(),
            Gradient::Flat(values) => values,
        };
        let mut next = Frame::clone(&self.current);
        let report = self
            .optimiser
            .stage(self.current.floats(), gradient, factor, next.floats_mut())
            .map_err(|error| error.to_string())?;
        if !report.finite {
            return Err("the version it would make is not finite".to_owned());
        }
        if let Err(message) = self.merge_buffers(brought, &mut next) {
            self.optimiser.discard();
            return Err(message);
        }
        self.move_averages(&mut next);
        self.optimiser.commit();
        self.current = Arc::new(next);
        Ok(report)
    }

    /// Buffers merge in the order of slots, not of arrival.
    fn merge_buffers(&self, mut brought: Vec<Brought>, next: &mut Frame) -> Result<(), String> {
        brought.sort_by_key(|one| one.slot);
        let explain = |error: skep_math::MathError| error.to_string();
        for (at, (name, dtype, merge)) in buffers(&self.schema).enumerate() {
            let Some(into) = next.tensor_mut(name) else { continue };
            let rule = match merge {
                BufferMerge::Mean => MergeRule::Mean,
                BufferMerge::Max => MergeRule::Max,
                BufferMerge::Last => MergeRule::Last,
            };
            match dtype {
                Dtype::F32 => {
                    let mut merged = FloatMerge::new(rule, into.len() / 4);
                    for one in &brought {
                        let values: Vec<f32> = bytemuck::pod_collect_to_vec(&one.values[at]);
                        merged.push(&values, one.samples).map_err(explain)?;
                    }
                    let merged = merged.finish().map_err(explain)?;
                    if !all_finite(&merged) {
                        return Err(format!("the buffer `{name}` would not be finite"));
                    }
                    into.copy_from_slice(bytemuck::cast_slice(&merged));
                }
                Dtype::I64 => {
                    let mut merged = IntegerMerge::new(rule, into.len() / 8).map_err(explain)?;
                    for one in &brought {
                        let values: Vec<i64> = bytemuck::pod_collect_to_vec(&one.values[at]);
                        merged.push(&values, one.samples).map_err(explain)?;
                    }
                    let merged = merged.finish().map_err(explain)?;
                    into.copy_from_slice(bytemuck::cast_slice(&merged));
                }
                // The schema lets only `last` have other element types.
                _ => {
                    if let Some(last) = brought.last() {
                        into.copy_from_slice(&last.values[at]);
                    }
                }
            }
        }
        Ok(())
    }

    fn move_averages(&self, next: &mut Frame) {
        for tensor in self.schema.tensors() {
            if let Role::Ema { of, tau } = &tensor.role {
                let value = next.floats_of(of).unwrap_or_default().to_vec();
                let average = self.current.floats_of(&tensor.name).unwrap_or_default();
                if let Some(into) = next.floats_of_mut(&tensor.name) {
                    ema(average, &value, *tau, into);
                }
            }
        }
    }
}

fn push(tree: &mut TreeSum, slot: u64, weight: f32, frame: &Frame) -> Result<(), String> {
    let mut values = frame.floats().to_vec();
    scale(&mut values, weight);
    tree.push(slot as usize, values).map_err(|error| error.to_string())
}

fn buffers(schema: &Schema) -> impl Iterator<Item = (&str, Dtype, BufferMerge)> {
    schema.tensors().iter().filter_map(|tensor| match tensor.role {
        Role::Buffer { merge } => Some((tensor.name.as_str(), tensor.dtype, merge)),
        _ => None,
    })
}
