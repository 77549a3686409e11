//! Files that others trained: `.safetensors`, and PyTorch's `.pth` as far as it holds weights.
//! What a file is shows from its first bytes, not its name.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::Path;

use half::{bf16, f16};
use skep_wire::{Dtype, Frame, FrameView, TensorPlace};
use zip::{CompressionMethod, ZipArchive};

use crate::{DataError, read_state_dict};

/// The largest file that is read.
const MAX_FILE_BYTES: u64 = 16 << 30;

/// Tensors may have this many times the bytes of their file: storages can be shared, but a few
/// bytes must not become a memory full of copies.
const MAX_GROWTH: usize = 8;

/// Any file's tensors may have this many bytes.
const SMALL: usize = 1 << 20;

/// One tensor of a model file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedTensor {
    /// The element type.
    pub dtype: Dtype,
    /// The shape.
    pub shape: Vec<usize>,
    /// The elements, contiguous, little-endian.
    pub bytes: Vec<u8>,
}

/// Reads a model file.
pub fn load(path: impl AsRef<Path>) -> Result<BTreeMap<String, LoadedTensor>, DataError> {
    let path = path.as_ref();
    let name = path.to_string_lossy();
    let fail = |error| DataError::of_io(&name, error);
    let length = std::fs::metadata(path).map_err(fail)?.len();
    if length > MAX_FILE_BYTES {
        let reason = format!("it has {length} bytes, over the limit of {MAX_FILE_BYTES}");
        return Err(DataError::file(&name, reason));
    }
    parse(&name, &std::fs::read(path).map_err(fail)?)
}

/// Reads a model file from memory. The name is for error messages.
pub fn parse(name: &str, bytes: &[u8]) -> Result<BTreeMap<String, LoadedTensor>, DataError> {
    let within = |error: DataError| match error {
        error @ (DataError::Store { .. } | DataError::Mismatch(_)) => error,
        error => DataError::file(name, error.to_string()),
    };
    if bytes.starts_with(b"PK\x03\x04") {
        parse_torch(bytes).map_err(within)
    } else if bytes.get(8) == Some(&b'{') {
        parse_safetensors(bytes).map_err(within)
    } else if bytes.first() == Some(&0x80) {
        Err(DataError::file(
            name,
            "a bare pickle, or a file of a PyTorch before 1.6; load it there and save it again \
             with torch.save(model.state_dict(), path)",
        ))
    } else {
        Err(DataError::file(name, "neither a safetensors file nor one that torch.save makes"))
    }
}

fn parse_safetensors(bytes: &[u8]) -> Result<BTreeMap<String, LoadedTensor>, DataError> {
    let file =
        FrameView::parse(bytes).map_err(|error| DataError::file("header", error.to_string()))?;
    let tensor = |(name, view): (&str, safetensors::tensor::TensorView<'_>)| {
        let (dtype, shape) = (view.dtype(), view.shape().to_vec());
        (name.to_owned(), LoadedTensor { dtype, shape, bytes: view.data().to_vec() })
    };
    Ok(file.tensors.iter().map(tensor).collect())
}

/// `torch.save` makes a zip file that is not compressed: `{name}/data.pkl` has the structure and
/// `{name}/data/{key}` the numbers, which are used where they lie.
fn parse_torch(bytes: &[u8]) -> Result<BTreeMap<String, LoadedTensor>, DataError> {
    let broken = |error: zip::result::ZipError| DataError::file("zip", error.to_string());
    let mut archive = ZipArchive::new(Cursor::new(bytes)).map_err(broken)?;
    let mut entries = BTreeMap::new();
    for at in 0..archive.len() {
        let entry = archive.by_index_raw(at).map_err(broken)?;
        let path = entry.name().to_owned();
        if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
            let reason =
                "it is compressed or encrypted, which torch.save never does; save it again";
            return Err(DataError::file(&path, reason));
        }
        let start = entry.data_start().and_then(|start| usize::try_from(start).ok());
        let data = start
            .and_then(|start| bytes.get(start..)?.get(..usize::try_from(entry.size()).ok()?))
            .ok_or_else(|| DataError::file(&path, "it leaves the file, which is cut short"))?;
        let mut sum = flate2::Crc::new();
        sum.update(data);
        if sum.sum() != entry.crc32() {
            return Err(DataError::file(&path, "its checksum is wrong; the file is damaged"));
        }
        entries.insert(path, data);
    }
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

/// Copies tensors into a frame. The file must have all tensors of the frame, of the same shapes,
/// and no others; `F16`, `BF16` and `F64` become `F32`. Everything that differs is listed, and then
/// the frame is left as it was.
pub fn apply(frame: &mut Frame, loaded: &BTreeMap<String, LoadedTensor>) -> Result<(), DataError> {
    let layout = frame.layout().clone();
    let mut differences = Vec::new();
    let mut converted = Vec::with_capacity(layout.places().len());
    for place in layout.places() {
        match loaded.get(&place.name) {
            None => differences.push(format!("`{}` is missing", place.name)),
            Some(tensor) => match convert(place, tensor) {
                Ok(bytes) => converted.push((place, bytes)),
                Err(difference) => differences.push(difference),
            },
        }
    }
    let extra = loaded.keys().filter(|name| layout.place(name).is_none());
    differences.extend(extra.map(|name| format!("`{name}` is not the model's")));
    if !differences.is_empty() {
        return Err(DataError::Mismatch(differences));
    }
    for (place, bytes) in converted {
        frame.data_mut()[place.bytes.clone()].copy_from_slice(&bytes);
    }
    Ok(())
}

/// The bytes for a place of a frame, or what is wrong with them.
fn convert(place: &TensorPlace, tensor: &LoadedTensor) -> Result<Vec<u8>, String> {
    let name = &place.name;
    if tensor.shape != place.shape {
        return Err(format!("`{name}` has shape {:?}, not {:?}", tensor.shape, place.shape));
    }
    let narrow = |width: usize, number: &dyn Fn(&[u8]) -> f32| -> Vec<u8> {
        tensor.bytes.chunks_exact(width).flat_map(|bytes| number(bytes).to_le_bytes()).collect()
    };
    let bytes = match (tensor.dtype, place.dtype) {
        (from, to) if from == to => tensor.bytes.clone(),
        (Dtype::F16, Dtype::F32) => {
            narrow(2, &|bytes| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32())
        }
        (Dtype::BF16, Dtype::F32) => {
            narrow(2, &|bytes| bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32())
        }
        (Dtype::F64, Dtype::F32) => {
            let array = |bytes: &[u8]| std::array::from_fn(|at| bytes[at]);
            narrow(8, &|bytes| f64::from_le_bytes(array(bytes)) as f32)
        }
        (from, to) => return Err(format!("`{name}` is {from:?}, not {to:?}")),
    };
    if bytes.len() != place.bytes.len() {
        return Err(format!("`{name}` has {} bytes, not {}", bytes.len(), place.bytes.len()));
    }
    let finite = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    if place.dtype == Dtype::F32 && !bytes.chunks_exact(4).all(|bytes| finite(bytes).is_finite()) {
        return Err(format!("`{name}` has numbers that are not finite"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use skep_wire::Layout;

    use super::*;

    fn layout() -> Arc<Layout> {
        let tensors =
            vec![("w".to_owned(), Dtype::F32, vec![2]), ("n".to_owned(), Dtype::I64, vec![])];
        Arc::new(Layout::new(tensors).expect("a good layout"))
    }

    fn tensor(dtype: Dtype, shape: &[usize], bytes: &[u8]) -> LoadedTensor {
        LoadedTensor { dtype, shape: shape.to_vec(), bytes: bytes.to_vec() }
    }

    #[test]
    fn every_float_type_becomes_f32() {
        let count = tensor(Dtype::I64, &[], &7i64.to_le_bytes());
        let half = [f16::from_f32(1.5).to_le_bytes(), f16::from_f32(-2.0).to_le_bytes()].concat();
        let brain =
            [bf16::from_f32(1.5).to_le_bytes(), bf16::from_f32(-2.0).to_le_bytes()].concat();
        let single = [1.5f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat();
        let double = [1.5f64.to_le_bytes(), (-2.0f64).to_le_bytes()].concat();
        for (dtype, bytes) in
            [(Dtype::F16, half), (Dtype::BF16, brain), (Dtype::F32, single), (Dtype::F64, double)]
        {
            let loaded = [("w", tensor(dtype, &[2], &bytes)), ("n", count.clone())]
                .map(|(name, tensor)| (name.to_owned(), tensor));
            let mut frame = Frame::zeros(layout());
            apply(&mut frame, &loaded.into()).expect("fits");
            assert_eq!(frame.floats_of("w").expect("is there"), [1.5, -2.0], "{dtype:?}");
            assert_eq!(frame.tensor("n").expect("is there"), 7i64.to_le_bytes());
        }
    }

    #[test]
    fn all_differences_are_listed_and_nothing_is_copied() {
        let mut frame = Frame::zeros(layout());
        let cases: [(&str, LoadedTensor, &[&str]); 4] = [
            ("x", tensor(Dtype::F32, &[1], &[0; 4]), &["`w` is missing", "`x` is not the model's"]),
            ("w", tensor(Dtype::F32, &[1], &[0; 4]), &["`w` has shape [1], not [2]"]),
            ("w", tensor(Dtype::I32, &[2], &[0; 8]), &["`w` is I32, not F32"]),
            ("w", tensor(Dtype::F64, &[2], &[f64::MAX.to_le_bytes(); 2].concat()), &["not finite"]),
        ];
        for (name, wrong, parts) in cases {
            let count = tensor(Dtype::I64, &[], &7i64.to_le_bytes());
            let loaded = [("n".to_owned(), count), (name.to_owned(), wrong)].into();
            let error = apply(&mut frame, &loaded).expect_err("differs").to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
            assert_eq!(frame.tensor("n").expect("is there"), [0; 8], "nothing was copied");
        }
    }

    #[test]
    fn a_safetensors_file_is_read_and_others_are_refused() {
        let mut frame = Frame::zeros(layout());
        frame.floats_mut().copy_from_slice(&[3.0, 4.0]);
        let loaded = parse("x", frame.as_bytes()).expect("own file");
        let mut again = Frame::zeros(layout());
        apply(&mut again, &loaded).expect("fits");
        assert_eq!(again.as_bytes(), frame.as_bytes());
        for (bytes, part) in [
            (&b""[..], "neither"),
            (b"hello", "neither"),
            (b"\x80\x02}.", "torch.save(model.state_dict()"),
            (b"PK\x03\x04", "zip"),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff{}", "over the limit"),
        ] {
            let error = parse("f.pth", bytes).expect_err(part).to_string();
            assert!(error.contains(part) && error.contains("f.pth"), "{error}");
        }
        assert!(load("/nowhere.pth").expect_err("not there").to_string().contains("/nowhere.pth"));
    }
}
