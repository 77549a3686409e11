//! numpy's `.npz`: a zip file with an array `{name}.npy` for each tensor. Arrays of objects, which
//! are pickles, are refused.

use std::collections::BTreeMap;

use skep_wire::Dtype;

use super::{MAX_UNPACKED, SMALL, archive};
use crate::npy::{self, Header};
use crate::{DataError, LoadedTensor};

/// Reads the arrays.
pub(super) fn parse(bytes: &[u8]) -> Result<BTreeMap<String, LoadedTensor>, DataError> {
    let limit = bytes.len().saturating_mul(MAX_UNPACKED).saturating_add(SMALL);
    let mut tensors = BTreeMap::new();
    for (path, data) in archive::unpacked(bytes, limit)? {
        let refuse = |reason: String| DataError::file(&path, reason);
        let name = path.strip_suffix(".npy").ok_or_else(|| refuse("it is no array".to_owned()))?;
        let tensor = array(&data).map_err(refuse)?;
        if tensors.insert(name.to_owned(), tensor).is_some() {
            return Err(refuse("it is there twice".to_owned()));
        }
    }
    Ok(tensors)
}

/// Reads one `.npy`, in any order of bytes and axes; what is wrong with it otherwise.
pub fn array(bytes: &[u8]) -> Result<LoadedTensor, String> {
    if let Ok((dtype, shape, body)) = npy::array(bytes) {
        return Ok(LoadedTensor { dtype, shape, bytes: body.to_vec() });
    }
    let Header { kind, shape, by_column, body } = npy::header(bytes)?;
    let known = npy::KINDS.iter().find(|(_, known)| Some(&known[1..]) == kind.get(1..));
    let Some(&(dtype, _)) = known else {
        let kind: String = kind.chars().take(40).collect();
        return Err(format!("elements of type `{kind}` have no place in a model"));
    };
    let width = dtype.bitsize() / 8;
    let wanted = shape.iter().try_fold(width, |size, &side| size.checked_mul(side));
    if wanted != Some(body.len()) {
        return Err(format!("{} bytes where the header says {kind} {shape:?}", body.len()));
    }
    if shape.len() > 32 {
        return Err(format!("it has {} dimensions", shape.len()));
    }
    let mut bytes = if by_column { by_row(body, &shape, width) } else { body.to_vec() };
    if kind.starts_with('>') {
        super::swap(&mut bytes, dtype);
    }
    Ok(LoadedTensor { dtype, shape, bytes })
}

/// The elements of an array in Fortran's order, row by row.
fn by_row(body: &[u8], shape: &[usize], width: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(body.len());
    let mut index = vec![0; shape.len()];
    while bytes.len() < body.len() {
        let at = index.iter().zip(shape).rev().fold(0, |at, (place, side)| at * side + place);
        bytes.extend_from_slice(&body[at * width..(at + 1) * width]);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    bytes
}

/// The file: `numpy.load` opens it without pickles.
pub(super) fn encode(tensors: &BTreeMap<String, LoadedTensor>) -> Result<Vec<u8>, DataError> {
    let entry = |(name, tensor): (&String, &LoadedTensor)| {
        let mut bytes = npy::prefix(tensor.dtype, &tensor.shape).ok_or_else(|| {
            let hint =
                if tensor.dtype == Dtype::BF16 { "; safetensors and PyTorch have" } else { "" };
            DataError::file(name, format!("numpy has no {:?}{hint}", tensor.dtype))
        })?;
        bytes.extend_from_slice(&tensor.bytes);
        Ok((format!("{name}.npy"), bytes))
    };
    archive::pack(&tensors.iter().map(entry).collect::<Result<Vec<_>, _>>()?)
}
