//! Where each tensor of a frame lies: the safetensors header of a run, made once.

use std::collections::HashMap;
use std::ops::Range;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::{Encoding, Role, Schema, WireError};

/// One tensor's place in a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPlace {
    /// Its name.
    pub name: String,
    /// Its element type in this frame.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its bytes, counted from the start of the data (behind the header).
    pub bytes: Range<usize>,
}

impl TensorPlace {
    /// How many elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The header of a frame and what it says. A run has one layout per kind of frame and encoding;
/// since the header's bytes never change, a frame whose first bytes equal them needs no parsing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    prefix: Vec<u8>,
    places: Vec<TensorPlace>,
    index: HashMap<String, usize>,
    data_bytes: usize,
    floats: Range<usize>,
}

impl Layout {
    /// Lays tensors out in canonical order.
    pub fn new(tensors: Vec<(String, Dtype, Vec<usize>)>) -> Result<Self, WireError> {
        Self::with_metadata(tensors, None)
    }

    /// Lays tensors out in canonical order, with `__metadata__` in the header.
    pub fn with_metadata(
        mut tensors: Vec<(String, Dtype, Vec<usize>)>,
        metadata: Option<HashMap<String, String>>,
    ) -> Result<Self, WireError> {
        tensors.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let mut places = Vec::with_capacity(tensors.len());
        let mut infos = Vec::with_capacity(tensors.len());
        let mut offset = 0usize;
        let mut floats: Option<Range<usize>> = None;
        for (name, dtype, shape) in tensors {
            let too_large = || WireError::Schema(format!("`{name}` is too large"));
            let bytes = shape
                .iter()
                .try_fold(dtype.bitsize(), |product, &side| product.checked_mul(side))
                .ok_or_else(too_large)?
                / 8;
            let end = offset.checked_add(bytes).ok_or_else(too_large)?;
            if dtype == Dtype::F32 {
                floats = Some(floats.map_or(offset, |range| range.start)..end);
            }
            infos.push((
                name.clone(),
                TensorInfo { dtype, shape: shape.clone(), data_offsets: (offset, end) },
            ));
            places.push(TensorPlace { name, dtype, shape, bytes: offset..end });
            offset = end;
        }
        let metadata =
            Metadata::new(metadata, infos).map_err(|error| WireError::Schema(error.to_string()))?;
        let mut json =
            serde_json::to_vec(&metadata).map_err(|error| WireError::Schema(error.to_string()))?;
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut prefix = (json.len() as u64).to_le_bytes().to_vec();
        prefix.append(&mut json);
        if prefix.len().checked_add(offset).is_none() {
            return Err(WireError::Schema("the tensors are too large together".to_owned()));
        }
        let index = places.iter().enumerate().map(|(at, place)| (place.name.clone(), at)).collect();
        Ok(Self { prefix, places, index, data_bytes: offset, floats: floats.unwrap_or(0..0) })
    }

    /// The layout of a version: every tensor of the schema.
    pub fn of_version(schema: &Schema, encoding: Encoding) -> Result<Self, WireError> {
        Self::encoded(schema, encoding, |_| true)
    }

    /// The layout of a version without its frozen tensors: what a reader needs who has had it whole
    /// once.
    pub fn of_changing(schema: &Schema, encoding: Encoding) -> Result<Self, WireError> {
        Self::encoded(schema, encoding, |role| *role != Role::Frozen)
    }

    /// The layout of a gradient: trainable tensors, and buffers with their new values.
    pub fn of_gradient(schema: &Schema, encoding: Encoding) -> Result<Self, WireError> {
        Self::encoded(schema, encoding, |role| {
            matches!(role, Role::Trainable { .. } | Role::Buffer { .. })
        })
    }

    fn encoded(
        schema: &Schema,
        encoding: Encoding,
        keep: impl Fn(&Role) -> bool,
    ) -> Result<Self, WireError> {
        Self::new(
            schema
                .tensors()
                .iter()
                .filter(|tensor| keep(&tensor.role))
                .map(|tensor| {
                    (tensor.name.clone(), encoding.of(tensor.dtype), tensor.shape.clone())
                })
                .collect(),
        )
    }

    /// The header with its length in front.
    pub fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// The tensors in canonical order.
    pub fn places(&self) -> &[TensorPlace] {
        &self.places
    }

    /// One tensor's place.
    pub fn place(&self, name: &str) -> Option<&TensorPlace> {
        self.index.get(name).map(|&at| &self.places[at])
    }

    /// The bytes of header and data together.
    pub fn total_bytes(&self) -> usize {
        self.prefix.len() + self.data_bytes
    }

    /// The bytes of the data.
    pub fn data_bytes(&self) -> usize {
        self.data_bytes
    }

    /// Where the `F32` tensors lie in the data: canonical order keeps them together.
    pub fn float_bytes(&self) -> Range<usize> {
        self.floats.clone()
    }

    /// Where a tensor's elements lie among all `F32` elements of the frame.
    pub fn float_range(&self, name: &str) -> Option<Range<usize>> {
        let place = self.place(name)?;
        (place.dtype == Dtype::F32).then(|| {
            (place.bytes.start - self.floats.start) / 4..(place.bytes.end - self.floats.start) / 4
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_what_safetensors_itself_would_write() {
        let tensors = [
            ("b.weight", Dtype::F32, vec![2, 3]),
            ("counter", Dtype::I64, vec![]),
            ("a.bias", Dtype::F32, vec![5]),
            ("flags", Dtype::U8, vec![3]),
        ];
        let layout =
            Layout::new(tensors.iter().map(|(n, d, s)| ((*n).to_owned(), *d, s.clone())).collect())
                .expect("a good layout");
        let data = [0u8; 64];
        let views = tensors.iter().map(|(name, dtype, shape)| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), &data[..bytes]);
            ((*name).to_owned(), view.expect("sizes agree"))
        });
        let theirs = safetensors::serialize(views, None).expect("serialises");
        assert_eq!(&theirs[..layout.prefix().len()], layout.prefix());
        assert_eq!(theirs.len(), layout.total_bytes());
        assert_eq!(layout.float_range("a.bias"), Some(0..5));
        assert_eq!(layout.float_range("b.weight"), Some(5..11));
        assert_eq!(layout.float_range("counter"), None);
    }
}
