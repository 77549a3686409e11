//! A linear layer with its bias and ReLU, and its backward pass, by the `gemm` crate on strides:
//! a weight that is a transposed view is read as it lies, and its gradient is written the way the
//! weight lies, so that nothing is ever transposed.

use gemm::Parallelism;

/// A matrix somewhere in a slice.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) shape: [usize; 2],
    pub(crate) strides: [isize; 2],
}

impl<'a> Matrix<'a> {
    /// A matrix whose rows follow each other.
    pub(crate) fn rows(values: &'a [f32], shape: [usize; 2]) -> Self {
        Self { values, shape, strides: [shape[1] as isize, 1] }
    }

    /// The same with rows and columns exchanged.
    pub(crate) fn turned(self) -> Self {
        let ([rows, columns], [down, right]) = (self.shape, self.strides);
        Self { values: self.values, shape: [columns, rows], strides: [right, down] }
    }

    fn fits(&self) -> bool {
        let [rows, columns] = self.shape;
        let [down, right] = self.strides;
        let last = |count: usize, stride: isize| {
            usize::try_from(stride)
                .ok()
                .and_then(|stride| count.checked_sub(1)?.checked_mul(stride))
        };
        match (last(rows, down), last(columns, right)) {
            (Some(down), Some(right)) => down + right < self.values.len(),
            _ => rows == 0 || columns == 0,
        }
    }
}

/// `into` = `left` · `right`, or `into` + that.
pub(crate) fn multiply(
    into: &mut [f32],
    into_strides: [isize; 2],
    add: bool,
    left: Matrix<'_>,
    right: Matrix<'_>,
) {
    let [rows, inner] = left.shape;
    let [inner_too, columns] = right.shape;
    let shape = [rows, columns];
    let target = Matrix { values: into, shape, strides: into_strides };
    assert!(inner == inner_too && left.fits() && right.fits() && target.fits());
    // SAFETY: all three matrices lie within their slices, as checked.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            inner,
            into.as_mut_ptr(),
            into_strides[1],
            into_strides[0],
            add,
            left.values.as_ptr(),
            left.strides[1],
            left.strides[0],
            right.values.as_ptr(),
            right.strides[1],
            right.strides[0],
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// `input` `[batch, in]` · `weight` `[in, out]` + `bias`, cut off below zero if `relu`.
pub(crate) fn forward(input: Matrix<'_>, weight: Matrix<'_>, bias: &[f32], relu: bool) -> Vec<f32> {
    let (batch, outputs) = (input.shape[0], weight.shape[1]);
    let mut output = Vec::with_capacity(batch * outputs);
    for _ in 0..batch {
        output.extend_from_slice(bias);
    }
    multiply(&mut output, [outputs as isize, 1], true, input, weight);
    if relu {
        for value in &mut output {
            // Not `max`, which would turn a NaN into a zero.
            *value = if *value <= 0.0 { 0.0 } else { *value };
        }
    }
    output
}

/// The gradient of what the activation saw.
pub(crate) fn through_relu(gradient: &[f32], output: &[f32]) -> Vec<f32> {
    let pairs = gradient.iter().zip(output);
    pairs.map(|(&gradient, &output)| if output <= 0.0 { 0.0 } else { gradient }).collect()
}

/// Sums over the batch.
pub(crate) fn column_sums(gradient: &[f32], outputs: usize) -> Vec<f32> {
    let mut sums = vec![0.0; outputs];
    for row in gradient.chunks_exact(outputs) {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += value;
        }
    }
    sums
}
