//! A batch of texts as numbers of words, checked once: the kernels that read them index without
//! looking again.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use skep_data::Column;
use skep_data::vocabulary::PADDING;
use skep_wire::Dtype;

use crate::LearnError;

/// Rows of word numbers, as wide as the longest text in the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    numbers: Arc<Vec<u32>>,
    /// How many numbers of each row count: all up to the last that is not padding, at least one.
    lengths: Arc<Vec<usize>>,
    width: usize,
}

impl Tokens {
    /// Takes a column of `U16` or `I32` `[length]` whose numbers are below `words`.
    pub fn of(column: &Column, words: usize) -> Result<Self, LearnError> {
        let refuse = |reason: String| LearnError::Column { name: column.name.clone(), reason };
        let &[length] = &column.shape[..] else {
            return Err(refuse(format!("has shape {:?}, not [length]", column.shape)));
        };
        let wide: Vec<u32> = match column.dtype {
            Dtype::U16 => {
                let pairs = column.bytes.chunks_exact(2);
                pairs.map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]]))).collect()
            }
            Dtype::I32 => {
                let words = column.bytes.chunks_exact(4);
                // A negative number becomes one that is too large.
                words.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
            }
            other => return Err(refuse(format!("is {other:?}, not U16 or I32"))),
        };
        if let Some(bad) = wide.iter().find(|&&number| number as usize >= words) {
            return Err(refuse(format!("has word number {bad}, of {words}")));
        }
        if wide.is_empty() || length == 0 {
            return Err(refuse("is empty".to_owned()));
        }
        let length_of = |row: &[u32]| {
            row.iter().rposition(|&number| number != u32::from(PADDING)).map_or(1, |last| last + 1)
        };
        let lengths: Vec<usize> = wide.chunks_exact(length).map(length_of).collect();
        let width = lengths.iter().copied().max().unwrap_or(1);
        let rows = wide.chunks_exact(length).flat_map(|row| &row[..width]);
        Ok(Self { numbers: Arc::new(rows.copied().collect()), lengths: Arc::new(lengths), width })
    }

    /// How many texts.
    pub fn batch(&self) -> usize {
        self.lengths.len()
    }

    /// How many numbers a row has.
    pub fn width(&self) -> usize {
        self.width
    }

    /// How many numbers of each row count.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// The numbers that count, text by text.
    pub fn texts(&self) -> impl Iterator<Item = &[u32]> {
        let rows = self.numbers.chunks_exact(self.width).zip(self.lengths.iter());
        rows.map(|(row, &length)| &row[..length])
    }

    /// All numbers as a tensor, padding included.
    pub fn tensor(&self, device: &Device) -> Tensor<2, Int> {
        let numbers: Vec<i64> = self.numbers.iter().map(|&number| i64::from(number)).collect();
        Tensor::from_data(TensorData::new(numbers, [self.batch(), self.width]), device)
    }

    /// 1 where a number counts, 0 where it is padding, `[batch, width]`.
    pub fn mask(&self, device: &Device) -> Tensor<2> {
        let row = |&length: &usize| (0..self.width).map(move |at| f32::from(at < length));
        let mask: Vec<f32> = self.lengths.iter().flat_map(row).collect();
        Tensor::from_data(TensorData::new(mask, [self.batch(), self.width]), device)
    }

    /// One over the length of each text, `[batch, 1]`.
    pub fn shares(&self, device: &Device) -> Tensor<2> {
        let shares: Vec<f32> = self.lengths.iter().map(|&length| 1.0 / length as f32).collect();
        Tensor::from_data(TensorData::new(shares, [self.batch(), 1]), device)
    }
}
