//! The numbers of a tensor, whatever their type.

use half::{bf16, f16};
use skep_wire::Dtype;

use crate::LoadedTensor;

impl LoadedTensor {
    /// Whether its numbers have a fraction.
    pub fn is_float(&self) -> bool {
        matches!(self.dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16)
    }

    /// How many numbers.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The numbers, truth values as 0 and 1; `None` for types that nobody computes with. Whole
    /// numbers beyond 2⁵³ are rounded.
    pub fn values(&self) -> Option<Vec<f64>> {
        fn each<const WIDTH: usize>(bytes: &[u8], number: impl Fn([u8; WIDTH]) -> f64) -> Vec<f64> {
            let (words, _) = bytes.as_chunks::<WIDTH>();
            words.iter().map(|word| number(*word)).collect()
        }
        let bytes = &self.bytes[..];
        Some(match self.dtype {
            Dtype::F64 => each(bytes, f64::from_le_bytes),
            Dtype::F32 => each(bytes, |word| f32::from_le_bytes(word).into()),
            Dtype::F16 => each(bytes, |word| f16::from_le_bytes(word).to_f64()),
            Dtype::BF16 => each(bytes, |word| bf16::from_le_bytes(word).to_f64()),
            Dtype::I64 => each(bytes, |word| i64::from_le_bytes(word) as f64),
            Dtype::I32 => each(bytes, |word| i32::from_le_bytes(word).into()),
            Dtype::I16 => each(bytes, |word| i16::from_le_bytes(word).into()),
            Dtype::I8 => each(bytes, |word| i8::from_le_bytes(word).into()),
            Dtype::U64 => each(bytes, |word| u64::from_le_bytes(word) as f64),
            Dtype::U32 => each(bytes, |word| u32::from_le_bytes(word).into()),
            Dtype::U16 => each(bytes, |word| u16::from_le_bytes(word).into()),
            Dtype::U8 | Dtype::BOOL => each(bytes, |[byte]: [u8; 1]| byte.into()),
            _ => return None,
        })
    }

    /// The same tensor with other numbers, each rounded to what the type can hold.
    pub(super) fn with_values(&self, values: &[f64]) -> Self {
        fn each<const WIDTH: usize>(values: &[f64], bytes: impl Fn(f64) -> [u8; WIDTH]) -> Vec<u8> {
            values.iter().flat_map(|value| bytes(*value)).collect()
        }
        let whole = f64::round_ties_even;
        let bytes = match self.dtype {
            Dtype::F64 => each(values, f64::to_le_bytes),
            Dtype::F32 => each(values, |value| (value as f32).to_le_bytes()),
            Dtype::F16 => each(values, |value| f16::from_f64(value).to_le_bytes()),
            Dtype::BF16 => each(values, |value| bf16::from_f64(value).to_le_bytes()),
            Dtype::I64 => each(values, |value| (whole(value) as i64).to_le_bytes()),
            Dtype::I32 => each(values, |value| (whole(value) as i32).to_le_bytes()),
            Dtype::I16 => each(values, |value| (whole(value) as i16).to_le_bytes()),
            Dtype::I8 => each(values, |value| (whole(value) as i8).to_le_bytes()),
            Dtype::U64 => each(values, |value| (whole(value) as u64).to_le_bytes()),
            Dtype::U32 => each(values, |value| (whole(value) as u32).to_le_bytes()),
            Dtype::U16 => each(values, |value| (whole(value) as u16).to_le_bytes()),
            _ => each(values, |value| [whole(value) as u8]),
        };
        Self { dtype: self.dtype, shape: self.shape.clone(), bytes }
    }
}
