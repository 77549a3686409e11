//! Model files of others and for others: safetensors, numpy's `.npz`, PyTorch's `.pth` as far as it
//! holds weights, HDF5 as Keras writes it, and Keras' own `.keras`. What a file is shows from its
//! first bytes when it is read, and from its name when it is written.
//!
//! Nothing that is read is executed, and what a file can make of itself is bounded by its length.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::Path;

use half::{bf16, f16};
use skep_wire::{Dtype, Frame, FrameView, Layout, TensorPlace};

use crate::DataError;

mod archive;
mod average;
mod format;
mod hdf5;
mod keras;
pub mod npz;
mod torch;
mod values;

pub use average::Average;
pub use format::ModelFormat;

/// The largest file that is read.
const MAX_FILE_BYTES: u64 = 16 << 30;

/// Tensors may have this many times the bytes of their file: storages can be shared, but a few
/// bytes must not become a memory full of copies.
const MAX_GROWTH: usize = 8;

/// The same where a file may be compressed. Trained weights hardly are; a bomb unpacks to a
/// thousand times.
const MAX_UNPACKED: usize = 64;

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

/// A model file as it was read.
#[derive(Clone, Debug)]
pub struct ModelFile {
    /// Its form.
    pub format: ModelFormat,
    /// Its tensors by name.
    pub tensors: BTreeMap<String, LoadedTensor>,
    /// What it says besides: safetensors' `__metadata__`, the texts of Keras.
    pub metadata: BTreeMap<String, String>,
}

impl ModelFile {
    /// Takes out what is not the model's but its optimiser's, which Keras keeps beside the layers.
    pub fn take_optimiser(&mut self) -> BTreeMap<String, LoadedTensor> {
        match self.format {
            ModelFormat::Hdf5 | ModelFormat::Keras => keras::take_optimiser(&mut self.tensors),
            _ => BTreeMap::new(),
        }
    }
}

/// Reads a model file's tensors.
pub fn load(path: impl AsRef<Path>) -> Result<BTreeMap<String, LoadedTensor>, DataError> {
    let path = path.as_ref();
    parse(&path.to_string_lossy(), &read_bytes(path)?)
}

/// The bytes of a model file, if it is not too large.
pub fn read_bytes(path: &Path) -> Result<Vec<u8>, DataError> {
    let name = path.to_string_lossy();
    let fail = |error| DataError::of_io(&name, error);
    let length = std::fs::metadata(path).map_err(fail)?.len();
    if length > MAX_FILE_BYTES {
        let reason = format!("it has {length} bytes, over the limit of {MAX_FILE_BYTES}");
        return Err(DataError::file(&name, reason));
    }
    std::fs::read(path).map_err(fail)
}

/// Reads a model file's tensors from memory. The name is for error messages.
pub fn parse(name: &str, bytes: &[u8]) -> Result<BTreeMap<String, LoadedTensor>, DataError> {
    read(name, bytes).map(|file| file.tensors)
}

/// Reads a model file from memory. The name is for error messages.
pub fn read(name: &str, bytes: &[u8]) -> Result<ModelFile, DataError> {
    let within = |error: DataError| match error {
        error @ (DataError::Store { .. } | DataError::Mismatch(_)) => error,
        error => DataError::file(name, error.to_string()),
    };
    let format = format_of(bytes).map_err(within)?;
    let plain = |tensors| (tensors, BTreeMap::new());
    let parts = match format {
        Some(ModelFormat::Safetensors) => parse_safetensors(bytes),
        Some(ModelFormat::Npz) => npz::parse(bytes).map(plain),
        Some(ModelFormat::Torch) => torch::parse(bytes).map(plain),
        Some(ModelFormat::Hdf5) => hdf5::parse(bytes),
        Some(ModelFormat::Keras) => keras::parse(bytes),
        None if bytes.first() == Some(&0x80) => Err(DataError::file(
            "pickle",
            "a bare pickle, or a file of a PyTorch before 1.6; load it there and save it again \
             with torch.save(model.state_dict(), path)",
        )),
        None => {
            let reason = format!("no model file that is known; {} are", ModelFormat::KNOWN);
            return Err(DataError::file(name, reason));
        }
    };
    let (tensors, metadata) = parts.map_err(within)?;
    Ok(ModelFile { format: format.unwrap_or(ModelFormat::Safetensors), tensors, metadata })
}

/// What a file is, by its first bytes; of zip files, by what is in them.
fn format_of(bytes: &[u8]) -> Result<Option<ModelFormat>, DataError> {
    if bytes.starts_with(b"PK\x03\x04") {
        let names = archive::names(bytes)?;
        let any = |is: &dyn Fn(&str) -> bool| names.iter().any(|name| is(name));
        return Ok(Some(if any(&|name| name == keras::WEIGHTS) {
            ModelFormat::Keras
        } else if any(&|name| name.ends_with(".npy")) {
            ModelFormat::Npz
        } else {
            ModelFormat::Torch
        }));
    }
    Ok(if bytes.starts_with(hdf5::MAGIC) {
        Some(ModelFormat::Hdf5)
    } else if bytes.get(8) == Some(&b'{') {
        Some(ModelFormat::Safetensors)
    } else {
        None
    })
}

/// The bytes of a model file of a form. `like` is a file of the same form whose structure is kept,
/// with everything in it but the numbers: an HDF5 file without one has datasets alone, and a
/// `.keras` needs one. Metadata is kept by safetensors alone.
pub fn encode(
    format: ModelFormat,
    tensors: &BTreeMap<String, LoadedTensor>,
    metadata: &BTreeMap<String, String>,
    like: Option<&[u8]>,
) -> Result<Vec<u8>, DataError> {
    match (format, like) {
        (ModelFormat::Safetensors, _) => encode_safetensors(tensors, metadata),
        (ModelFormat::Npz, _) => npz::encode(tensors),
        (ModelFormat::Torch, _) => torch::encode(tensors),
        (ModelFormat::Hdf5, None) => hdf5::encode(tensors),
        (ModelFormat::Hdf5, Some(like)) => hdf5::refilled(like, tensors),
        (ModelFormat::Keras, Some(like)) => keras::refilled(like, tensors),
        (ModelFormat::Keras, None) => Err(DataError::file(
            "model.keras",
            "tensors alone are no Keras model; give one of the same layers to fill",
        )),
    }
}

/// Writes a file whole or not at all: under another name first, which then takes the place.
pub fn save(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    let fail = |error| DataError::of_io(&path.to_string_lossy(), error);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut builder = tempfile::Builder::new();
    builder.prefix(".skep-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As any other file: what the user's mask leaves.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let mut file = builder.tempfile_in(folder.unwrap_or(Path::new("."))).map_err(fail)?;
    file.write_all(bytes).map_err(fail)?;
    file.as_file().sync_all().map_err(fail)?;
    file.persist(path).map_err(|error| fail(error.error))?;
    Ok(())
}

type Tensors = BTreeMap<String, LoadedTensor>;

type Parts = (Tensors, BTreeMap<String, String>);

fn parse_safetensors(bytes: &[u8]) -> Result<Parts, DataError> {
    let file =
        FrameView::parse(bytes).map_err(|error| DataError::file("header", error.to_string()))?;
    let tensor = |(name, view): (&str, safetensors::tensor::TensorView<'_>)| {
        let (dtype, shape) = (view.dtype(), view.shape().to_vec());
        (name.to_owned(), LoadedTensor { dtype, shape, bytes: view.data().to_vec() })
    };
    Ok((file.tensors.iter().map(tensor).collect(), file.metadata.into_iter().collect()))
}

fn encode_safetensors(
    tensors: &BTreeMap<String, LoadedTensor>,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, DataError> {
    let refuse = |error: &dyn std::fmt::Display| DataError::file("safetensors", error.to_string());
    let places = tensors.iter();
    let places =
        places.map(|(name, tensor)| (name.clone(), tensor.dtype, tensor.shape.clone())).collect();
    let metadata: HashMap<String, String> = metadata.clone().into_iter().collect();
    let layout = Layout::with_metadata(places, (!metadata.is_empty()).then_some(metadata))
        .map_err(|error| refuse(&error))?;
    let mut bytes = layout.prefix().to_vec();
    for place in layout.places() {
        let tensor =
            tensors.get(&place.name).filter(|tensor| tensor.bytes.len() == place.bytes.len());
        let tensor = tensor.ok_or_else(|| refuse(&format!("`{}` is cut short", place.name)))?;
        bytes.extend_from_slice(&tensor.bytes);
    }
    Ok(bytes)
}

/// Turns the bytes of each element around.
fn swap(bytes: &mut [u8], dtype: Dtype) {
    for element in bytes.chunks_exact_mut((dtype.bitsize() / 8).max(1)) {
        element.reverse();
    }
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
            (&b""[..], "no model file"),
            (b"hello", "no model file"),
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
