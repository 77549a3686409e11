//! One direction of a gated recurrent unit over texts of different lengths, as one operation.
//!
//! Texts are sorted by length and laid out step by step, each step only as wide as there are texts
//! that long (PyTorch's `pack_padded_sequence`). So padding is never computed, the input's share of
//! all gates is one matrix product, and so is the gradient of every weight; what is left for each
//! step is one small product.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::activation::{sigmoid as burn_sigmoid, tanh as burn_tanh};
use burn::tensor::{Tensor, TensorData};

use super::linear::{Matrix, column_sums, multiply};
use super::{Primitive, contiguous, is_flex, tensor, values};

/// Which end of a text is read first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The first word.
    Forward,
    /// The last word; never padding.
    Reverse,
}

/// The weights of one direction, in PyTorch's layout: the gates r, z and n one above the other.
#[derive(Clone, Debug)]
pub struct GruWeights {
    /// `[3 * hidden, input]`.
    pub input: Tensor<2>,
    /// `[3 * hidden, hidden]`.
    pub hidden: Tensor<2>,
    /// `[3 * hidden]`.
    pub input_bias: Tensor<1>,
    /// `[3 * hidden]`.
    pub hidden_bias: Tensor<1>,
}

/// The state after each word, `[batch, width, hidden]`, zero behind the end of a text; `input` is
/// `[batch, width, size]` and `lengths` says how much of each row counts.
///
/// # Panics
/// Like Burn's own layers where the shapes do not fit.
pub fn gru(
    input: Tensor<3>,
    weights: GruWeights,
    lengths: &[usize],
    direction: Direction,
) -> Tensor<3> {
    if !is_flex(&input.device()) {
        return plain(input, &weights, lengths, direction);
    }
    let output = <Dispatch as RecurrentOps>::fused_gru(
        input.into_dispatch(),
        weights.input.into_dispatch(),
        weights.hidden.into_dispatch(),
        weights.input_bias.into_dispatch(),
        weights.hidden_bias.into_dispatch(),
        lengths.to_vec(),
        direction,
    );
    Tensor::from_dispatch(output)
}

/// The same by Burn's own operations, step by step.
fn plain(
    input: Tensor<3>,
    weights: &GruWeights,
    lengths: &[usize],
    direction: Direction,
) -> Tensor<3> {
    let device = input.device();
    let [batch, width, size] = input.dims();
    let hidden = weights.hidden.dims()[1];
    let gates = input.reshape([batch * width, size]).matmul(weights.input.clone().transpose())
        + weights.input_bias.clone().unsqueeze();
    let gates = gates.reshape([batch, width, 3 * hidden]);
    let mut state = Tensor::<2>::zeros([batch, hidden], &device);
    let mut states = vec![Tensor::<3>::zeros([batch, 1, hidden], &device); width];
    let third = |gates: &Tensor<2>, at: usize| {
        gates.clone().slice([0..batch, at * hidden..(at + 1) * hidden])
    };
    for step in 0..width {
        let at = if direction == Direction::Forward { step } else { width - 1 - step };
        let own = gates.clone().slice([0..batch, at..at + 1, 0..3 * hidden]).squeeze_dim::<2>(1);
        let back = state.clone().matmul(weights.hidden.clone().transpose())
            + weights.hidden_bias.clone().unsqueeze();
        let reset = burn_sigmoid(third(&own, 0) + third(&back, 0));
        let keep = burn_sigmoid(third(&own, 1) + third(&back, 1));
        let new = burn_tanh(third(&own, 2) + reset * third(&back, 2));
        let next = new.clone() + keep * (state.clone() - new);
        let mask: Vec<f32> = lengths.iter().map(|&length| f32::from(at < length)).collect();
        let mask = Tensor::<2>::from_data(TensorData::new(mask, [batch, 1]), &device);
        state = state.clone() + (next - state) * mask.clone();
        states[at] = (state.clone() * mask).unsqueeze_dim::<3>(1);
    }
    Tensor::cat(states, 1)
}

/// Burn's way to bring one's own operations; call the functions of this module instead.
#[backend_extension(Flex, Autodiff)]
pub trait RecurrentOps: Backend {
    /// See [`gru`].
    fn fused_gru(
        input: FloatTensor<Self>,
        input_weight: FloatTensor<Self>,
        hidden_weight: FloatTensor<Self>,
        input_bias: FloatTensor<Self>,
        hidden_bias: FloatTensor<Self>,
        lengths: Vec<usize>,
        direction: Direction,
    ) -> FloatTensor<Self>;
}

impl RecurrentOps for Flex {
    fn fused_gru(
        input: Primitive,
        input_weight: Primitive,
        hidden_weight: Primitive,
        input_bias: Primitive,
        hidden_bias: Primitive,
        lengths: Vec<usize>,
        direction: Direction,
    ) -> Primitive {
        let weights = [&input_weight, &hidden_weight, &input_bias, &hidden_bias].map(contiguous);
        Trace::forward(&input, weights, &lengths, direction).0
    }
}

impl<C: CheckpointStrategy> RecurrentOps for Autodiff<Flex, C> {
    fn fused_gru(
        input: FloatTensor<Self>,
        input_weight: FloatTensor<Self>,
        hidden_weight: FloatTensor<Self>,
        input_bias: FloatTensor<Self>,
        hidden_bias: FloatTensor<Self>,
        lengths: Vec<usize>,
        direction: Direction,
    ) -> FloatTensor<Self> {
        let (input, input_node) = input.into_parts();
        let (input_weight, input_weight_node) = input_weight.into_parts();
        let (hidden_weight, hidden_weight_node) = hidden_weight.into_parts();
        let (input_bias, input_bias_node) = input_bias.into_parts();
        let (hidden_bias, hidden_bias_node) = hidden_bias.into_parts();
        let weights = [&input_weight, &hidden_weight, &input_bias, &hidden_bias].map(contiguous);
        let (output, trace) = Trace::forward(&input, weights, &lengths, direction);
        let nodes =
            [input_node, input_weight_node, hidden_weight_node, input_bias_node, hidden_bias_node];
        match GruBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(trace, output),
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        }
    }
}

/// Texts sorted by length, longest first, and cut into steps.
#[derive(Clone, Debug)]
struct Steps {
    /// Which text is at which place.
    order: Vec<usize>,
    /// How many texts have a word at each step.
    counts: Vec<usize>,
    /// The row of the first text at each step.
    starts: Vec<usize>,
    rows: usize,
    width: usize,
}

impl Steps {
    fn of(lengths: &[usize], width: usize) -> Self {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|&text| std::cmp::Reverse(lengths[text]));
        let steps = lengths.iter().copied().max().unwrap_or(0);
        assert!(steps <= width, "a text is longer than its row");
        let mut counts = vec![0; steps];
        for &length in lengths {
            counts[..length].iter_mut().for_each(|count| *count += 1);
        }
        let mut rows = 0;
        let starts = counts.iter().map(|count| {
            rows += count;
            rows - count
        });
        let starts = starts.collect();
        Self { order, counts, starts, rows, width }
    }

    /// The steps in the order in which they are computed, each with the one before.
    fn walk(&self, direction: Direction) -> Vec<(usize, Option<usize>)> {
        let last = self.counts.len();
        let step = |at: usize| match direction {
            Direction::Forward => (at, at.checked_sub(1)),
            Direction::Reverse => {
                let step = last - 1 - at;
                (step, Some(step + 1).filter(|&before| before < last))
            }
        };
        (0..last).map(step).collect()
    }

    /// How many texts of a step have a state from the step before; the others begin.
    fn known(&self, step: usize, before: Option<usize>) -> usize {
        before.map_or(0, |before| self.counts[step].min(self.counts[before]))
    }

    /// Every (row, row in `[batch, width]`).
    fn places(&self) -> impl Iterator<Item = (usize, usize)> {
        self.counts.iter().zip(&self.starts).enumerate().flat_map(
            move |(step, (&count, &start))| {
                (0..count).map(move |at| (start + at, self.order[at] * self.width + step))
            },
        )
    }

    fn pack(&self, padded: &[f32], size: usize) -> Vec<f32> {
        let mut packed = vec![0.0; self.rows * size];
        for (row, place) in self.places() {
            let from = &padded[place * size..][..size];
            packed[row * size..][..size].copy_from_slice(from);
        }
        packed
    }

    fn unpack(&self, packed: &[f32], size: usize) -> Vec<f32> {
        let mut padded = vec![0.0; self.order.len() * self.width * size];
        for (row, place) in self.places() {
            let from = &packed[row * size..][..size];
            padded[place * size..][..size].copy_from_slice(from);
        }
        padded
    }
}

/// What a forward pass leaves for its backward pass; everything by packed rows.
#[derive(Clone, Debug)]
struct Trace {
    steps: Steps,
    direction: Direction,
    /// Input and hidden.
    sizes: [usize; 2],
    weights: [Primitive; 4],
    input: Vec<f32>,
    /// r, z and n.
    gates: Vec<f32>,
    /// The state's share of n, before r.
    shares: Vec<f32>,
    /// The state before.
    before: Vec<f32>,
}

impl Trace {
    fn forward(
        input: &Primitive,
        weights: [Primitive; 4],
        lengths: &[usize],
        direction: Direction,
    ) -> (Primitive, Self) {
        let [batch, width, size]: [usize; 3] = input.shape().dims();
        let [_, hidden]: [usize; 2] = weights[1].shape().dims();
        assert_eq!(batch, lengths.len(), "every text has a length");
        let steps = Steps::of(lengths, width);
        let input = steps.pack(values(&contiguous(input)), size);
        let [input_weight, hidden_weight, input_bias, hidden_bias] = weights.each_ref().map(values);
        let wide = 3 * hidden;
        let turned = |weight, size| Matrix::rows(weight, [wide, size]).turned();
        let mut gates = input_bias.repeat(steps.rows);
        let rows = Matrix::rows(&input, [steps.rows, size]);
        multiply(&mut gates, [wide as isize, 1], true, rows, turned(input_weight, size));
        let mut shares = vec![0.0; steps.rows * hidden];
        let mut before = vec![0.0; steps.rows * hidden];
        let mut states = vec![0.0; steps.rows * hidden];
        let mut back = Vec::new();
        for (step, previous) in steps.walk(direction) {
            let (start, count) = (steps.starts[step], steps.counts[step]);
            let known = steps.known(step, previous);
            back.clear();
            for _ in 0..count {
                back.extend_from_slice(hidden_bias);
            }
            if let (Some(previous), 1..) = (previous, known) {
                let from = steps.starts[previous] * hidden;
                let into = &mut before[start * hidden..][..known * hidden];
                into.copy_from_slice(&states[from..from + known * hidden]);
                let rows = Matrix::rows(into, [known, hidden]);
                multiply(&mut back, [wide as isize, 1], true, rows, turned(hidden_weight, hidden));
            }
            for at in 0..count {
                let row = start + at;
                let back = &back[at * wide..][..wide];
                let gates = &mut gates[row * wide..][..wide];
                let (sigmoids, new) = gates.split_at_mut(2 * hidden);
                for (gate, back) in sigmoids.iter_mut().zip(back) {
                    *gate = sigmoid(*gate + back);
                }
                let (reset, keep) = sigmoids.split_at(hidden);
                let share = &mut shares[row * hidden..][..hidden];
                share.copy_from_slice(&back[2 * hidden..]);
                for ((new, reset), share) in new.iter_mut().zip(reset).zip(share.iter()) {
                    *new = tanh(*new + reset * share);
                }
                let state = &mut states[row * hidden..][..hidden];
                let before = &before[row * hidden..][..hidden];
                for (((state, new), keep), before) in
                    state.iter_mut().zip(new).zip(keep).zip(before)
                {
                    *state = *new + keep * (before - *new);
                }
            }
        }
        let output = tensor(steps.unpack(&states, hidden), [batch, width, hidden]);
        let sizes = [size, hidden];
        (output, Self { steps, direction, sizes, weights, input, gates, shares, before })
    }

    /// The gradients of the input's and the state's share of the gates.
    fn gate_gradients(&self, outer: &[f32]) -> [Vec<f32>; 2] {
        let Self { steps, .. } = self;
        let hidden = self.sizes[1];
        let wide = 3 * hidden;
        let outer = steps.pack(outer, hidden);
        let hidden_weight = Matrix::rows(values(&self.weights[1]), [wide, hidden]);
        let mut by_input = vec![0.0; steps.rows * wide];
        let mut by_state = vec![0.0; steps.rows * wide];
        // What flows back into the state of each text, from the steps behind.
        let mut carried = vec![0.0; steps.order.len() * hidden];
        for (step, previous) in steps.walk(self.direction).into_iter().rev() {
            let (start, count) = (steps.starts[step], steps.counts[step]);
            for at in 0..count {
                let row = start + at;
                let part = |values: &'_ [f32], at: usize| -> f32 { values[row * hidden + at] };
                let gates = &self.gates[row * wide..][..wide];
                let into_input = &mut by_input[row * wide..][..wide];
                let into_state = &mut by_state[row * wide..][..wide];
                let carried = &mut carried[at * hidden..][..hidden];
                for unit in 0..hidden {
                    let reset = gates[unit];
                    let keep = gates[hidden + unit];
                    let new = gates[2 * hidden + unit];
                    let state = carried[unit] + part(&outer, unit);
                    let new_sum = state * (1.0 - keep) * (1.0 - new * new);
                    let difference = part(&self.before, unit) - new;
                    let keep_sum = state * difference * keep * (1.0 - keep);
                    let reset_sum = new_sum * part(&self.shares, unit) * reset * (1.0 - reset);
                    into_input[unit] = reset_sum;
                    into_state[unit] = reset_sum;
                    into_input[hidden + unit] = keep_sum;
                    into_state[hidden + unit] = keep_sum;
                    into_input[2 * hidden + unit] = new_sum;
                    into_state[2 * hidden + unit] = new_sum * reset;
                    carried[unit] = state * keep;
                }
            }
            let known = steps.known(step, previous);
            if known > 0 {
                let rows = Matrix::rows(&by_state[start * wide..][..known * wide], [known, wide]);
                multiply(&mut carried, [hidden as isize, 1], true, rows, hidden_weight);
            }
            // Texts that begin at this step have no state before it.
            carried[known * hidden..count * hidden].fill(0.0);
        }
        [by_input, by_state]
    }
}

#[derive(Debug)]
struct GruBackward;

impl Backward<Flex, 5> for GruBackward {
    type State = Trace;

    fn backward(
        self,
        ops: Ops<Trace, 5>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let outer = contiguous(&gradients.consume::<Flex>(&ops.node));
        let [input_node, input_weight_node, hidden_weight_node, input_bias_node, hidden_bias_node] =
            ops.parents;
        let trace = ops.state;
        let [size, hidden] = trace.sizes;
        let (rows, wide) = (trace.steps.rows, 3 * hidden);
        let [by_input, by_state] = trace.gate_gradients(values(&outer));
        let input_side = Matrix::rows(&by_input, [rows, wide]);
        let state_side = Matrix::rows(&by_state, [rows, wide]);
        if let Some(node) = input_weight_node {
            let mut product = vec![0.0; wide * size];
            let input = Matrix::rows(&trace.input, [rows, size]);
            multiply(&mut product, [size as isize, 1], false, input_side.turned(), input);
            gradients.register::<Flex>(node.id, tensor(product, [wide, size]));
        }
        if let Some(node) = hidden_weight_node {
            let mut product = vec![0.0; wide * hidden];
            let before = Matrix::rows(&trace.before, [rows, hidden]);
            multiply(&mut product, [hidden as isize, 1], false, state_side.turned(), before);
            gradients.register::<Flex>(node.id, tensor(product, [wide, hidden]));
        }
        if let Some(node) = input_bias_node {
            gradients.register::<Flex>(node.id, tensor(column_sums(&by_input, wide), [wide]));
        }
        if let Some(node) = hidden_bias_node {
            gradients.register::<Flex>(node.id, tensor(column_sums(&by_state, wide), [wide]));
        }
        if let Some(node) = input_node {
            let mut product = vec![0.0; rows * size];
            let weight = Matrix::rows(values(&trace.weights[0]), [wide, size]);
            multiply(&mut product, [size as isize, 1], false, input_side, weight);
            let shape = [trace.steps.order.len(), trace.steps.width, size];
            let unpacked = trace.steps.unpack(&product, size);
            gradients.register::<Flex>(node.id, tensor(unpacked, shape));
        }
    }
}

/// `exp` without a call, so that loops over it become vectors: 2 to a whole power, which is put
/// into the exponent's bits, times a polynomial (Cephes') of what is left. To 2e-7 of the value.
#[inline]
fn exponential(x: f32) -> f32 {
    // Adding it leaves a number's whole part in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 87.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let x = x - whole * 0.693_359_4 + whole * 2.121_944_4e-4;
    let polynomial = 1.987_569_1e-4f32;
    let polynomial = polynomial * x + 1.398_2e-3;
    let polynomial = polynomial * x + 8.333_452e-3;
    let polynomial = polynomial * x + 4.166_579_6e-2;
    let polynomial = polynomial * x + 1.666_666_5e-1;
    let polynomial = polynomial * x + 5e-1;
    let value = polynomial * x * x + x + 1.0;
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    value * f32::from_bits(power << 23)
}

#[inline]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exponential(-x))
}

#[inline]
fn tanh(x: f32) -> f32 {
    2.0 / (1.0 + exponential(-2.0 * x)) - 1.0
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::random::Generator;

    #[test]
    fn the_functions_are_those_of_the_standard_library() {
        for at in -4000..=4000 {
            let x = at as f32 / 100.0;
            let exact = f64::from(x).exp();
            assert!((f64::from(exponential(x)) / exact - 1.0).abs() < 3e-7, "exp {x}");
            assert!((tanh(x) - x.tanh()).abs() < 3e-7, "tanh {x}");
        }
        assert!(sigmoid(f32::NAN).is_nan() && tanh(f32::NAN).is_nan());
        assert!(sigmoid(1e30) == 1.0 && sigmoid(-1e30) < 1e-37 && tanh(-1e30) == -1.0);
    }

    fn drawn<const D: usize>(name: &str, shape: [usize; D], device: &Device) -> Tensor<D> {
        let mut generator = Generator::of(5, name);
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| generator.symmetric()).collect();
        Tensor::from_data(TensorData::new(values, shape), device).require_grad()
    }

    /// Forward and backward, at every mix of lengths that matters.
    #[test]
    fn it_computes_what_burns_own_operations_compute() {
        let device = Device::flex().autodiff();
        let [batch, width, size, hidden] = [4, 5, 3, 6];
        for lengths in [[5, 5, 5, 5], [2, 5, 1, 3], [1, 1, 1, 1], [4, 4, 1, 2]] {
            for direction in [Direction::Forward, Direction::Reverse] {
                let run = |fused: bool| {
                    let input = drawn("input", [batch, width, size], &device);
                    let weights = GruWeights {
                        input: drawn("a", [3 * hidden, size], &device),
                        hidden: drawn("b", [3 * hidden, hidden], &device),
                        input_bias: drawn("c", [3 * hidden], &device),
                        hidden_bias: drawn("d", [3 * hidden], &device),
                    };
                    let output = match fused {
                        true => gru(input.clone(), weights.clone(), &lengths, direction),
                        false => plain(input.clone(), &weights, &lengths, direction),
                    };
                    let factor = drawn("factor", [batch, width, hidden], &device).detach();
                    let gradients = (output.clone() * factor).sum().backward();
                    let data = |data: TensorData| data.try_to_vec::<f32>().expect("f32");
                    vec![
                        data(output.inner().into_data()),
                        data(input.grad(&gradients).expect("there").into_data()),
                        data(weights.input.grad(&gradients).expect("there").into_data()),
                        data(weights.hidden.grad(&gradients).expect("there").into_data()),
                        data(weights.input_bias.grad(&gradients).expect("there").into_data()),
                        data(weights.hidden_bias.grad(&gradients).expect("there").into_data()),
                    ]
                };
                for (ours, theirs) in run(true).into_iter().zip(run(false)) {
                    for (ours, theirs) in ours.into_iter().zip(theirs) {
                        let close = (ours - theirs).abs() < 1e-5;
                        assert!(close, "{lengths:?} {direction:?}: {ours}, {theirs}");
                    }
                }
            }
        }
    }
}
