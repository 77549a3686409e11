//! What classifiers share: columns to tensors, the loss and the counts.

use burn::tensor::{Device, Int, Tensor, TensorData};
use skep_data::{Column, Table};
use skep_wire::{Dtype, EvaluationCounts};

use crate::LearnError;

pub use crate::fused::cross_entropy;

/// A column by name, or what is wrong.
pub fn column<'table>(table: &'table Table, name: &str) -> Result<&'table Column, LearnError> {
    table.column(name).ok_or_else(|| LearnError::Column {
        name: name.to_owned(),
        reason: "is not in the batch".to_owned(),
    })
}

fn refuse(column: &Column, reason: String) -> LearnError {
    LearnError::Column { name: column.name.clone(), reason }
}

/// Images of `shape` (channels, height, width; a column may leave a single channel out) as
/// `[batch, channels, height, width]`, each value `v` as `(v - mean) / deviation`. Bytes count from
/// 0 to 1.
pub fn images(
    column: &Column,
    shape: [usize; 3],
    mean: f32,
    deviation: f32,
    device: &Device,
) -> Result<Tensor<4>, LearnError> {
    let fits = match shape {
        [1, height, width] if column.shape == [height, width] => true,
        _ => column.shape == shape,
    };
    if !fits {
        return Err(refuse(column, format!("has shape {:?}, not {shape:?}", column.shape)));
    }
    let normalise = |value: f32| (value - mean) / deviation;
    let values: Vec<f32> = match column.dtype {
        Dtype::U8 => {
            let table: [f32; 256] = std::array::from_fn(|byte| normalise(byte as f32 / 255.0));
            column.bytes.iter().map(|&byte| table[usize::from(byte)]).collect()
        }
        Dtype::F32 => floats(&column.bytes).map(normalise).collect(),
        other => return Err(refuse(column, format!("is {other:?}, not U8 or F32"))),
    };
    let [channels, height, width] = shape;
    let size = channels * height * width;
    if size == 0 || values.is_empty() || !values.len().is_multiple_of(size) {
        return Err(refuse(column, "holds no whole number of images".to_owned()));
    }
    let shape = [values.len() / size, channels, height, width];
    Ok(Tensor::from_data(TensorData::new(values, shape), device))
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}

/// A column of class numbers, whatever their width.
pub fn label_numbers(column: &Column) -> Result<Vec<i64>, LearnError> {
    Ok(match column.dtype {
        Dtype::U8 => column.bytes.iter().map(|&byte| i64::from(byte)).collect(),
        Dtype::I64 => column
            .bytes
            .chunks_exact(8)
            .filter_map(|word| word.try_into().ok().map(i64::from_le_bytes))
            .collect(),
        other => return Err(refuse(column, format!("is {other:?}, not U8 or I64"))),
    })
}

/// A column of class numbers, each below `classes`.
pub fn labels(
    column: &Column,
    classes: usize,
    device: &Device,
) -> Result<Tensor<1, Int>, LearnError> {
    let values = label_numbers(column)?;
    if let Some(bad) = values.iter().find(|&&label| label < 0 || label >= classes as i64) {
        return Err(refuse(column, format!("has class {bad}, of {classes}")));
    }
    let count = values.len();
    Ok(Tensor::from_data(TensorData::new(values, [count]), device))
}

/// The class with the highest score; the first one where several are equal.
pub fn best(scores: &[f32]) -> usize {
    let mut best = 0;
    for (class, &score) in scores.iter().enumerate() {
        if score > scores[best] {
            best = class;
        }
    }
    best
}

/// The softmax of the scores of a row.
pub fn probabilities(scores: &[f32]) -> Vec<f64> {
    let highest = f64::from(scores.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let powers: Vec<f64> = scores.iter().map(|&score| (f64::from(score) - highest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

/// The sum of the cross-entropies, and how many have the highest score at their label.
pub fn counts(logits: Tensor<2>, labels: Tensor<1, Int>) -> EvaluationCounts {
    let logits = logits.inner().into_data();
    let labels: Vec<i64> = labels.inner().into_data().iter::<i64>().collect();
    count(logits.as_slice::<f32>().expect("a run computes in f32"), &labels)
}

/// The same of scores, row by row, that are no tensor.
pub fn count(scores: &[f32], labels: &[i64]) -> EvaluationCounts {
    let classes = scores.len() / labels.len().max(1);
    let mut loss_sum = 0.0;
    let mut correct = 0;
    for (row, &label) in scores.chunks_exact(classes.max(1)).zip(labels) {
        let label = usize::try_from(label).unwrap_or(usize::MAX);
        let best = best(row);
        let highest = f64::from(row[best]);
        let sum: f64 = row.iter().map(|&score| (f64::from(score) - highest).exp()).sum();
        loss_sum += row.get(label).map_or(f64::NAN, |&at| highest + sum.ln() - f64::from(at));
        correct += u64::from(best == label);
    }
    EvaluationCounts { loss_sum, correct: Some(correct) }
}
