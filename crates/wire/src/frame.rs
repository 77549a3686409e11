//! One set of tensors as one buffer that is a safetensors file: what is computed on, what is sent
//! and what is stored are the same bytes.

use std::fmt;
use std::sync::Arc;

use half::bf16;
use safetensors::{Dtype, SafeTensors};

use crate::{Layout, MAX_HEADER_BYTES, WireError};

/// A safetensors file in memory, aligned so that its numbers can be used in place.
pub struct Frame {
    layout: Arc<Layout>,
    /// Words, not bytes: the allocation is then aligned for every element type.
    words: Vec<u64>,
}

impl Frame {
    /// All zeros.
    pub fn zeros(layout: Arc<Layout>) -> Self {
        let mut frame = Self { words: vec![0; layout.total_bytes().div_ceil(8)], layout };
        frame.write_prefix();
        frame
    }

    /// Takes over a buffer that was filled from outside, if its header is the layout's own.
    /// Otherwise gives it back for [`Frame::read`].
    pub fn adopt(layout: &Arc<Layout>, words: Vec<u64>, length: usize) -> Result<Self, Vec<u64>> {
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        let same = length == layout.total_bytes()
            && bytes.len() >= length
            && bytes[..layout.prefix().len()] == *layout.prefix();
        if same { Ok(Self { layout: layout.clone(), words }) } else { Err(words) }
    }

    /// Reads any safetensors file that has exactly the layout's tensors; `BF16` is widened where
    /// the layout says `F32`. This is the slow way, for files that others wrote.
    pub fn read(layout: &Arc<Layout>, bytes: &[u8]) -> Result<Self, WireError> {
        let limit = layout.total_bytes().saturating_add(MAX_HEADER_BYTES);
        if bytes.len() > limit {
            return Err(WireError::TooLarge {
                what: "the file",
                size: bytes.len() as u64,
                limit: limit as u64,
            });
        }
        let file = FrameView::parse(bytes)?;
        let mut differences = Vec::new();
        let mut found = Vec::with_capacity(layout.places().len());
        for place in layout.places() {
            match file.tensors.tensor(&place.name) {
                Err(_) => differences.push(format!("`{}` is missing", place.name)),
                Ok(view) if view.shape() != place.shape => differences.push(format!(
                    "`{}` has shape {:?}, not {:?}",
                    place.name,
                    view.shape(),
                    place.shape
                )),
                Ok(view) => match (view.dtype(), place.dtype) {
                    (from, to) if from == to => found.push((place, view)),
                    (Dtype::BF16, Dtype::F32) => found.push((place, view)),
                    (from, to) => {
                        differences.push(format!("`{}` is {from:?}, not {to:?}", place.name));
                    }
                },
            }
        }
        let unknown = |name: &&str| layout.place(name).is_none();
        let mut extra: Vec<_> = file.tensors.names().into_iter().filter(unknown).collect();
        extra.sort_unstable();
        differences.extend(extra.into_iter().map(|name| format!("`{name}` is not the run's")));
        if !differences.is_empty() {
            return Err(WireError::Mismatch(differences));
        }
        // Memory is taken only now that every tensor is there: a schema alone can claim anything.
        let mut frame = Self::zeros(layout.clone());
        for (place, view) in found {
            let into = frame.bytes_mut(place);
            if view.dtype() == place.dtype {
                into.copy_from_slice(view.data());
            } else {
                widen(view.data(), bytemuck::cast_slice_mut(into));
            }
        }
        Ok(frame)
    }

    fn write_prefix(&mut self) {
        let layout = self.layout.clone();
        self.all_bytes_mut()[..layout.prefix().len()].copy_from_slice(layout.prefix());
    }

    /// The layout.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The whole file.
    pub fn as_bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.layout.total_bytes()]
    }

    fn all_bytes_mut(&mut self) -> &mut [u8] {
        let length = self.layout.total_bytes();
        &mut bytemuck::cast_slice_mut(&mut self.words)[..length]
    }

    /// The data behind the header.
    pub fn data(&self) -> &[u8] {
        &self.as_bytes()[self.layout.prefix().len()..]
    }

    /// The data behind the header.
    pub fn data_mut(&mut self) -> &mut [u8] {
        let start = self.layout.prefix().len();
        &mut self.all_bytes_mut()[start..]
    }

    /// All `F32` elements, in canonical order.
    pub fn floats(&self) -> &[f32] {
        bytemuck::cast_slice(&self.data()[self.layout.float_bytes()])
    }

    /// All `F32` elements, in canonical order.
    pub fn floats_mut(&mut self) -> &mut [f32] {
        let range = self.layout.float_bytes();
        bytemuck::cast_slice_mut(&mut self.data_mut()[range])
    }

    fn bytes_mut(&mut self, place: &crate::TensorPlace) -> &mut [u8] {
        &mut self.data_mut()[place.bytes.clone()]
    }

    /// One tensor's bytes.
    pub fn tensor(&self, name: &str) -> Option<&[u8]> {
        Some(&self.data()[self.layout.place(name)?.bytes.clone()])
    }

    /// One tensor's bytes.
    pub fn tensor_mut(&mut self, name: &str) -> Option<&mut [u8]> {
        let range = self.layout.place(name)?.bytes.clone();
        Some(&mut self.data_mut()[range])
    }

    /// One `F32` tensor's elements.
    pub fn floats_of(&self, name: &str) -> Option<&[f32]> {
        Some(&self.floats()[self.layout.float_range(name)?])
    }

    /// One `F32` tensor's elements.
    pub fn floats_of_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        let range = self.layout.float_range(name)?;
        Some(&mut self.floats_mut()[range])
    }

    /// The same tensors in another encoding of the same schema (`F32` to `BF16` or back).
    pub fn convert(&self, to: &Arc<Layout>) -> Result<Self, WireError> {
        let mut other = Self::zeros(to.clone());
        for place in to.places() {
            let source = self.layout.place(&place.name).filter(|from| from.shape == place.shape);
            let Some(from) = source else {
                return Err(WireError::Mismatch(vec![format!("`{}` differs", place.name)]));
            };
            let bytes = &self.data()[from.bytes.clone()];
            let into = &mut other.data_mut()[place.bytes.clone()];
            match (from.dtype, place.dtype) {
                (a, b) if a == b => into.copy_from_slice(bytes),
                (Dtype::F32, Dtype::BF16) => {
                    let numbers: &[f32] = bytemuck::cast_slice(bytes);
                    for (narrow, wide) in into.chunks_exact_mut(2).zip(numbers) {
                        narrow.copy_from_slice(&bf16::from_f32(*wide).to_le_bytes());
                    }
                }
                (Dtype::BF16, Dtype::F32) => widen(bytes, bytemuck::cast_slice_mut(into)),
                (a, b) => {
                    return Err(WireError::Mismatch(vec![format!(
                        "`{}` is {a:?} and cannot become {b:?}",
                        place.name
                    )]));
                }
            }
        }
        Ok(other)
    }
}

fn widen(narrow: &[u8], wide: &mut [f32]) {
    for (bytes, number) in narrow.chunks_exact(2).zip(wide) {
        *number = f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
    }
}

impl Clone for Frame {
    fn clone(&self) -> Self {
        Self { layout: self.layout.clone(), words: self.words.clone() }
    }
}

impl AsRef<[u8]> for Frame {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frame({} tensors, {} bytes)", self.layout.places().len(), self.words.len() * 8)
    }
}

/// A safetensors file that someone else wrote, checked but not copied.
pub struct FrameView<'bytes> {
    /// The tensors.
    pub tensors: SafeTensors<'bytes>,
    /// The strings under `__metadata__`.
    pub metadata: std::collections::HashMap<String, String>,
}

impl<'bytes> FrameView<'bytes> {
    /// Parses and checks: the header is capped before it is read, and every offset is checked.
    pub fn parse(bytes: &'bytes [u8]) -> Result<Self, WireError> {
        let length = bytes
            .get(..8)
            .and_then(|length| length.try_into().ok())
            .map(u64::from_le_bytes)
            .ok_or_else(|| WireError::Safetensors("shorter than 8 bytes".to_owned()))?;
        if length > MAX_HEADER_BYTES as u64 {
            return Err(WireError::TooLarge {
                what: "the header",
                size: length,
                limit: MAX_HEADER_BYTES as u64,
            });
        }
        let refuse =
            |error: safetensors::SafeTensorError| WireError::Safetensors(error.to_string());
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(refuse)?;
        let tensors = SafeTensors::deserialize(bytes).map_err(refuse)?;
        Ok(Self { tensors, metadata: metadata.metadata().clone().unwrap_or_default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(dtype: Dtype) -> Arc<Layout> {
        Arc::new(
            Layout::new(vec![
                ("w".to_owned(), dtype, vec![2, 2]),
                ("n".to_owned(), Dtype::I64, vec![]),
            ])
            .expect("a good layout"),
        )
    }

    #[test]
    fn own_bytes_are_adopted_and_others_are_read() {
        let mut frame = Frame::zeros(layout(Dtype::F32));
        frame.floats_mut().copy_from_slice(&[1.0, -2.5, 3.0, 0.25]);
        let words = bytemuck::pod_collect_to_vec(frame.as_bytes());
        let again =
            Frame::adopt(frame.layout(), words, frame.as_bytes().len()).expect("own header");
        assert_eq!(again.floats(), frame.floats());

        let narrow = frame.convert(&layout(Dtype::BF16)).expect("converts");
        assert!(Frame::adopt(frame.layout(), vec![0; 64], 512).is_err());
        let wide = Frame::read(frame.layout(), narrow.as_bytes()).expect("bf16 is widened");
        assert_eq!(wide.floats(), frame.floats(), "these values are exact in bf16");
    }

    #[test]
    fn differences_are_all_named() {
        let other = Layout::new(vec![
            ("w".to_owned(), Dtype::F32, vec![4]),
            ("extra".to_owned(), Dtype::F32, vec![1]),
        ]);
        let other = Frame::zeros(Arc::new(other.expect("a good layout")));
        let error = Frame::read(&layout(Dtype::F32), other.as_bytes()).expect_err("differs");
        let text = error.to_string();
        for part in ["`w` has shape [4], not [2, 2]", "`n` is missing", "`extra` is not the run's"]
        {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn hostile_headers_are_refused_before_memory_is_taken() {
        let huge = u64::MAX.to_le_bytes();
        assert!(matches!(FrameView::parse(&huge), Err(WireError::TooLarge { .. })));
        assert!(FrameView::parse(b"").is_err());
        assert!(FrameView::parse(&[1, 0, 0, 0, 0, 0, 0, 0]).is_err());
    }
}
