//! Layers as one operation each, with a backward pass of their own: what makes training on a CPU
//! fast. A convolution with activation and pooling is one pass over the batch instead of four over
//! memory, and a graph has five nodes instead of fifteen.
//!
//! They take Burn's own layers, so a model is declared as usual and only its `forward` calls these.
//! On devices other than `flex`, and for grouped convolutions, they are Burn's own operations.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{
    Autodiff, Backend, Dispatch, DispatchDevice, Flex, TensorMetadata, backend_extension,
};
use burn::nn::conv::Conv2d;
use burn::nn::pool::MaxPool2dConfig;
use burn::nn::{Linear, PaddingConfig2d};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::{Device, Int, Tensor, TensorData};

mod convolution;
mod lanes;
mod linear;
mod recurrent;
mod words;

use convolution::Sizes;
use lanes::Packed;
use linear::Matrix;

pub use recurrent::{Direction, GruWeights, RecurrentOps, gru};
pub use words::{WordOps, mean_of_words};

type Primitive = FloatTensor<Flex>;

/// What follows a layer's sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    Identity,
    /// Negative values become zero.
    Relu,
}

/// How a convolution walks over its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walk {
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    activation: Activation,
    pool: usize,
}

/// Convolution, activation and max pooling over squares of `pool` (1 for none; what is left over
/// at the edges is dropped).
///
/// # Panics
/// Like Burn's own layers where the shapes do not fit.
pub fn convolution(
    input: Tensor<4>,
    layer: &Conv2d,
    activation: Activation,
    pool: usize,
) -> Tensor<4> {
    let padding = match layer.padding {
        PaddingConfig2d::Valid => Some([0, 0]),
        PaddingConfig2d::Explicit(top, left, bottom, right) => {
            (top == bottom && left == right).then_some([top, left])
        }
        PaddingConfig2d::Same => None,
    };
    let device = input.device();
    let Some(padding) = padding.filter(|_| is_flex(&device) && layer.groups == 1) else {
        let output = layer.forward(input);
        let output = match activation {
            Activation::Identity => output,
            Activation::Relu => relu(output),
        };
        return match pool {
            0 | 1 => output,
            side => MaxPool2dConfig::new([side, side]).init().forward(output),
        };
    };
    let weight = layer.weight.val();
    let bias = layer
        .bias
        .as_ref()
        .map_or_else(|| Tensor::zeros([weight.dims()[0]], &device), |bias| bias.val());
    let walk = Walk {
        stride: layer.stride,
        padding,
        dilation: layer.dilation,
        activation,
        pool: pool.max(1),
    };
    let output = <Dispatch as FusedOps>::fused_convolution(
        input.into_dispatch(),
        weight.into_dispatch(),
        bias.into_dispatch(),
        walk,
    );
    Tensor::from_dispatch(output)
}

/// A linear layer and its activation.
///
/// # Panics
/// Like Burn's own layers where the shapes do not fit.
pub fn linear(input: Tensor<2>, layer: &Linear, activation: Activation) -> Tensor<2> {
    let device = input.device();
    if !is_flex(&device) {
        let output = layer.forward(input);
        return match activation {
            Activation::Identity => output,
            Activation::Relu => relu(output),
        };
    }
    let weight = layer.weight.val();
    let bias = layer
        .bias
        .as_ref()
        .map_or_else(|| Tensor::zeros([weight.dims()[1]], &device), |bias| bias.val());
    let output = <Dispatch as FusedOps>::fused_linear(
        input.into_dispatch(),
        weight.into_dispatch(),
        bias.into_dispatch(),
        activation,
    );
    Tensor::from_dispatch(output)
}

/// Mean cross-entropy of logits `[batch, classes]`.
pub fn cross_entropy(logits: Tensor<2>, labels: Tensor<1, Int>) -> Tensor<1> {
    if !is_flex(&logits.device()) {
        return log_softmax(logits, 1).gather(1, labels.unsqueeze_dim(1)).mean().neg();
    }
    let loss =
        <Dispatch as FusedOps>::fused_cross_entropy(logits.into_dispatch(), labels.into_dispatch());
    Tensor::from_dispatch(loss)
}

fn is_flex(device: &Device) -> bool {
    matches!(device.as_dispatch().clone().inner(), DispatchDevice::Flex(_))
}

/// Burn's way to bring one's own operations; call the functions of this module instead.
#[backend_extension(Flex, Autodiff)]
pub trait FusedOps: Backend {
    /// See [`convolution`].
    fn fused_convolution(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        walk: Walk,
    ) -> FloatTensor<Self>;

    /// See [`linear`].
    fn fused_linear(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        activation: Activation,
    ) -> FloatTensor<Self>;

    /// See [`cross_entropy`].
    fn fused_cross_entropy(logits: FloatTensor<Self>, labels: IntTensor<Self>)
    -> FloatTensor<Self>;
}

impl FusedOps for Flex {
    fn fused_convolution(
        input: Primitive,
        weight: Primitive,
        bias: Primitive,
        walk: Walk,
    ) -> Primitive {
        Convolved::forward(&input, &weight, &bias, walk).0
    }

    fn fused_linear(
        input: Primitive,
        weight: Primitive,
        bias: Primitive,
        activation: Activation,
    ) -> Primitive {
        linear_forward(&input, &weight, &bias, activation)
    }

    fn fused_cross_entropy(logits: Primitive, labels: IntTensor<Self>) -> Primitive {
        scalar(Entropy::forward(&logits, &labels).0)
    }
}

impl<C: CheckpointStrategy> FusedOps for Autodiff<Flex, C> {
    fn fused_convolution(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        walk: Walk,
    ) -> FloatTensor<Self> {
        let (input, input_node) = input.into_parts();
        let (weight, weight_node) = weight.into_parts();
        let (bias, bias_node) = bias.into_parts();
        let (output, state) = Convolved::forward(&input, &weight, &bias, walk);
        let nodes = [input_node, weight_node, bias_node];
        match ConvolutionBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(state, output),
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        }
    }

    fn fused_linear(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        activation: Activation,
    ) -> FloatTensor<Self> {
        let (input, input_node) = input.into_parts();
        let (weight, weight_node) = weight.into_parts();
        let (bias, bias_node) = bias.into_parts();
        let output = linear_forward(&input, &weight, &bias, activation);
        let nodes = [input_node, weight_node, bias_node];
        match LinearBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => {
                let activated = (activation == Activation::Relu).then(|| output.clone());
                prepared.finish((input, weight, activated), output)
            }
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        }
    }

    fn fused_cross_entropy(
        logits: FloatTensor<Self>,
        labels: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (logits, node) = logits.into_parts();
        let (loss, state) = Entropy::forward(&logits, &labels);
        match EntropyBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(state, scalar(loss)),
            OpsKind::UnTracked(prepared) => prepared.finish(scalar(loss)),
        }
    }
}

fn tensor(values: Vec<f32>, shape: impl Into<burn::tensor::Shape>) -> Primitive {
    Primitive::from_data(TensorData::new(values, shape))
}

fn scalar(value: f32) -> Primitive {
    tensor(vec![value], [1])
}

/// A tensor's values in row-major order.
fn contiguous(tensor: &Primitive) -> Primitive {
    if tensor.as_slice::<f32>().is_some() { tensor.clone() } else { tensor.to_contiguous() }
}

fn values(tensor: &Primitive) -> &[f32] {
    tensor.as_slice::<f32>().expect("made contiguous, and a run computes in f32")
}

/// What a convolution leaves for its backward pass.
#[derive(Clone, Debug)]
struct Convolved {
    input: Packed,
    weight: Primitive,
    source: std::sync::Arc<Vec<u32>>,
    sizes: Sizes,
    padding: [usize; 2],
}

impl Convolved {
    fn forward(
        input: &Primitive,
        weight: &Primitive,
        bias: &Primitive,
        walk: Walk,
    ) -> (Primitive, Self) {
        let [batch, inputs, height, width] = input.shape().dims();
        let [outputs, weight_inputs, kernel_height, kernel_width] = weight.shape().dims();
        assert_eq!(inputs, weight_inputs, "the convolution wants other channels");
        let packed = Packed::of(input, walk.padding);
        let sizes = Sizes {
            lanes: packed.lanes(),
            channels: [inputs, outputs],
            padded: [height + 2 * walk.padding[0], width + 2 * walk.padding[1]],
            kernel: [kernel_height, kernel_width],
            stride: walk.stride,
            dilation: walk.dilation,
            pool: walk.pool,
            relu: walk.activation == Activation::Relu,
        };
        let [rows, columns] = sizes.output().expect("the kernel is larger than its input");
        let floats = outputs * rows * columns * sizes.lanes;
        let mut output = vec![0.0; floats];
        let mut source = vec![0; floats];
        let (weight, bias) = (contiguous(weight), contiguous(bias));
        convolution::run(convolution::Forward {
            sizes,
            input: packed.values(),
            weight: values(&weight),
            bias: values(&bias),
            output: &mut output,
            source: &mut source,
        });
        let output = lanes::unpacked(output, [outputs, rows, columns, sizes.lanes], batch, [0, 0]);
        let source = std::sync::Arc::new(source);
        (output, Self { input: packed, weight, source, sizes, padding: walk.padding })
    }
}

#[derive(Debug)]
struct ConvolutionBackward;

impl Backward<Flex, 3> for ConvolutionBackward {
    type State = Convolved;

    fn backward(
        self,
        ops: Ops<Convolved, 3>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [input_node, weight_node, bias_node] = ops.parents;
        let gradient = gradients.consume::<Flex>(&ops.node);
        let Convolved { input, weight, source, sizes, padding } = ops.state;
        let [batch, ..]: [usize; 4] = gradient.shape().dims();
        let gradient = Packed::of(&gradient, [0, 0]);
        let mut input_gradient = input_node.is_some().then(|| vec![0.0; sizes.input_floats()]);
        let mut weight_gradient = vec![0.0; values(&weight).len()];
        let mut bias_gradient = vec![0.0; sizes.channels[1]];
        convolution::run(convolution::Backward {
            sizes,
            input: input.values(),
            weight: values(&weight),
            source: &source,
            gradient: gradient.values(),
            input_gradient: input_gradient.as_deref_mut(),
            weight_gradient: &mut weight_gradient,
            bias_gradient: &mut bias_gradient,
        });
        if let Some(node) = weight_node {
            gradients.register::<Flex>(node.id, tensor(weight_gradient, weight.shape()));
        }
        if let Some(node) = bias_node {
            gradients.register::<Flex>(node.id, tensor(bias_gradient, [sizes.channels[1]]));
        }
        if let (Some(node), Some(values)) = (input_node, input_gradient) {
            let [height, width] = sizes.padded;
            let shape = [sizes.channels[0], height, width, sizes.lanes];
            gradients.register::<Flex>(node.id, lanes::unpacked(values, shape, batch, padding));
        }
    }
}

/// A tensor as a matrix, wherever its values lie.
fn matrix(tensor: &Primitive) -> Matrix<'_> {
    let layout = tensor.layout();
    let [rows, columns] = tensor.shape().dims();
    let strides = [layout.strides()[0], layout.strides()[1]];
    let values = &tensor.storage::<f32>()[layout.start_offset()..];
    Matrix { values, shape: [rows, columns], strides }
}

fn linear_forward(
    input: &Primitive,
    weight: &Primitive,
    bias: &Primitive,
    activation: Activation,
) -> Primitive {
    let [batch, _]: [usize; 2] = input.shape().dims();
    let [_, outputs]: [usize; 2] = weight.shape().dims();
    let bias = contiguous(bias);
    let relu = activation == Activation::Relu;
    tensor(linear::forward(matrix(input), matrix(weight), values(&bias), relu), [batch, outputs])
}

#[derive(Debug)]
struct LinearBackward;

impl Backward<Flex, 3> for LinearBackward {
    /// Input, weight, and the output if an activation cut it.
    type State = (Primitive, Primitive, Option<Primitive>);

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [input_node, weight_node, bias_node] = ops.parents;
        let (input, weight, activated) = ops.state;
        let mut gradient = contiguous(&gradients.consume::<Flex>(&ops.node));
        let [batch, outputs]: [usize; 2] = gradient.shape().dims();
        let [inputs, _]: [usize; 2] = weight.shape().dims();
        if let Some(output) = activated {
            let through = linear::through_relu(values(&gradient), values(&output));
            gradient = tensor(through, [batch, outputs]);
        }
        let rows = Matrix::rows(values(&gradient), [batch, outputs]);
        if let Some(node) = bias_node {
            let sums = linear::column_sums(values(&gradient), outputs);
            gradients.register::<Flex>(node.id, tensor(sums, [outputs]));
        }
        if let Some(node) = weight_node {
            // As `[out, in]`, PyTorch's way, and handed on as a view: see `state`.
            let mut product = vec![0.0; inputs * outputs];
            let strides = [inputs as isize, 1];
            linear::multiply(&mut product, strides, false, rows.turned(), matrix(&input));
            let turned = tensor(product, [outputs, inputs]).transpose(0, 1);
            gradients.register::<Flex>(node.id, turned);
        }
        if let Some(node) = input_node {
            let mut product = vec![0.0; batch * inputs];
            let strides = [inputs as isize, 1];
            linear::multiply(&mut product, strides, false, rows, matrix(&weight).turned());
            gradients.register::<Flex>(node.id, tensor(product, [batch, inputs]));
        }
    }
}

/// What a cross-entropy leaves for its backward pass: its own gradient, since everything that
/// takes is at hand.
#[derive(Clone, Debug)]
struct Entropy(Primitive);

impl Entropy {
    fn forward(logits: &Primitive, labels: &IntTensor<Flex>) -> (f32, Self) {
        let [batch, classes]: [usize; 2] = logits.shape().dims();
        let logits = contiguous(logits);
        let labels = labels.to_contiguous().into_data();
        let mut gradient = vec![0.0f32; batch * classes];
        let mut total = 0.0f64;
        let rows = values(&logits).chunks_exact(classes).zip(gradient.chunks_exact_mut(classes));
        for ((row, into), label) in rows.zip(labels.iter::<i64>()) {
            let label = usize::try_from(label).ok().filter(|&label| label < classes);
            let label = label.expect("a label is one of the classes");
            let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0f32;
            for (exponential, &logit) in into.iter_mut().zip(row) {
                *exponential = (logit - highest).exp();
                sum += *exponential;
            }
            total += f64::from(sum.ln() + highest - row[label]);
            let scale = 1.0 / (sum * batch as f32);
            for share in into.iter_mut() {
                *share *= scale;
            }
            into[label] -= 1.0 / batch as f32;
        }
        ((total / batch as f64) as f32, Self(tensor(gradient, [batch, classes])))
    }
}

#[derive(Debug)]
struct EntropyBackward;

impl Backward<Flex, 1> for EntropyBackward {
    type State = Entropy;

    fn backward(
        self,
        ops: Ops<Entropy, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let outer = gradients.consume::<Flex>(&ops.node);
        let [logits] = ops.parents;
        let Some(node) = logits else { return };
        let factor = values(&contiguous(&outer))[0];
        let mut gradient = ops.state.0;
        for value in gradient.storage_mut::<f32>() {
            *value *= factor;
        }
        gradients.register::<Flex>(node.id, gradient);
    }
}
