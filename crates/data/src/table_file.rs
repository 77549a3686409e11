//! A table as a file that other programs open too: numpy's `.npz`, safetensors, or a `.tar.gz` of
//! `.npy` files with a description of them. The same table always gives the same bytes, and a file
//! unpacks to no more than its reader allows.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Cursor, ErrorKind, Read, Write};

use flate2::Compression;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};
use skep_wire::Dtype;
use zip::write::SimpleFileOptions;
use zip::{ZipArchive, ZipWriter};

use crate::{Column, DataError, Table, npy};

/// The form of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TableForm {
    /// A `.npy` file per column, in a zip: `numpy.load` opens it.
    #[default]
    Npz,
    /// A tensor per column.
    Safetensors,
    /// A `.npy` file per column and `table.json`, in a compressed archive.
    TarGz,
}

/// Every form.
const FORMS: [TableForm; 3] = [TableForm::Npz, TableForm::Safetensors, TableForm::TarGz];

/// What a column is: everything but its numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnKind {
    /// Its name.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// The shape of one row.
    pub shape: Vec<usize>,
}

impl ColumnKind {
    /// Of all columns of a table, in the order of their names.
    pub fn of(table: &Table) -> Vec<Self> {
        let kind = |column: &Column| Self {
            name: column.name.clone(),
            dtype: column.dtype,
            shape: column.shape.clone(),
        };
        table.columns().iter().map(kind).collect()
    }
}

impl fmt::Display for ColumnKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {:?} {:?}", self.name, self.dtype, self.shape)
    }
}

/// `table.json`: what is in an archive besides it.
#[derive(Debug, Serialize, Deserialize)]
struct Descriptor {
    format: u64,
    rows: usize,
    /// The column `image` is in `image.npy`.
    columns: Vec<ColumnKind>,
}

const DESCRIPTOR: &str = "table.json";

/// The newest form of the description that is known here.
const DESCRIPTOR_FORMAT: u64 = 1;

/// More files than a table has columns.
const MOST_FILES: usize = 1000;

impl TableForm {
    /// How its files' names end, without the dot.
    pub fn ending(self) -> &'static str {
        match self {
            Self::Npz => "npz",
            Self::Safetensors => "safetensors",
            Self::TarGz => "tar.gz",
        }
    }

    /// The form of a file by how its name ends.
    pub fn of_name(name: &str) -> Option<Self> {
        FORMS
            .into_iter()
            .find(|form| name.strip_suffix(form.ending()).is_some_and(|stem| stem.ends_with('.')))
    }

    /// Writes a table. Only element types that the form has can be written.
    pub fn encode(self, table: &Table) -> Result<Vec<u8>, DataError> {
        match self {
            Self::Safetensors => Ok(table.to_shard()),
            Self::Npz => {
                let fail = |error: &dyn fmt::Display| DataError::Table(format!("npz: {error}"));
                let mut file = ZipWriter::new(Cursor::new(Vec::new()));
                // Neither time nor machine may show: the same table is the same file.
                let options = SimpleFileOptions::default()
                    .last_modified_time(zip::DateTime::default())
                    .large_file(true)
                    .unix_permissions(0o644);
                for column in table.columns() {
                    file.start_file(entry_name(column)?, options).map_err(|error| fail(&error))?;
                    for part in [&npy_prefix(column, table.rows())?, &column.bytes] {
                        file.write_all(part).map_err(|error| fail(&error))?;
                    }
                }
                Ok(file.finish().map_err(|error| fail(&error))?.into_inner())
            }
            Self::TarGz => {
                let fail = |error: std::io::Error| DataError::Table(format!("tar.gz: {error}"));
                let packed = GzEncoder::new(Vec::new(), Compression::default());
                let mut archive = tar::Builder::new(packed);
                let mut add = |name: &str, parts: [&[u8]; 2]| {
                    let mut header = tar::Header::new_ustar();
                    header.set_size((parts[0].len() + parts[1].len()) as u64);
                    header.set_mode(0o644);
                    header.set_cksum();
                    archive.append_data(&mut header, name, parts[0].chain(parts[1]))
                };
                let columns = ColumnKind::of(table);
                let descriptor =
                    Descriptor { format: DESCRIPTOR_FORMAT, rows: table.rows(), columns };
                let text = serde_json::to_vec_pretty(&descriptor).expect("texts and numbers");
                add(DESCRIPTOR, [&text, &[]]).map_err(fail)?;
                for column in table.columns() {
                    let prefix = npy_prefix(column, table.rows())?;
                    add(&entry_name(column)?, [&prefix, &column.bytes]).map_err(fail)?;
                }
                archive.into_inner().and_then(GzEncoder::finish).map_err(fail)
            }
        }
    }

    /// Reads a file, the name of which is for messages. Of its elements no more than `most` bytes
    /// are unpacked.
    pub fn decode(self, name: &str, bytes: &[u8], most: u64) -> Result<Table, DataError> {
        let refuse = |reason: String| DataError::file(name, reason);
        let entries = match self {
            Self::Safetensors if bytes.len() as u64 > most.saturating_add(1 << 20) => {
                return Err(refuse(too_large(most)));
            }
            Self::Safetensors => {
                return Table::from_shard(bytes).map_err(|error| refuse(error.to_string()));
            }
            Self::Npz => unzip(bytes, most).map_err(refuse)?,
            Self::TarGz => untar(bytes, most).map_err(refuse)?,
        };
        let mut columns = Vec::with_capacity(entries.len());
        for (entry, bytes) in &entries {
            let Some(column) = entry.strip_suffix(".npy") else { continue };
            let (dtype, shape, body) =
                npy::array(bytes).map_err(|reason| refuse(format!("`{entry}`: {reason}")))?;
            let Some((_, shape)) = shape.split_first() else {
                return Err(refuse(format!("`{entry}` has no rows dimension")));
            };
            let (name, shape, bytes) = (column.to_owned(), shape.to_vec(), body.to_vec());
            columns.push(Column { name, dtype, shape, bytes });
        }
        let table = Table::new(columns).map_err(|error| refuse(error.to_string()))?;
        if let Some(text) = entries.get(DESCRIPTOR) {
            let said: Descriptor = serde_json::from_slice(text)
                .map_err(|error| refuse(format!("`{DESCRIPTOR}`: {error}")))?;
            if said.format > DESCRIPTOR_FORMAT {
                let path = format!("{name}: {DESCRIPTOR}");
                let (found, known) = (said.format, DESCRIPTOR_FORMAT);
                return Err(DataError::Format { path, found, known });
            }
            if said.rows != table.rows() || said.columns != ColumnKind::of(&table) {
                return Err(refuse(format!("its arrays are not those of its `{DESCRIPTOR}`")));
            }
        }
        Ok(table)
    }
}

fn too_large(most: u64) -> String {
    format!("it unpacks to more than the {most} bytes that are expected")
}

fn entry_name(column: &Column) -> Result<String, DataError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if !column.name.chars().all(plain) || column.name.starts_with('.') || column.name.len() > 90 {
        return Err(DataError::Table(format!(
            "column `{}` cannot be the name of a file; use the form safetensors",
            column.name
        )));
    }
    Ok(format!("{}.npy", column.name))
}

fn npy_prefix(column: &Column, rows: usize) -> Result<Vec<u8>, DataError> {
    let shape: Vec<usize> = std::iter::once(rows).chain(column.shape.iter().copied()).collect();
    npy::prefix(column.dtype, &shape).ok_or_else(|| {
        DataError::Table(format!(
            "column `{}` is {:?}, which numpy does not have; use the form safetensors",
            column.name, column.dtype
        ))
    })
}

/// Files by name. A header has less than a kibibyte; what goes beyond that and `most` is refused
/// while it is unpacked.
type Entries = BTreeMap<String, Vec<u8>>;

struct Room {
    left: u64,
    most: u64,
}

impl Room {
    fn new(most: u64) -> Self {
        Self { left: most.saturating_add(64 << 10), most }
    }

    fn read(&mut self, reader: impl Read) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        let read = reader.take(self.left + 1).read_to_end(&mut bytes);
        read.map_err(|error| broken(&error))?;
        self.left =
            self.left.checked_sub(bytes.len() as u64).ok_or_else(|| too_large(self.most))?;
        Ok(bytes)
    }
}

fn broken(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof => "the file is cut short".to_owned(),
        _ => format!("not a sound file: {error}"),
    }
}

fn unzip(bytes: &[u8], most: u64) -> Result<Entries, String> {
    let mut archive = ZipArchive::new(Cursor::new(bytes))
        .map_err(|error| format!("not a sound .npz, or cut short: {error}"))?;
    if archive.len() > MOST_FILES {
        return Err(format!("it has {} files; at most {MOST_FILES} are read", archive.len()));
    }
    let mut room = Room::new(most);
    let mut entries = Entries::new();
    for at in 0..archive.len() {
        let entry = archive.by_index(at).map_err(|error| format!("file {at} in it: {error}"))?;
        let name = entry.name().to_owned();
        entries.insert(name, room.read(entry)?);
    }
    Ok(entries)
}

fn untar(bytes: &[u8], most: u64) -> Result<Entries, String> {
    // What is passed over counts too: headers and padding, at most two blocks a file.
    let unpacked = MultiGzDecoder::new(bytes).take(most.saturating_add(2 << 20));
    let mut archive = tar::Archive::new(unpacked);
    let mut room = Room::new(most);
    let mut entries = Entries::new();
    for entry in archive.entries().map_err(|error| broken(&error))? {
        let entry = entry.map_err(|error| broken(&error))?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        if entries.len() == MOST_FILES {
            return Err(format!("it has more than {MOST_FILES} files"));
        }
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        // Archives that people make have a folder around their files.
        let name = name.rsplit('/').next().unwrap_or_default().to_owned();
        let size = entry.size();
        let bytes = room.read(entry)?;
        if (bytes.len() as u64) < size {
            return Err("the file is cut short".to_owned());
        }
        entries.insert(name, bytes);
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::table::tests::sample;

    fn size(table: &Table) -> u64 {
        (table.rows() * table.row_bytes()) as u64
    }

    #[test]
    fn a_table_survives_every_form_and_is_the_same_file_each_time() {
        let table = sample(7);
        for form in FORMS {
            let bytes = form.encode(&table).expect("encodes");
            assert_eq!(bytes, form.encode(&table).expect("encodes"));
            assert_eq!(form.decode("x", &bytes, size(&table)).expect("own file"), table);
            let name = format!("train-00001-of-00002.{}", form.ending());
            assert_eq!(TableForm::of_name(&name), Some(form));
        }
        assert_eq!(TableForm::of_name("npz"), None);
        assert_eq!(TableForm::of_name("x.csv"), None);
    }

    #[test]
    fn files_that_are_cut_short_are_refused_wherever_the_cut_is() {
        let table = sample(7);
        for form in FORMS {
            let bytes = form.encode(&table).expect("encodes");
            for end in 0..bytes.len() {
                let read = form.decode("cut", &bytes[..end], size(&table));
                // The end of an archive is two empty blocks, which tar does not insist on.
                assert!(read.is_err() || read.is_ok_and(|read| read == table), "{form:?} {end}");
            }
        }
    }

    #[test]
    fn a_file_that_unpacks_to_more_than_expected_is_refused_on_the_way() {
        let zeros =
            Column { name: "x".into(), dtype: Dtype::U8, shape: vec![], bytes: vec![0; 64 << 20] };
        let bomb = Table::new(vec![zeros]).expect("a good table");
        for form in [TableForm::Npz, TableForm::TarGz] {
            let bytes = form.encode(&bomb).expect("encodes");
            assert!(bytes.len() < 1 << 20, "{}", bytes.len());
            let error = form.decode("bomb", &bytes, 1000).expect_err("too large").to_string();
            assert!(error.contains("`bomb`") && error.contains("1000 bytes"), "{error}");
        }
    }

    #[test]
    fn what_a_form_does_not_have_is_named() {
        let bytes = vec![0; 4];
        let half = Column { name: "x".into(), dtype: Dtype::BF16, shape: vec![], bytes };
        let table = Table::new(vec![half.clone()]).expect("a good table");
        let error = TableForm::Npz.encode(&table).expect_err("no such type").to_string();
        assert!(error.contains("BF16") && error.contains("safetensors"), "{error}");
        let odd = Column { name: "../x".into(), dtype: Dtype::U8, ..half };
        let table = Table::new(vec![odd]).expect("a good table");
        assert!(TableForm::TarGz.encode(&table).is_err());
        assert!(TableForm::Safetensors.encode(&table).is_ok());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            for form in FORMS {
                let _ = form.decode("x", &bytes, 1 << 10);
            }
            let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
            packed.write_all(&bytes).expect("memory");
            let _ = TableForm::TarGz.decode("x", &packed.finish().expect("memory"), 1 << 10);
        }
    }
}
