//! The fused layers against Burn's own, and against finite differences, on odd and even shapes.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::MaxPool2dConfig;
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::{Device, Int, Tensor, TensorData};
use proptest::prelude::*;
use skep_learn::fused::{self, Activation};
use skep_learn::random::Generator;

/// Multiples of 1/64: sums of their products are exact in any order, so both sides see the same
/// largest value of a window, and ties are ties.
fn drawn<const D: usize>(name: &str, shape: [usize; D], device: &Device) -> Tensor<D> {
    let mut generator = Generator::of(1, name);
    let count = shape.iter().product();
    let mut draw = || (generator.symmetric() * 64.0).floor() / 64.0;
    let values: Vec<f32> = (0..count).map(|_| draw()).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn close<const D: usize>(ours: &Tensor<D>, theirs: &Tensor<D>, what: &str) {
    assert_eq!(ours.dims(), theirs.dims(), "{what}");
    let (ours, theirs) = (ours.to_data(), theirs.to_data());
    let pairs = || ours.iter::<f64>().zip(theirs.iter::<f64>());
    let distance = pairs().map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
    let size = pairs().map(|(_, b)| b * b).sum::<f64>().sqrt();
    assert!(distance <= 1e-5 * size.max(1.0), "{what}: {distance} of {size}");
}

#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    channels: [usize; 2],
    size: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    pool: usize,
    activation: Activation,
    bias: bool,
}

impl Case {
    fn layer(&self, device: &Device) -> Conv2d {
        let [y, x] = self.padding;
        let mut layer = Conv2dConfig::new(self.channels, self.kernel)
            .with_stride(self.stride)
            .with_dilation(self.dilation)
            .with_padding(PaddingConfig2d::Explicit(y, x, y, x))
            .with_bias(self.bias)
            .init(device);
        let [inputs, outputs] = self.channels;
        let [height, width] = self.kernel;
        let weight = drawn("weight", [outputs, inputs, height, width], device);
        layer.weight = layer.weight.map(|_| weight.require_grad());
        layer.bias =
            layer.bias.map(|bias| bias.map(|_| drawn("bias", [outputs], device).require_grad()));
        layer
    }

    /// Whether a convolution and a pooling window fit at all.
    fn fits(&self) -> bool {
        (0..2).all(|at| {
            let reach = self.dilation[at] * (self.kernel[at] - 1) + 1;
            let padded = self.size[at] + 2 * self.padding[at];
            padded >= reach && ((padded - reach) / self.stride[at] + 1) / self.pool > 0
        })
    }

    fn check(&self) {
        let device = Device::flex().autodiff();
        let layer = self.layer(&device);
        let shape = [self.batch, self.channels[0], self.size[0], self.size[1]];
        let input = drawn("input", shape, &device).require_grad();

        let ours = fused::convolution(input.clone(), &layer, self.activation, self.pool);
        let theirs = layer.forward(input.clone());
        let theirs = if self.activation == Activation::Relu { relu(theirs) } else { theirs };
        let theirs = MaxPool2dConfig::new([self.pool; 2]).init().forward(theirs);
        close(&ours.clone().inner(), &theirs.clone().inner(), "output");

        // Weighted, so that every output counts differently.
        let weights = drawn("outer", ours.dims(), &device);
        let ours = (ours * weights.clone()).sum().backward();
        let theirs = (theirs * weights).sum().backward();
        let gradient = |gradients| input.grad(gradients).expect("asked for");
        close(&gradient(&ours), &gradient(&theirs), "input");
        let gradient = |gradients| layer.weight.val().grad(gradients).expect("asked for");
        close(&gradient(&ours), &gradient(&theirs), "weight");
        if let Some(bias) = &layer.bias {
            let gradient = |gradients| bias.val().grad(gradients).expect("asked for");
            close(&gradient(&ours), &gradient(&theirs), "bias");
        }

        let plain = fused::convolution(input.inner(), &layer.valid(), self.activation, self.pool);
        assert!(!plain.is_autodiff());
    }
}

const CASES: u32 = 300;

proptest! {
    #![proptest_config(ProptestConfig {
        cases: CASES,
        max_global_rejects: 8 * CASES,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_convolution_is_burns_own(
        (batch, inputs, outputs) in (1usize..20, 1usize..5, 1usize..10),
        size in [1usize..14, 1usize..14],
        kernel in [1usize..6, 1usize..6],
        stride in [1usize..4, 1usize..4],
        padding in [0usize..3, 0usize..3],
        dilation in [1usize..3, 1usize..3],
        pool in 1usize..4,
        (cut, bias) in any::<(bool, bool)>(),
    ) {
        let activation = if cut { Activation::Relu } else { Activation::Identity };
        let channels = [inputs, outputs];
        let case = Case {
            batch, channels, size, kernel, stride, padding, dilation, pool, activation, bias,
        };
        prop_assume!(case.fits());
        case.check();
    }

    #[test]
    fn a_linear_layer_is_burns_own(
        batch in 1usize..20,
        inputs in 1usize..40,
        outputs in 1usize..40,
        (cut, bias) in any::<(bool, bool)>(),
    ) {
        let device = Device::flex().autodiff();
        let layer: Linear = LinearConfig::new(inputs, outputs).with_bias(bias).init(&device);
        let input = drawn("input", [batch, inputs], &device).require_grad();
        let ours = fused::linear(
            input.clone(),
            &layer,
            if cut { Activation::Relu } else { Activation::Identity },
        );
        let theirs = layer.forward(input.clone());
        let theirs = if cut { relu(theirs) } else { theirs };
        close(&ours.clone().inner(), &theirs.clone().inner(), "output");
        let weights = drawn("outer", ours.dims(), &device);
        let ours = (ours * weights.clone()).sum().backward();
        let theirs = (theirs * weights).sum().backward();
        let gradient = |gradients| input.grad(gradients).expect("asked for");
        close(&gradient(&ours), &gradient(&theirs), "input");
        let gradient = |gradients| layer.weight.val().grad(gradients).expect("asked for");
        close(&gradient(&ours), &gradient(&theirs), "weight");
        if let Some(bias) = &layer.bias {
            let gradient = |gradients| bias.val().grad(gradients).expect("asked for");
            close(&gradient(&ours), &gradient(&theirs), "bias");
        }
    }

    #[test]
    fn a_cross_entropy_is_burns_own(batch in 1usize..20, classes in 1usize..20) {
        let device = Device::flex().autodiff();
        let logits = drawn("logits", [batch, classes], &device).mul_scalar(9.0).detach();
        let logits = logits.require_grad();
        let labels: Vec<i64> = (0..batch).map(|row| (row * 7 % classes) as i64).collect();
        let labels = Tensor::<1, Int>::from_data(TensorData::new(labels, [batch]), &device);
        let ours = fused::cross_entropy(logits.clone(), labels.clone());
        let theirs = log_softmax(logits.clone(), 1).gather(1, labels.unsqueeze_dim(1)).mean().neg();
        close(&ours.clone().inner(), &theirs.clone().inner(), "loss");
        let ours = ours.mul_scalar(3.0).backward();
        let theirs = theirs.mul_scalar(3.0).backward();
        let gradient = |gradients| logits.grad(gradients).expect("asked for");
        close(&gradient(&ours), &gradient(&theirs), "logits");
    }
}

/// Two in a row, so that the second finds its input with the batch innermost; odd sizes, where
/// pooling drops a row; full and partial vectors. Input and all parameters move at once.
#[test]
fn gradients_agree_with_finite_differences() {
    let step = 1e-4;
    for batch in [3, 8, 16] {
        let device = Device::flex().autodiff();
        let case = Case {
            batch,
            channels: [2, 3],
            size: [11, 10],
            kernel: [3, 2],
            stride: [1, 1],
            padding: [1, 0],
            dilation: [1, 1],
            pool: 2,
            activation: Activation::Relu,
            bias: true,
        };
        let forward = |input: Tensor<4>, first: &Conv2d, second: &Conv2d| {
            let x = fused::convolution(input, first, Activation::Relu, 2);
            fused::convolution(x, second, Activation::Relu, 1)
        };
        let first = case.layer(&device);
        let second = Case { channels: [3, 2], padding: [0, 0], ..case }.layer(&device);
        let input = drawn("input", [batch, 2, 11, 10], &device).require_grad();
        let output = forward(input.clone(), &first, &second);
        let weights = drawn("outer", output.dims(), &device);
        let gradients = (output * weights.clone()).sum().backward();

        // A direction in which some window changes its mind within the step is off by a little.
        let agreeing = (0..10).filter(|number| {
            let along = |name: &str| format!("{name} {number}");
            let slope = std::cell::Cell::new(0.0);
            let input_direction = drawn(&along("input"), input.dims(), &device).inner();
            let dot = input.grad(&gradients).expect("asked for") * input_direction.clone();
            slope.set(f64::from(dot.sum().into_scalar::<f32>()));
            let moved = |layer: &Conv2d, name: &str, step: f64| {
                let mut layer = layer.clone();
                let direction = drawn(&along(name), layer.weight.dims(), &device).inner();
                let gradient = layer.weight.grad(&gradients).expect("asked for");
                let dot = (gradient * direction.clone()).sum().into_scalar::<f32>();
                slope.set(slope.get() + f64::from(dot));
                let bias = layer.bias.take().expect("it has one");
                let bias_direction = drawn(&along(name), bias.dims(), &device).inner();
                let gradient = bias.grad(&gradients).expect("asked for");
                let dot = (gradient * bias_direction.clone()).sum().into_scalar::<f32>();
                slope.set(slope.get() + f64::from(dot));
                let mut layer = layer.valid();
                layer.weight = layer.weight.map(|weight| weight + direction.mul_scalar(step));
                layer.bias = Some(bias.valid().map(|bias| bias + bias_direction.mul_scalar(step)));
                layer
            };
            let at = |step: f64| -> f64 {
                let input = input.clone().inner() + input_direction.clone().mul_scalar(step);
                let output =
                    forward(input, &moved(&first, "first", step), &moved(&second, "second", step));
                let (output, weights) = (output.to_data(), weights.to_data());
                output.iter::<f64>().zip(weights.iter::<f64>()).map(|(a, b)| a * b).sum()
            };
            let of_input = slope.get();
            let up = at(step);
            let slope = slope.replace(of_input);
            let difference = (up - at(-step)) / (2.0 * step);
            (difference - slope).abs() < 0.01 * difference.abs().max(1.0)
        });
        let agreeing = agreeing.count();
        assert!(agreeing >= 8, "batch {batch}: {agreeing} of 10 directions agree");
    }
}
