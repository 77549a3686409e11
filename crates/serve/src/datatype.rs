//! The element types of the Open Inference Protocol that tasks take and give.

use serde::ser::SerializeSeq;
use skep_wire::Dtype;

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Datatype {
    Uint8,
    Fp32,
    /// Texts.
    Bytes,
}

impl Datatype {
    /// The protocol's word.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Uint8 => "UINT8",
            Self::Fp32 => "FP32",
            Self::Bytes => "BYTES",
        }
    }

    /// Bytes of an element; texts have as many as they have.
    pub(crate) fn width(self) -> usize {
        match self {
            Self::Uint8 | Self::Bytes => 1,
            Self::Fp32 => 4,
        }
    }

    /// The same in a table, for numbers.
    pub(crate) fn in_table(self) -> Option<Dtype> {
        match self {
            Self::Uint8 => Some(Dtype::U8),
            Self::Fp32 => Some(Dtype::F32),
            Self::Bytes => None,
        }
    }

    /// Appends a number, if it is one of this type and finite in it.
    pub(crate) fn push(self, number: f64, bytes: &mut Vec<u8>) -> Option<()> {
        match self {
            Self::Uint8 => {
                let whole = number.fract() == 0.0 && (0.0..=255.0).contains(&number);
                bytes.push(whole.then_some(number as u8)?);
            }
            Self::Fp32 => {
                let single = number as f32;
                bytes.extend(single.is_finite().then_some(single)?.to_le_bytes());
            }
            Self::Bytes => return None,
        }
        Some(())
    }

    /// Writes the element that `word` is.
    pub(crate) fn write<L: SerializeSeq>(self, word: &[u8], list: &mut L) -> Result<(), L::Error> {
        match *word {
            [a, b, c, d] => list.serialize_element(&f32::from_le_bytes([a, b, c, d])),
            _ => list.serialize_element(word.first().unwrap_or(&0)),
        }
    }
}
