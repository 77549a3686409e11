//! Keras' own format: a zip file with `config.json`, `metadata.json` and `model.weights.h5`.

use super::{MAX_UNPACKED, Parts, SMALL, Tensors, archive, hdf5};
use crate::DataError;

pub(super) const WEIGHTS: &str = "model.weights.h5";

/// Where Keras keeps the state of the optimiser, in `.h5` and in its other formats. Its names say
/// how many optimisers the session had made before, so that the same model can have others.
const OPTIMISER: [&str; 2] = ["optimizer_weights/", "optimizer/"];

/// Takes the state of the optimiser out of the tensors of a Keras file.
pub(super) fn take_optimiser(tensors: &mut Tensors) -> Tensors {
    let is_optimisers = |name: &str| OPTIMISER.iter().any(|start| name.starts_with(start));
    tensors.extract_if(.., |name, _| is_optimisers(name)).collect()
}

/// What the description of the layers is called, here and in the attributes of a `.h5`.
const CONFIG: (&str, &str) = ("config.json", "model_config");

fn entries(bytes: &[u8]) -> Result<Vec<(String, Vec<u8>)>, DataError> {
    archive::unpacked(bytes, bytes.len().saturating_mul(MAX_UNPACKED).saturating_add(SMALL))
}

/// Reads the weights, and the description of the layers.
pub(super) fn parse(bytes: &[u8]) -> Result<Parts, DataError> {
    let entries = entries(bytes)?;
    let find = |name: &str| entries.iter().find(|(path, _)| path == name).map(|(_, data)| data);
    let weights = find(WEIGHTS).ok_or_else(|| DataError::file(WEIGHTS, "it is missing"))?;
    let (tensors, mut metadata) = hdf5::parse(weights)?;
    if let Some(config) = find(CONFIG.0).and_then(|data| std::str::from_utf8(data).ok()) {
        metadata.insert(CONFIG.1.to_owned(), config.to_owned());
    }
    Ok((tensors, metadata))
}

/// A copy of a file with other weights.
pub(super) fn refilled(like: &[u8], tensors: &Tensors) -> Result<Vec<u8>, DataError> {
    let mut entries = entries(like)?;
    let weights = entries.iter_mut().find(|(path, _)| path == WEIGHTS);
    let (_, weights) = weights.ok_or_else(|| DataError::file(WEIGHTS, "it is missing"))?;
    *weights = hdf5::refilled(weights, tensors)?;
    archive::pack(&entries)
}
