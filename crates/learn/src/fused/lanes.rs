//! Tensors with the batch as the innermost dimension. To Burn they are views with unusual strides;
//! the next convolution finds its input already in order.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::tensor::{Shape, TensorData};

use super::Primitive;

/// Vectors of eight floats come out even.
const ROUND: usize = 8;

/// `[channel, row, column, lane]`.
#[derive(Clone, Debug)]
pub(super) struct Packed {
    lanes: usize,
    kept: Kept,
}

#[derive(Clone, Debug)]
enum Kept {
    /// A tensor that lies this way already.
    Shared(Primitive),
    Own(Arc<Vec<f32>>),
}

impl Packed {
    /// Brings `[batch, channel, row, column]` in order, with zeros around each image and beyond
    /// the batch.
    pub(super) fn of(tensor: &Primitive, padding: [usize; 2]) -> Self {
        let [batch, channels, height, width]: [usize; 4] = tensor.shape().dims();
        let lanes = batch.next_multiple_of(ROUND);
        let layout = tensor.layout();
        let strides = layout.strides();
        let natural =
            [1, (height * width * lanes) as isize, (width * lanes) as isize, lanes as isize];
        // Lanes beyond the batch could hold anything, so only a full batch is taken as it is.
        if batch == lanes && padding == [0, 0] && strides == natural {
            return Self { lanes, kept: Kept::Shared(tensor.clone()) };
        }
        let plain = strides.iter().any(|&stride| stride < 0).then(|| tensor.to_contiguous());
        let tensor = plain.as_ref().unwrap_or(tensor);
        let layout = tensor.layout();
        let from = &tensor.storage::<f32>()[layout.start_offset()..];
        let [over, channel_step, row_step, column_step] =
            [0, 1, 2, 3].map(|at| layout.strides()[at].unsigned_abs());
        let [padded_height, padded_width] = [height + 2 * padding[0], width + 2 * padding[1]];
        let mut values = vec![0.0; channels * padded_height * padded_width * lanes];
        for channel in 0..channels {
            for row in 0..height {
                let start = channel * channel_step + row * row_step;
                let line = (channel * padded_height + row + padding[0]) * padded_width + padding[1];
                let into = &mut values[line * lanes..(line + width) * lanes];
                for (column, into) in into.chunks_exact_mut(lanes).enumerate() {
                    let from = &from[start + column * column_step..];
                    if over == 1 {
                        into[..batch].copy_from_slice(&from[..batch]);
                    } else {
                        for (sample, into) in into[..batch].iter_mut().enumerate() {
                            *into = from[sample * over];
                        }
                    }
                }
            }
        }
        Self { lanes, kept: Kept::Own(Arc::new(values)) }
    }

    pub(super) fn lanes(&self) -> usize {
        self.lanes
    }

    pub(super) fn values(&self) -> &[f32] {
        match &self.kept {
            Kept::Shared(tensor) => {
                let layout = tensor.layout();
                &tensor.storage::<f32>()[layout.start_offset()..][..layout.num_elements()]
            }
            Kept::Own(values) => values,
        }
    }
}

/// `[channel, row, column, lane]` as Burn sees it, `[batch, channel, row, column]`, without the
/// padding and without the lanes beyond the batch. Nothing is copied.
pub(super) fn unpacked(
    values: Vec<f32>,
    shape: [usize; 4],
    batch: usize,
    padding: [usize; 2],
) -> Primitive {
    let [_, height, width, lanes] = shape;
    let mut tensor = Primitive::from_data(TensorData::new(values, Shape::from(shape)));
    if batch != lanes {
        tensor = tensor.narrow(3, 0, batch);
    }
    if padding[0] != 0 {
        tensor = tensor.narrow(1, padding[0], height - 2 * padding[0]);
    }
    if padding[1] != 0 {
        tensor = tensor.narrow(2, padding[1], width - 2 * padding[1]);
    }
    tensor.permute(&[3, 0, 1, 2])
}
