//! numpy's `.npy` files: a header that names element type and shape, then the elements. The numbers
//! stay as they lie; only the order that our tables have, little-endian and row by row, is read.

use skep_wire::Dtype;

/// What a header says, and what is behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header<'bytes> {
    /// The element type in numpy's words, `<f4`.
    pub(crate) kind: &'bytes str,
    pub(crate) shape: Vec<usize>,
    /// Fortran's order.
    pub(crate) by_column: bool,
    pub(crate) body: &'bytes [u8],
}

/// Reads a header; what is wrong with it otherwise.
pub(crate) fn header(bytes: &[u8]) -> Result<Header<'_>, &'static str> {
    let (header, body) = split(bytes).ok_or("not a .npy file")?;
    let kind = quoted(header, "'descr':").ok_or("its header names no element type")?;
    let shape = shape(header).ok_or("its header has no shape")?;
    let by_column = header.contains("'fortran_order': True");
    Ok(Header { kind, shape, by_column, body })
}

/// The header's text, and what is behind it.
fn split(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let rest = bytes.strip_prefix(b"\x93NUMPY")?;
    let (&[major, _], rest) = rest.split_first_chunk::<2>()?;
    let (length, rest) = if major == 1 {
        let (length, rest) = rest.split_first_chunk::<2>()?;
        (usize::from(u16::from_le_bytes(*length)), rest)
    } else {
        let (length, rest) = rest.split_first_chunk::<4>()?;
        (u32::from_le_bytes(*length) as usize, rest)
    };
    let (header, body) = rest.split_at_checked(length)?;
    Some((std::str::from_utf8(header).ok()?, body))
}

/// The quoted text behind a key of the header.
fn quoted<'header>(header: &'header str, key: &str) -> Option<&'header str> {
    let rest = header.split_once(key)?.1.trim_start().strip_prefix('\'')?;
    Some(rest.split_once('\'')?.0)
}

fn shape(header: &str) -> Option<Vec<usize>> {
    let rest = header.split_once("'shape':")?.1.trim_start().strip_prefix('(')?;
    let sides = rest.split_once(')')?.0.split(',').map(str::trim);
    sides.filter(|side| !side.is_empty()).map(|side| side.parse().ok()).collect()
}

/// Element types that numpy has too, in its words.
pub(crate) const KINDS: [(Dtype, &str); 12] = [
    (Dtype::BOOL, "|b1"),
    (Dtype::U8, "|u1"),
    (Dtype::I8, "|i1"),
    (Dtype::U16, "<u2"),
    (Dtype::I16, "<i2"),
    (Dtype::U32, "<u4"),
    (Dtype::I32, "<i4"),
    (Dtype::U64, "<u8"),
    (Dtype::I64, "<i8"),
    (Dtype::F16, "<f2"),
    (Dtype::F32, "<f4"),
    (Dtype::F64, "<f8"),
];

/// The file up to its elements; `None` for types that numpy does not have.
pub(crate) fn prefix(dtype: Dtype, shape: &[usize]) -> Option<Vec<u8>> {
    let (_, kind) = KINDS.iter().find(|(known, _)| *known == dtype)?;
    let sides: Vec<String> = shape.iter().map(|side| format!("{side},")).collect();
    let shape = sides.join(" ");
    let mut header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({shape}), }}");
    // The elements start at a multiple of 64, as numpy has it.
    while !(10 + header.len() + 1).is_multiple_of(64) {
        header.push(' ');
    }
    header.push('\n');
    let length = u16::try_from(header.len()).ok()?.to_le_bytes();
    Some([b"\x93NUMPY\x01\x00", &length[..], header.as_bytes()].concat())
}

/// The element type, shape and elements of a file; what is wrong with it otherwise.
pub(crate) fn array(bytes: &[u8]) -> Result<(Dtype, Vec<usize>, &[u8]), String> {
    let Header { kind, shape, by_column, body } = header(bytes)?;
    let known = KINDS.iter().find(|(_, name)| name[1..] == *kind.get(1..).unwrap_or_default());
    let Some(&(dtype, name)) = known else {
        let kind: String = kind.chars().take(40).collect();
        return Err(format!("elements of type `{kind}` are not read"));
    };
    if by_column || (kind.starts_with('>') && name.starts_with('<')) {
        return Err("big-endian or column-major arrays are not read".to_owned());
    }
    let wanted = shape.iter().try_fold(dtype.bitsize() / 8, |size, &side| size.checked_mul(side));
    if wanted != Some(body.len()) {
        return Err(format!("{} bytes where the header says {kind} {shape:?}", body.len()));
    }
    Ok((dtype, shape, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_survives_its_file() {
        for (dtype, _) in KINDS {
            let elements: Vec<u8> = (0..6 * dtype.bitsize() / 8).map(|at| at as u8).collect();
            let file = [prefix(dtype, &[2, 3]).expect("numpy has it"), elements.clone()].concat();
            assert_eq!(array(&file), Ok((dtype, vec![2, 3], &elements[..])));
            assert!(array(&file[..file.len() - 1]).expect_err("cut short").contains("[2, 3]"));
        }
        assert!(prefix(Dtype::BF16, &[1]).is_none(), "numpy has no such type");
        let mut file = prefix(Dtype::F32, &[usize::MAX, 9]).expect("numpy has it");
        assert!(array(&file).is_err(), "its size overflows");
        file.truncate(20);
        assert_eq!(array(&file), Err("not a .npy file".to_owned()));
    }
}
