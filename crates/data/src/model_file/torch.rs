//! What `torch.save` makes of a state dict: a zip file that is not compressed, in which
//! `{name}/data.pkl` has the structure and `{name}/data/{key}` the numbers.

use std::collections::BTreeMap;

use skep_wire::Dtype;

use super::{MAX_GROWTH, SMALL, archive};
use crate::{DataError, LoadedTensor, read_state_dict};

/// Reads the tensors; the numbers are used where they lie.
pub(super) fn parse(bytes: &[u8]) -> Result<BTreeMap<String, LoadedTensor>, DataError> {
    let entries = archive::stored(bytes)?;
    let pickle_path =
        entries.keys().find(|path| *path == "data.pkl" || path.ends_with("/data.pkl"));
    let pickle_path = pickle_path
        .ok_or_else(|| DataError::file("zip", "no `data.pkl` in it: not made by torch.save"))?;
    let root = &pickle_path[..pickle_path.len() - "data.pkl".len()];
    if entries.get(&format!("{root}byteorder")).is_some_and(|&order| order != b"little") {
        return Err(DataError::file("byteorder", "its numbers are not little-endian"));
    }
    let limit = bytes.len().saturating_mul(MAX_GROWTH).saturating_add(SMALL);
    let storage = |key: &str| entries.get(&format!("{root}data/{key}")).copied();
    read_state_dict(entries[pickle_path], storage, limit)
}

/// A state dict that `torch.load(path, weights_only=True)` opens.
pub(super) fn encode(tensors: &BTreeMap<String, LoadedTensor>) -> Result<Vec<u8>, DataError> {
    let mut pickle = b"\x80\x02ccollections\nOrderedDict\n)R(".to_vec();
    let mut entries = Vec::with_capacity(tensors.len() + 3);
    for (at, (name, tensor)) in tensors.iter().enumerate() {
        let storage = storage_of(tensor.dtype).ok_or_else(|| {
            DataError::file(name, format!("PyTorch keeps no {:?} in a state dict", tensor.dtype))
        })?;
        let width = tensor.dtype.bitsize() / 8;
        text(&mut pickle, name);
        pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut pickle, "storage");
        pickle.extend(format!("ctorch\n{storage}\n").into_bytes());
        text(&mut pickle, &at.to_string());
        text(&mut pickle, "cpu");
        int(&mut pickle, tensor.bytes.len() / width);
        pickle.extend(b"tQ");
        int(&mut pickle, 0);
        tuple(&mut pickle, &tensor.shape);
        tuple(&mut pickle, &strides(&tensor.shape));
        // No gradient, no hooks.
        pickle.extend(b"\x89ccollections\nOrderedDict\n)RtR");
        entries.push((format!("archive/data/{at}"), tensor.bytes.clone()));
    }
    pickle.extend(b"u.");
    entries.insert(0, ("archive/data.pkl".to_owned(), pickle));
    entries.insert(1, ("archive/byteorder".to_owned(), b"little".to_vec()));
    entries.push(("archive/version".to_owned(), b"3\n".to_vec()));
    archive::pack(&entries)
}

fn storage_of(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::F64 => "DoubleStorage",
        Dtype::F32 => "FloatStorage",
        Dtype::F16 => "HalfStorage",
        Dtype::BF16 => "BFloat16Storage",
        Dtype::I64 => "LongStorage",
        Dtype::I32 => "IntStorage",
        Dtype::I16 => "ShortStorage",
        Dtype::I8 => "CharStorage",
        Dtype::U8 => "ByteStorage",
        Dtype::BOOL => "BoolStorage",
        _ => return None,
    })
}

fn text(pickle: &mut Vec<u8>, text: &str) {
    pickle.push(b'X');
    pickle.extend((text.len() as u32).to_le_bytes());
    pickle.extend(text.as_bytes());
}

/// The numbers that are needed here are below 2⁶³.
fn int(pickle: &mut Vec<u8>, number: usize) {
    match i32::try_from(number) {
        Ok(number) => {
            pickle.push(b'J');
            pickle.extend(number.to_le_bytes());
        }
        Err(_) => {
            pickle.extend([0x8a, 8]);
            pickle.extend((number as u64).to_le_bytes());
        }
    }
}

fn tuple(pickle: &mut Vec<u8>, numbers: &[usize]) {
    pickle.push(b'(');
    for &number in numbers {
        int(pickle, number);
    }
    pickle.push(b't');
}

fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at] * shape[at].max(1);
    }
    strides
}
