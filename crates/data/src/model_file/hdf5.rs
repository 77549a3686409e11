//! HDF5 as h5py and Keras write it. A tensor's name is the path of its dataset.
//!
//! The parser is `hdf5-pure`'s. What a file may make of itself is bounded here: groups can contain
//! each other, shapes can promise anything, and compressed chunks unpack to more than they are.

use std::collections::{BTreeMap, HashMap};

use hdf5_pure::{
    AttrValue, Dataset, Datatype, DatatypeByteOrder, EnumTypeBuilder, File, FileBuilder,
    FloatingPointLayout, Group, GroupBuilder, Layout,
};
use skep_wire::Dtype;

use super::{MAX_UNPACKED, Parts, SMALL};
use crate::{DataError, LoadedTensor};

/// The first bytes of a file.
pub(super) const MAGIC: &[u8] = b"\x89HDF\r\n\x1a\n";

/// The most groups and datasets of a file.
const MOST_OBJECTS: usize = 100_000;

/// How deep groups may lie in each other.
const MOST_DEPTH: usize = 32;

/// How h5py says that numbers of 16 bits are what they are not.
const BRAIN_FLOAT: &str = "bfloat16";

fn broken(error: impl std::fmt::Display) -> DataError {
    DataError::file("HDF5", error.to_string())
}

/// Reads the datasets, and the texts among the root's attributes: `model_config` and the like.
pub(super) fn parse(bytes: &[u8]) -> Result<Parts, DataError> {
    let file = File::from_bytes(bytes.to_vec()).map_err(broken)?;
    let mut left = bytes.len().saturating_mul(MAX_UNPACKED).saturating_add(SMALL);
    let mut tensors = BTreeMap::new();
    for (name, dataset) in datasets(&file)? {
        let place = Place::of(&name, &dataset)?;
        left = left.checked_sub(place.bytes.saturating_add(name.len())).ok_or_else(|| {
            DataError::file(&name, "with it, the datasets have more bytes than such a file can")
        })?;
        let mut bytes = dataset.read_raw().map_err(|error| within(&name, error))?;
        if bytes.len() != place.bytes {
            return Err(DataError::file(&name, "it has not as many bytes as its shape says"));
        }
        if place.swapped {
            super::swap(&mut bytes, place.dtype);
        }
        tensors.insert(name, LoadedTensor { dtype: place.dtype, shape: place.shape, bytes });
    }
    let text = |(name, value): (String, AttrValue)| Some((name, value.as_str()?.to_owned()));
    // They are for people; one that cannot be read is no reason to refuse the numbers.
    let attributes = file.root().attrs().unwrap_or_default();
    Ok((tensors, attributes.into_iter().filter_map(text).collect()))
}

fn within(name: &str, error: impl std::fmt::Display) -> DataError {
    DataError::file(name, error.to_string())
}

/// All datasets with their paths, in the order of those.
fn datasets(file: &File) -> Result<BTreeMap<String, Dataset>, DataError> {
    let mut found = BTreeMap::new();
    let mut open: Vec<(String, Group, usize)> = vec![(String::new(), file.root(), 0)];
    let mut objects = 0usize;
    while let Some((path, group, depth)) = open.pop() {
        let inner = group.groups().map_err(broken)?;
        let names = group.datasets().map_err(broken)?;
        objects += inner.len() + names.len();
        if objects > MOST_OBJECTS || (depth >= MOST_DEPTH && !inner.is_empty()) {
            let start: String = path.chars().take(40).collect();
            return Err(DataError::file(&start, "its groups contain too much, or each other"));
        }
        for name in names {
            let dataset = group.dataset(&name).map_err(broken)?;
            found.insert(format!("{path}{name}"), dataset);
        }
        for name in inner {
            let below = group.group(&name).map_err(broken)?;
            open.push((format!("{path}{name}/"), below, depth + 1));
        }
    }
    Ok(found)
}

/// What a dataset holds.
struct Place {
    dtype: Dtype,
    shape: Vec<usize>,
    /// How many bytes that is.
    bytes: usize,
    /// Whether its numbers are big-endian.
    swapped: bool,
}

impl Place {
    fn of(name: &str, dataset: &Dataset) -> Result<Self, DataError> {
        let refuse = |reason: String| DataError::file(name, reason);
        let kind = dataset.datatype().map_err(|error| within(name, error))?;
        let attributes = || dataset.attrs().unwrap_or_default();
        let (dtype, order) = element(&kind, attributes).ok_or_else(|| {
            let what =
                dataset.dtype().map_or_else(|_| "elements".to_owned(), |kind| kind.to_string());
            refuse(format!("it holds {what}, which have no place in a model"))
        })?;
        let shape = dataset.shape().map_err(|error| within(name, error))?;
        let shape: Option<Vec<usize>> =
            shape.into_iter().map(|side| usize::try_from(side).ok()).collect();
        let bytes = shape.as_ref().and_then(|shape| {
            shape.iter().try_fold(dtype.bitsize() / 8, |size, &side| size.checked_mul(side))
        });
        let (Some(shape), Some(bytes)) = (shape, bytes) else {
            return Err(refuse("its shape promises too much".to_owned()));
        };
        Ok(Self { dtype, shape, bytes, swapped: order == DatatypeByteOrder::BigEndian })
    }
}

/// The element type and the order of its bytes, where models have such elements.
fn element(
    kind: &Datatype,
    attributes: impl FnOnce() -> HashMap<String, AttrValue>,
) -> Option<(Dtype, DatatypeByteOrder)> {
    let (dtype, order) = match kind {
        Datatype::FloatingPoint { size, byte_order, layout } => {
            let dtype = match size {
                8 if *layout == FloatingPointLayout::IEEE754_BINARY64 => Dtype::F64,
                4 if *layout == FloatingPointLayout::IEEE754_BINARY32 => Dtype::F32,
                2 if *layout == HALF => Dtype::F16,
                _ => return None,
            };
            (dtype, *byte_order)
        }
        Datatype::FixedPoint { size, byte_order, layout } => {
            if layout.bit_offset != 0 || size.checked_mul(8) != Some(layout.bit_precision.into()) {
                return None;
            }
            let dtype = match (size, layout.signed) {
                (1, true) => Dtype::I8,
                (1, false) => Dtype::U8,
                (2, true) => Dtype::I16,
                (2, false) => {
                    let named = attributes();
                    let named = named.get("dtype").and_then(AttrValue::as_str);
                    if named == Some(BRAIN_FLOAT) { Dtype::BF16 } else { Dtype::U16 }
                }
                (4, true) => Dtype::I32,
                (4, false) => Dtype::U32,
                (8, true) => Dtype::I64,
                (8, false) => Dtype::U64,
                _ => return None,
            };
            (dtype, *byte_order)
        }
        // h5py's truth values.
        Datatype::Enumeration { size: 1, members, .. } => {
            let known = |name: &str| members.iter().any(|member| member.name == name);
            if !(members.len() == 2 && known("FALSE") && known("TRUE")) {
                return None;
            }
            (Dtype::BOOL, DatatypeByteOrder::LittleEndian)
        }
        _ => return None,
    };
    (order != DatatypeByteOrder::Vax).then_some((dtype, order))
}

const HALF: FloatingPointLayout = FloatingPointLayout {
    bit_offset: 0,
    bit_precision: 16,
    exponent_location: 10,
    exponent_size: 5,
    mantissa_location: 0,
    mantissa_size: 10,
    exponent_bias: 15,
};

/// A copy of a file with other numbers in its datasets: groups, attributes and everything else stay
/// to the byte, so that what opened the one opens the other.
pub(super) fn refilled(
    like: &[u8],
    tensors: &BTreeMap<String, LoadedTensor>,
) -> Result<Vec<u8>, DataError> {
    let file = File::from_bytes(like.to_vec()).map_err(broken)?;
    let mut bytes = like.to_vec();
    let mut differences = Vec::new();
    let datasets = datasets(&file)?;
    for (name, dataset) in &datasets {
        let place = Place::of(name, dataset)?;
        let Some(tensor) = tensors.get(name) else {
            differences.push(format!("`{name}` is missing"));
            continue;
        };
        if tensor.dtype != place.dtype || tensor.shape != place.shape {
            differences.push(format!(
                "`{name}` is {:?} {:?}, not {:?} {:?}",
                tensor.dtype, tensor.shape, place.dtype, place.shape
            ));
            continue;
        }
        if place.bytes == 0 {
            continue;
        }
        let layout = dataset.layout().map_err(|error| within(name, error))?;
        let Layout::Contiguous { address: Some(start), .. } = layout else {
            return Err(DataError::file(
                name,
                "it lies in chunks, which cannot be filled anew; save the file without compression, \
                 or give another format",
            ));
        };
        let into = usize::try_from(start)
            .ok()
            .and_then(|start| bytes.get_mut(start..)?.get_mut(..place.bytes))
            .ok_or_else(|| DataError::file(name, "it leaves the file, which is cut short"))?;
        into.copy_from_slice(&tensor.bytes);
        if place.swapped {
            super::swap(into, place.dtype);
        }
    }
    let extra = tensors.keys().filter(|name| !datasets.contains_key(*name));
    differences.extend(extra.map(|name| format!("`{name}` is not there")));
    if !differences.is_empty() {
        return Err(DataError::Mismatch(differences));
    }
    if parse(&bytes)?.0 != *tensors {
        return Err(broken("its datasets overlap"));
    }
    Ok(bytes)
}

/// A file of nothing but datasets.
pub(super) fn encode(tensors: &BTreeMap<String, LoadedTensor>) -> Result<Vec<u8>, DataError> {
    let mut root = Folder::default();
    for (name, tensor) in tensors {
        let mut steps: Vec<&str> = name.split('/').collect();
        let last = steps.pop().unwrap_or_default();
        let folder = steps.iter().try_fold(&mut root, |folder, step| {
            let taken = folder.tensors.contains_key(*step);
            (!taken).then(|| folder.folders.entry((*step).to_owned()).or_default())
        });
        let folder = folder.filter(|folder| !folder.folders.contains_key(last));
        let bad = name.split('/').any(|step| matches!(step, "" | "."));
        let Some(folder) = folder.filter(|_| !bad) else {
            return Err(DataError::file(name, "no dataset of an HDF5 file can have that name"));
        };
        folder.tensors.insert(last.to_owned(), tensor);
    }
    let mut file = FileBuilder::new();
    for (name, tensor) in &root.tensors {
        fill(file.create_dataset(name), name, tensor)?;
    }
    for (name, folder) in &root.folders {
        let group = folder.write(file.create_group(name))?;
        file.add_group(group.finish());
    }
    file.finish().map_err(broken)
}

/// A group in the making.
#[derive(Default)]
struct Folder<'tensors> {
    tensors: BTreeMap<String, &'tensors LoadedTensor>,
    folders: BTreeMap<String, Folder<'tensors>>,
}

impl Folder<'_> {
    fn write(&self, mut group: GroupBuilder) -> Result<GroupBuilder, DataError> {
        for (name, tensor) in &self.tensors {
            fill(group.create_dataset(name), name, tensor)?;
        }
        for (name, folder) in &self.folders {
            let below = folder.write(group.create_group(name))?;
            group.add_group(below.finish());
        }
        Ok(group)
    }
}

fn fill(
    dataset: &mut hdf5_pure::DatasetBuilder,
    name: &str,
    tensor: &LoadedTensor,
) -> Result<(), DataError> {
    let kind = match tensor.dtype {
        Dtype::F64 => hdf5_pure::make_f64_type(),
        Dtype::F32 => hdf5_pure::make_f32_type(),
        Dtype::F16 => Datatype::FloatingPoint {
            size: 2,
            byte_order: DatatypeByteOrder::LittleEndian,
            layout: HALF,
        },
        Dtype::I64 => hdf5_pure::make_i64_type(),
        Dtype::I32 => hdf5_pure::make_i32_type(),
        Dtype::I16 => hdf5_pure::make_i16_type(),
        Dtype::I8 => hdf5_pure::make_i8_type(),
        Dtype::U64 => hdf5_pure::make_u64_type(),
        Dtype::U32 => hdf5_pure::make_u32_type(),
        Dtype::U16 | Dtype::BF16 => hdf5_pure::make_u16_type(),
        Dtype::U8 => hdf5_pure::make_u8_type(),
        Dtype::BOOL => EnumTypeBuilder::with_base(hdf5_pure::make_i8_type())
            .value("FALSE", 0)
            .value("TRUE", 1)
            .build()
            .map_err(|error| within(name, error))?,
        other => return Err(DataError::file(name, format!("HDF5 has no {other:?}"))),
    };
    let count = tensor.bytes.len() * 8 / tensor.dtype.bitsize();
    let shape: Vec<u64> = tensor.shape.iter().map(|&side| side as u64).collect();
    dataset.with_raw_data(kind, tensor.bytes.clone(), count as u64).with_shape(&shape);
    if tensor.dtype == Dtype::BF16 {
        dataset.set_attr("dtype", AttrValue::String(BRAIN_FLOAT.to_owned()));
    }
    Ok(())
}
