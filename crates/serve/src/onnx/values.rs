//! The protocol's tensors as tract's, and back.

use half::f16;
use tract_onnx::prelude::{DatumType, TValue, Tensor as Value, TractError, TractResult};

use crate::datatype::Datatype;
use crate::tensor::{Elements, Tensor};

/// Types that have a word in the protocol and numbers here.
const TYPES: [(Datatype, DatumType); 12] = [
    (Datatype::Bool, DatumType::Bool),
    (Datatype::Uint8, DatumType::U8),
    (Datatype::Uint16, DatumType::U16),
    (Datatype::Uint32, DatumType::U32),
    (Datatype::Uint64, DatumType::U64),
    (Datatype::Int8, DatumType::I8),
    (Datatype::Int16, DatumType::I16),
    (Datatype::Int32, DatumType::I32),
    (Datatype::Int64, DatumType::I64),
    (Datatype::Fp16, DatumType::F16),
    (Datatype::Fp32, DatumType::F32),
    (Datatype::Fp64, DatumType::F64),
];

/// The protocol's word for a type.
pub(crate) fn datatype(datum: DatumType) -> Option<Datatype> {
    // A length that a graph worked out is a whole number to everybody else.
    let datum = if datum == DatumType::TDim { DatumType::I64 } else { datum };
    TYPES.iter().find(|(_, known)| *known == datum).map(|(datatype, _)| *datatype)
}

/// A tensor of a request, for tract.
pub(crate) fn value(tensor: &Tensor) -> TractResult<TValue> {
    let texts = || TractError::msg("texts are not numbers");
    let Elements::Numbers(bytes) = &tensor.elements else { return Err(texts()) };
    let (shape, bytes) = (&tensor.shape[..], &bytes[..]);
    let value = match tensor.datatype {
        Datatype::Bool => {
            let bits: Vec<bool> = bytes.iter().map(|byte| *byte != 0).collect();
            Value::from_shape(shape, &bits)
        }
        Datatype::Uint8 => Value::from_shape(shape, bytes),
        Datatype::Uint16 => Value::from_shape(shape, &words(bytes, u16::from_le_bytes)),
        Datatype::Uint32 => Value::from_shape(shape, &words(bytes, u32::from_le_bytes)),
        Datatype::Uint64 => Value::from_shape(shape, &words(bytes, u64::from_le_bytes)),
        Datatype::Int8 => Value::from_shape(shape, &words(bytes, i8::from_le_bytes)),
        Datatype::Int16 => Value::from_shape(shape, &words(bytes, i16::from_le_bytes)),
        Datatype::Int32 => Value::from_shape(shape, &words(bytes, i32::from_le_bytes)),
        Datatype::Int64 => Value::from_shape(shape, &words(bytes, i64::from_le_bytes)),
        Datatype::Fp16 => Value::from_shape(shape, &words(bytes, f16::from_le_bytes)),
        Datatype::Fp32 => Value::from_shape(shape, &words(bytes, f32::from_le_bytes)),
        Datatype::Fp64 => Value::from_shape(shape, &words(bytes, f64::from_le_bytes)),
        Datatype::Bytes => Err(texts()),
    };
    Ok(value?.into())
}

fn words<const WIDTH: usize, T>(bytes: &[u8], read: fn([u8; WIDTH]) -> T) -> Vec<T> {
    bytes.as_chunks::<WIDTH>().0.iter().map(|word| read(*word)).collect()
}

/// What a graph gave, for an answer.
pub(crate) fn tensor(name: &str, value: &TValue) -> TractResult<Tensor> {
    let Some(datatype) = datatype(value.datum_type()) else {
        let datum = value.datum_type();
        return Err(TractError::msg(format!(
            "`{name}` is {datum:?}, which the protocol has no word for"
        )));
    };
    let whole = value.cast_to_dt(TYPES[place(datatype)].1)?;
    // Tract's numbers lie as the machine has them: little-endian on all that Skep runs on.
    let bytes = whole.as_bytes().to_vec();
    let (name, shape) = (name.to_owned(), value.shape().to_vec());
    Ok(Tensor { name, datatype, shape, elements: Elements::Numbers(bytes) })
}

fn place(datatype: Datatype) -> usize {
    TYPES.iter().position(|(known, _)| *known == datatype).unwrap_or(0)
}
