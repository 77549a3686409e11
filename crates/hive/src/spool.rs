//! Spooled models: what was accepted, in a file of its own, until a checkpoint holds it.
//!
//! A model is minutes of somebody's work. Checkpoints stay the authority on what a run holds; a
//! spooled model only saves work after a crash. It is taken over if its positions are still free
//! and, where a run promises bits, if it was made on the very version that the run stands at, by
//! the hash of its bytes. Everything else is deleted and trained again.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use skep_data::shard_hash;
use skep_math::all_finite;
use skep_wire::{Frame, FrameView, Layout, WireError};

/// The key of the description in the file's metadata.
const METADATA: &str = "skep.spool";

/// What a spooled model says about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SpoolEntry {
    pub(crate) epoch: u64,
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// The number of the version it was made on.
    pub(crate) base: u64,
    /// The hash of that version, where the run stood at it when the model came.
    pub(crate) base_hash: String,
    pub(crate) loss: Option<f64>,
    /// The hash of the numbers.
    #[serde(default)]
    hash: String,
}

impl SpoolEntry {
    pub(crate) fn new(epoch: u64, first: u64, count: u64, base: u64) -> Self {
        let (base_hash, hash) = (String::new(), String::new());
        Self { epoch, first, count, base, base_hash, loss: None, hash }
    }

    pub(crate) fn name(&self) -> String {
        file_name(self.epoch, self.first)
    }

    /// The file: the model with this description.
    pub(crate) fn encode(mut self, frame: &Frame) -> Result<Bytes, WireError> {
        self.hash = version_hash(frame);
        let text = serde_json::to_string(&self)
            .map_err(|error| WireError::Safetensors(error.to_string()))?;
        let tensors = frame.layout().places().iter();
        let tensors = tensors.map(|place| (place.name.clone(), place.dtype, place.shape.clone()));
        let metadata = HashMap::from([(METADATA.to_owned(), text)]);
        let layout = Layout::with_metadata(tensors.collect(), Some(metadata))?;
        let mut file = Frame::zeros(Arc::new(layout));
        file.data_mut().copy_from_slice(frame.data());
        Ok(Bytes::from_owner(file))
    }

    /// What a file holds, if it is whole.
    pub(crate) fn decode(layout: &Arc<Layout>, bytes: &[u8]) -> Result<(Self, Frame), WireError> {
        let wrong = |what: &str| WireError::Safetensors(what.to_owned());
        let view = FrameView::parse(bytes)?;
        let text = view.metadata.get(METADATA).ok_or_else(|| wrong("it is no spooled model"))?;
        let entry: Self = serde_json::from_str(text).map_err(|error| wrong(&error.to_string()))?;
        let frame = Frame::read(layout, bytes)?;
        if version_hash(&frame) != entry.hash || !all_finite(frame.floats()) {
            return Err(wrong("its numbers are damaged"));
        }
        Ok((entry, frame))
    }
}

/// One file per slot: what comes again replaces what came before.
pub(crate) fn file_name(epoch: u64, first: u64) -> String {
    format!("{epoch:012}-{first:012}.safetensors")
}

/// The hash of a frame's numbers.
pub(crate) fn version_hash(frame: &Frame) -> String {
    shard_hash(frame.data())
}

#[cfg(test)]
mod tests {
    use skep_wire::Dtype;

    use super::*;

    #[test]
    fn what_is_spooled_is_read_back_and_damage_is_found() {
        let tensors =
            vec![("x".to_owned(), Dtype::F32, vec![3]), ("n".to_owned(), Dtype::I64, vec![])];
        let layout = Arc::new(Layout::new(tensors).expect("a good layout"));
        let mut frame = Frame::zeros(layout.clone());
        frame.floats_mut().copy_from_slice(&[1.0, -2.0, 0.5]);
        let entry = SpoolEntry { loss: Some(0.25), ..SpoolEntry::new(3, 64, 32, 7) };
        let bytes = entry.clone().encode(&frame).expect("encodes");
        let (read, numbers) = SpoolEntry::decode(&layout, &bytes).expect("its own file");
        assert_eq!((read.epoch, read.first, read.count, read.base), (3, 64, 32, 7));
        assert_eq!((read.loss, numbers.data()), (Some(0.25), frame.data()));
        assert_eq!(read.name(), "000000000003-000000000064.safetensors");
        let mut damaged = bytes.to_vec();
        *damaged.last_mut().expect("has bytes") ^= 1;
        assert!(SpoolEntry::decode(&layout, &damaged).is_err());
        assert!(SpoolEntry::decode(&layout, &bytes[..bytes.len() - 1]).is_err());
        assert!(SpoolEntry::decode(&layout, frame.as_bytes()).is_err(), "without a description");
    }
}
