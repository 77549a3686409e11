//! The element types of the Open Inference Protocol, and their numbers as little-endian bytes.

use half::f16;
use serde::ser::SerializeSeq;
use skep_wire::Dtype;

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Datatype {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Fp32,
    Fp64,
    /// Texts.
    Bytes,
}

impl Datatype {
    /// The protocol's word.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Uint8 => "UINT8",
            Self::Uint16 => "UINT16",
            Self::Uint32 => "UINT32",
            Self::Uint64 => "UINT64",
            Self::Int8 => "INT8",
            Self::Int16 => "INT16",
            Self::Int32 => "INT32",
            Self::Int64 => "INT64",
            Self::Fp16 => "FP16",
            Self::Fp32 => "FP32",
            Self::Fp64 => "FP64",
            Self::Bytes => "BYTES",
        }
    }

    /// Bytes of an element; texts have as many as they have.
    pub(crate) fn width(self) -> usize {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 | Self::Bytes => 1,
            Self::Uint16 | Self::Int16 | Self::Fp16 => 2,
            Self::Uint32 | Self::Int32 | Self::Fp32 => 4,
            Self::Uint64 | Self::Int64 | Self::Fp64 => 8,
        }
    }

    /// The same in a table, for those that tasks take.
    pub(crate) fn in_table(self) -> Option<Dtype> {
        match self {
            Self::Uint8 => Some(Dtype::U8),
            Self::Fp32 => Some(Dtype::F32),
            _ => None,
        }
    }

    /// Appends a whole number, if it is one of this type.
    pub(crate) fn push_integer(self, number: i128, bytes: &mut Vec<u8>) -> Option<()> {
        match self {
            Self::Bool => bytes.push(u8::try_from(number).ok().filter(|bit| *bit < 2)?),
            Self::Uint8 => bytes.push(u8::try_from(number).ok()?),
            Self::Uint16 => bytes.extend(u16::try_from(number).ok()?.to_le_bytes()),
            Self::Uint32 => bytes.extend(u32::try_from(number).ok()?.to_le_bytes()),
            Self::Uint64 => bytes.extend(u64::try_from(number).ok()?.to_le_bytes()),
            Self::Int8 => bytes.extend(i8::try_from(number).ok()?.to_le_bytes()),
            Self::Int16 => bytes.extend(i16::try_from(number).ok()?.to_le_bytes()),
            Self::Int32 => bytes.extend(i32::try_from(number).ok()?.to_le_bytes()),
            Self::Int64 => bytes.extend(i64::try_from(number).ok()?.to_le_bytes()),
            Self::Fp16 | Self::Fp32 | Self::Fp64 => self.push_float(number as f64, bytes)?,
            Self::Bytes => return None,
        }
        Some(())
    }

    /// Appends any number, if it is one of this type and finite in it.
    pub(crate) fn push_float(self, number: f64, bytes: &mut Vec<u8>) -> Option<()> {
        match self {
            Self::Fp16 => {
                let half = f16::from_f64(number);
                bytes.extend(half.is_finite().then_some(half)?.to_le_bytes());
            }
            Self::Fp32 => {
                let single = number as f32;
                bytes.extend(single.is_finite().then_some(single)?.to_le_bytes());
            }
            Self::Fp64 => bytes.extend(number.to_le_bytes()),
            // 3.0 is a whole number, whoever writes it that way.
            _ if number.fract() == 0.0 && number.abs() < 9e15 => {
                self.push_integer(number as i128, bytes)?;
            }
            _ => return None,
        }
        Some(())
    }

    /// Writes the element that `word` is.
    pub(crate) fn write<L: SerializeSeq>(self, word: &[u8], list: &mut L) -> Result<(), L::Error> {
        match (self, word) {
            (Self::Bool, &[byte]) => list.serialize_element(&(byte != 0)),
            (Self::Uint8 | Self::Bytes, &[byte]) => list.serialize_element(&byte),
            (Self::Int8, &[byte]) => list.serialize_element(&byte.cast_signed()),
            (Self::Uint16, &[a, b]) => list.serialize_element(&u16::from_le_bytes([a, b])),
            (Self::Int16, &[a, b]) => list.serialize_element(&i16::from_le_bytes([a, b])),
            (Self::Fp16, &[a, b]) => list.serialize_element(&f16::from_le_bytes([a, b]).to_f32()),
            (Self::Uint32, &[a, b, c, d]) => {
                list.serialize_element(&u32::from_le_bytes([a, b, c, d]))
            }
            (Self::Int32, &[a, b, c, d]) => {
                list.serialize_element(&i32::from_le_bytes([a, b, c, d]))
            }
            (Self::Fp32, &[a, b, c, d]) => {
                list.serialize_element(&f32::from_le_bytes([a, b, c, d]))
            }
            (_, word) => {
                let word = word.try_into().expect("the width of this type");
                match self {
                    Self::Uint64 => list.serialize_element(&u64::from_le_bytes(word)),
                    Self::Int64 => list.serialize_element(&i64::from_le_bytes(word)),
                    _ => list.serialize_element(&f64::from_le_bytes(word)),
                }
            }
        }
    }
}
