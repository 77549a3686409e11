//! The idx format of MNIST and its kin: a magic number with type and rank, big-endian sizes, then
//! the elements, big-endian. Files may be compressed with gzip; that is seen from their first
//! bytes, not their names.
//!
//! A file's header says how long it is before anything is taken for the data, and no more than
//! that is ever unpacked.

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use skep_wire::Dtype;

use crate::DataError;

/// The most dimensions a file may have.
const MAX_RANK: usize = 8;

/// The most bytes of elements a file may have.
const MAX_BYTES: u64 = 8 << 30;

/// The contents of an idx file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdxArray {
    /// The element type: `U8`, `I8`, `I16`, `I32`, `F32` or `F64`.
    pub dtype: Dtype,
    /// The sizes, the first of which counts the items.
    pub shape: Vec<usize>,
    /// The elements, little-endian.
    pub bytes: Vec<u8>,
}

/// Reads an idx file, compressed or not.
pub fn read(path: &Path) -> Result<IdxArray, DataError> {
    let name = path.to_string_lossy();
    let file = std::fs::File::open(path).map_err(|error| DataError::of_io(&name, error))?;
    decode(&name, BufReader::new(file))
}

/// Reads an idx file from anywhere. The name is for error messages.
pub fn decode(name: &str, mut reader: impl BufRead) -> Result<IdxArray, DataError> {
    let start = reader.fill_buf().map_err(|error| DataError::of_io(name, error))?;
    if start.starts_with(&[0x1f, 0x8b]) {
        decode_plain(name, MultiGzDecoder::new(reader))
    } else {
        decode_plain(name, reader)
    }
}

fn decode_plain(name: &str, mut reader: impl Read) -> Result<IdxArray, DataError> {
    let refuse = |reason: String| DataError::file(name, reason);
    let fail = |error: std::io::Error| match error.kind() {
        ErrorKind::UnexpectedEof => refuse("the file ends too early".to_owned()),
        ErrorKind::InvalidInput | ErrorKind::InvalidData => {
            refuse(format!("not a sound gzip file: {error}"))
        }
        _ => DataError::of_io(name, error),
    };
    let mut magic = [0; 4];
    reader.read_exact(&mut magic).map_err(fail)?;
    let [0, 0, code, rank] = magic else {
        return Err(refuse("not an idx file: it does not start with two zero bytes".to_owned()));
    };
    let dtype = dtype_of(code)
        .ok_or_else(|| refuse(format!("not an idx file: 0x{code:02x} is no element type")))?;
    let rank = usize::from(rank);
    if rank == 0 || rank > MAX_RANK {
        return Err(refuse(format!("it has {rank} dimensions; 1 to {MAX_RANK} are read")));
    }
    let mut shape = Vec::with_capacity(rank);
    let mut expected = dtype.bitsize() as u64 / 8;
    for _ in 0..rank {
        let mut side = [0; 4];
        reader.read_exact(&mut side).map_err(fail)?;
        let side = u32::from_be_bytes(side);
        shape.push(side as usize);
        expected = expected
            .checked_mul(u64::from(side))
            .filter(|&bytes| bytes <= MAX_BYTES)
            .ok_or_else(|| refuse(format!("its header promises more than {MAX_BYTES} bytes")))?;
    }
    // Memory grows with what is really there, never with what is promised.
    let mut bytes = Vec::with_capacity(expected.min(1 << 20) as usize);
    reader.by_ref().take(expected).read_to_end(&mut bytes).map_err(fail)?;
    if (bytes.len() as u64) < expected {
        return Err(refuse(format!(
            "{expected} bytes were expected behind the header, {} found: the file is cut short",
            bytes.len()
        )));
    }
    if reader.read(&mut [0]).map_err(fail)? != 0 {
        return Err(refuse(format!(
            "{expected} bytes were expected behind the header, more found: not the right file?"
        )));
    }
    swap(dtype, &mut bytes);
    Ok(IdxArray { dtype, shape, bytes })
}

/// Writes the format, uncompressed. Types and shapes that it cannot hold are refused.
pub fn encode(array: &IdxArray) -> Result<Vec<u8>, DataError> {
    let refuse = |reason: &str| DataError::file("idx", reason);
    let code = (0..=u8::MAX)
        .find(|&code| dtype_of(code) == Some(array.dtype))
        .ok_or_else(|| refuse("idx has no such element type"))?;
    if array.shape.is_empty() || array.shape.len() > MAX_RANK {
        return Err(refuse("idx files have 1 to 8 dimensions"));
    }
    let elements = array.shape.iter().try_fold(1usize, |product, &side| product.checked_mul(side));
    let bytes = elements.and_then(|elements| elements.checked_mul(array.dtype.bitsize() / 8));
    if bytes != Some(array.bytes.len()) {
        return Err(refuse("the shape does not fit the number of bytes"));
    }
    let mut file = vec![0, 0, code, array.shape.len() as u8];
    for &side in &array.shape {
        let side = u32::try_from(side).map_err(|_| refuse("idx sizes have 32 bits"))?;
        file.extend_from_slice(&side.to_be_bytes());
    }
    let start = file.len();
    file.extend_from_slice(&array.bytes);
    swap(array.dtype, &mut file[start..]);
    Ok(file)
}

fn dtype_of(code: u8) -> Option<Dtype> {
    Some(match code {
        0x08 => Dtype::U8,
        0x09 => Dtype::I8,
        0x0b => Dtype::I16,
        0x0c => Dtype::I32,
        0x0d => Dtype::F32,
        0x0e => Dtype::F64,
        _ => return None,
    })
}

/// Big-endian to little-endian and back.
fn swap(dtype: Dtype, bytes: &mut [u8]) {
    let width = dtype.bitsize() / 8;
    if width > 1 {
        bytes.chunks_exact_mut(width).for_each(<[u8]>::reverse);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;

    use super::*;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(bytes).expect("memory");
        encoder.finish().expect("memory")
    }

    #[test]
    fn numbers_are_turned_round() {
        let file = [0, 0, 0x0c, 1, 0, 0, 0, 2, 0, 0, 1, 2, 0xff, 0xff, 0xff, 0xfe];
        let array = decode("x", &file[..]).expect("a good file");
        assert_eq!(array.shape, [2]);
        assert_eq!(array.bytes, [258i32.to_le_bytes(), (-2i32).to_le_bytes()].concat());
        assert_eq!(decode("x", &gzip(&file)[..]).expect("compressed"), array);
    }

    #[test]
    fn files_of_the_wrong_length_are_refused_with_both_numbers() {
        let file = [0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6];
        for packed in [false, true] {
            let pack = |bytes: &[u8]| if packed { gzip(bytes) } else { bytes.to_vec() };
            assert!(decode("f", &pack(&file)[..]).is_ok());
            let error = decode("f", &pack(&file[..16])[..]).expect_err("short").to_string();
            assert!(error.contains("`f`: 6 bytes were expected") && error.contains("4 found"));
            let long = [&file[..], &[7]].concat();
            let error = decode("f", &pack(&long)[..]).expect_err("long").to_string();
            assert!(error.contains("6 bytes were expected") && error.contains("more found"));
            for end in 0..12 {
                let error = decode("f", &pack(&file[..end])[..]).expect_err("short").to_string();
                assert!(error.contains("ends too early"), "{error}");
            }
        }
        let cut = gzip(&file);
        assert!(decode("f", &cut[..cut.len() - 5]).is_err(), "cut in the middle of the gzip");
        let mut trailing = gzip(&file);
        trailing.push(0x55);
        assert!(decode("f", &trailing[..]).is_err(), "something behind the gzip");
    }

    #[test]
    fn a_bomb_takes_no_more_than_its_header_promises() {
        let mut bomb = vec![0, 0, 8, 1, 0, 0, 0, 4];
        bomb.resize(64 << 20, 0);
        let packed = gzip(&bomb);
        let error = decode("bomb", &packed[..]).expect_err("too long").to_string();
        assert!(error.contains("more found"), "{error}");
        // Four dimensions of 2^32 - 1 overflow; one of them alone is merely not there.
        let mut huge = vec![0, 0, 8, 4];
        huge.resize(20, 0xff);
        assert!(decode("huge", &huge[..]).expect_err("huge").to_string().contains("promises"));
        let promise = [0, 0, 8, 1, 0xff, 0xff, 0xff, 0xff, 1];
        assert!(decode("p", &promise[..]).expect_err("short").to_string().contains("1 found"));
    }

    #[test]
    fn other_files_are_refused() {
        for bad in [&[1, 0, 8, 1][..], &[0, 0, 7, 1], &[0, 0, 8, 0], &[0, 0, 8, 9], b"PK\x03\x04"] {
            assert!(decode("x", bad).is_err(), "{bad:?}");
        }
        let error = read(Path::new("/nowhere/x-ubyte")).expect_err("not there").to_string();
        assert!(error.contains("/nowhere/x-ubyte"), "{error}");
    }

    proptest! {
        #[test]
        fn an_array_survives_its_file(
            code in prop::sample::select(vec![8u8, 9, 11, 12, 13, 14]),
            shape in prop::collection::vec(0usize..5, 1..5),
            packed: bool,
        ) {
            let dtype = dtype_of(code).expect("a type");
            let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            let bytes = (0..length).map(|at| (at * 7) as u8).collect();
            let array = IdxArray { dtype, shape, bytes };
            let mut file = encode(&array).expect("encodes");
            if packed {
                file = gzip(&file);
            }
            prop_assert_eq!(decode("x", &file[..]).expect("own file"), array);
        }

        #[test]
        fn arbitrary_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..200), like: bool) {
            if like && bytes.len() > 3 {
                let rank = bytes[3] % 9;
                bytes[..4].copy_from_slice(&[0, 0, 8, rank]);
            }
            let _ = decode("x", &bytes[..]);
            let _ = decode("x", &gzip(&bytes)[..]);
        }
    }
}
