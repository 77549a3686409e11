//! The mean of the vectors of a text's words, without a table of all of them in between: that table
//! would be a hundred times the result, and so would its gradient.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::Tensor;
use burn::tensor::module::embedding;

use super::{Primitive, contiguous, is_flex, tensor, values};
use crate::tokens::Tokens;

/// The mean vector of each text's words, `[batch, size]`, by vectors `[words, size]`.
///
/// # Panics
/// If a word's number is not below the number of vectors: [`Tokens::of`] checks that.
pub fn mean_of_words(vectors: Tensor<2>, tokens: &Tokens) -> Tensor<2> {
    let device = vectors.device();
    if is_flex(&device) {
        let tokens = tokens.clone();
        let output = <Dispatch as WordOps>::fused_mean_of_words(vectors.into_dispatch(), tokens);
        return Tensor::from_dispatch(output);
    }
    let mask = tokens.mask(&device).unsqueeze_dim::<3>(2);
    let all = embedding(vectors, tokens.tensor(&device)) * mask;
    all.sum_dim(1).squeeze_dim::<2>(1) * tokens.shares(&device)
}

/// Burn's way to bring one's own operations; call the functions of this module instead.
#[backend_extension(Flex, Autodiff)]
pub trait WordOps: Backend {
    /// See [`mean_of_words`].
    fn fused_mean_of_words(vectors: FloatTensor<Self>, tokens: Tokens) -> FloatTensor<Self>;
}

impl WordOps for Flex {
    fn fused_mean_of_words(vectors: Primitive, tokens: Tokens) -> Primitive {
        forward(&vectors, &tokens)
    }
}

impl<C: CheckpointStrategy> WordOps for Autodiff<Flex, C> {
    fn fused_mean_of_words(vectors: FloatTensor<Self>, tokens: Tokens) -> FloatTensor<Self> {
        let (vectors, node) = vectors.into_parts();
        let output = forward(&vectors, &tokens);
        match MeanBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => {
                let [words, _]: [usize; 2] = vectors.shape().dims();
                prepared.finish((tokens, words), output)
            }
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        }
    }
}

fn forward(vectors: &Primitive, tokens: &Tokens) -> Primitive {
    let [_, size]: [usize; 2] = vectors.shape().dims();
    let vectors = contiguous(vectors);
    let vectors = values(&vectors);
    let mut means = vec![0.0f32; tokens.batch() * size];
    for (mean, text) in means.chunks_exact_mut(size).zip(tokens.texts()) {
        for &word in text {
            let vector = &vectors[word as usize * size..][..size];
            for (sum, value) in mean.iter_mut().zip(vector) {
                *sum += value;
            }
        }
        let share = 1.0 / text.len() as f32;
        for value in mean {
            *value *= share;
        }
    }
    tensor(means, [tokens.batch(), size])
}

#[derive(Debug)]
struct MeanBackward;

impl Backward<Flex, 1> for MeanBackward {
    /// The texts, and how many vectors there are.
    type State = (Tokens, usize);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let outer = contiguous(&gradients.consume::<Flex>(&ops.node));
        let [Some(node)] = ops.parents else { return };
        let (tokens, words) = ops.state;
        let [_, size]: [usize; 2] = outer.shape().dims();
        let mut gradient = vec![0.0f32; words * size];
        let mut part = vec![0.0f32; size];
        for (outer, text) in values(&outer).chunks_exact(size).zip(tokens.texts()) {
            let share = 1.0 / text.len() as f32;
            for (part, value) in part.iter_mut().zip(outer) {
                *part = value * share;
            }
            for &word in text {
                let into = &mut gradient[word as usize * size..][..size];
                for (sum, value) in into.iter_mut().zip(&part) {
                    *sum += value;
                }
            }
        }
        gradients.register::<Flex>(node.id, tensor(gradient, [words, size]));
    }
}
