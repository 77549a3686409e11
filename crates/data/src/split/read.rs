//! Reads a folder, or one shard of it, and believes nothing that it can check.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::{DESCRIPTION, Description, KeptFile, KeptSplit};
use crate::table_file::TableForm;
use crate::{Asset, DataError, Dataset, Table, shard_hash};

/// The most bytes of a description or an asset.
const MOST_SMALL_BYTES: u64 = 64 << 20;

/// The most bytes of rows, over all files.
const MOST_BYTES: u64 = 64 << 30;

/// Opens a folder with a description, or one training shard of such a folder; `None` for everything
/// else.
pub fn open(source: &str) -> Result<Option<Dataset>, DataError> {
    Ok(open_described(source)?.map(|(dataset, _)| dataset))
}

/// As [`open`], with the description of what was read.
pub fn open_described(source: &str) -> Result<Option<(Dataset, Description)>, DataError> {
    let path = Path::new(source);
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let (folder, shard) = if path.is_dir() {
        (path.to_owned(), None)
    } else {
        let above = path.parent().filter(|above| !above.as_os_str().is_empty());
        let folder = above.unwrap_or(Path::new(".")).to_owned();
        (folder, Some(name).filter(|name| name != DESCRIPTION))
    };
    let Some(mut description) = describe(&folder)? else {
        return match shard {
            Some(name) if is_shard_name(&name) && path.exists() => Err(DataError::file(
                source,
                format!(
                    "a shard of a split dataset needs the `{DESCRIPTION}` beside it, and what that \
                     names besides shards; copy those too"
                ),
            )),
            _ => Ok(None),
        };
    };
    if let Some(name) = &shard {
        let Some(file) = description.files.iter().find(|file| file.path == *name) else {
            // Something else that happens to lie in the folder.
            return if is_shard_name(name) {
                Err(DataError::file(
                    source,
                    format!("it is not among the files of the `{DESCRIPTION}` beside it"),
                ))
            } else {
                Ok(None)
            };
        };
        if file.split != KeptSplit::Train {
            return Err(DataError::file(
                source,
                format!("it is the {} set; give a training shard, or the folder", file.split),
            ));
        }
        description.files.retain(|file| file.split != KeptSplit::Train || file.path == *name);
        let known = std::mem::take(&mut description.classes);
        for file in description.files.clone() {
            description.count(&file, None);
        }
        for class in &mut description.classes {
            if let Some(known) = known.iter().find(|known| known.label == class.label) {
                class.name.clone_from(&known.name);
            }
        }
    }
    let reader = Reader { folder, description };
    let dataset = reader.read(source)?;
    Ok(Some((dataset, reader.description)))
}

/// The description of a folder, if it has one of ours.
fn describe(folder: &Path) -> Result<Option<Description>, DataError> {
    let path = folder.join(DESCRIPTION);
    if !path.is_file() {
        return Ok(None);
    }
    Description::parse(&path.to_string_lossy(), &read_small(&path)?)
}

/// `train-00001-of-00005.npz`.
fn is_shard_name(name: &str) -> bool {
    let number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let stem = name.strip_prefix("train-").and_then(|rest| rest.split_once('.'));
    let numbers = stem.and_then(|(stem, _)| stem.split_once("-of-"));
    TableForm::of_name(name).is_some() && numbers.is_some_and(|(at, of)| number(at) && number(of))
}

fn read_small(path: &Path) -> Result<Vec<u8>, DataError> {
    let place = path.to_string_lossy();
    let fail = |error| DataError::of_io(&place, error);
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(fail)?;
    file.take(MOST_SMALL_BYTES + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > MOST_SMALL_BYTES {
        return Err(DataError::file(&place, format!("it has more than {MOST_SMALL_BYTES} bytes")));
    }
    Ok(bytes)
}

struct Reader {
    folder: PathBuf,
    description: Description,
}

impl Reader {
    fn read(&self, source: &str) -> Result<Dataset, DataError> {
        let place = self.folder.join(DESCRIPTION);
        let refuse = |reason: String| DataError::file(&place.to_string_lossy(), reason);
        let samples = self.description.files.iter().map(|file| file.samples);
        let samples = samples.fold(0u64, u64::saturating_add);
        let bytes = self.description.row_bytes().and_then(|row| row.checked_mul(samples));
        if bytes.is_none_or(|bytes| bytes > MOST_BYTES) {
            return Err(refuse(format!("its files have more than {MOST_BYTES} bytes of rows")));
        }
        let table = |split: KeptSplit| -> Result<Option<Table>, DataError> {
            let mut all: Option<Table> = None;
            for file in self.description.of(split) {
                let table = self.table(file)?;
                match &mut all {
                    None => all = Some(table),
                    Some(all) => all.append(&table)?,
                }
            }
            Ok(all)
        };
        let missing = |split: KeptSplit| refuse(format!("it names no file with {split} rows"));
        let assets: Result<Vec<Asset>, DataError> = self
            .description
            .assets
            .iter()
            .map(|asset| {
                let path = self.folder.join(&asset.path);
                let bytes = read_small(&path)?;
                check(&path.to_string_lossy(), &bytes, asset.bytes, &asset.sha256)?;
                Ok(Asset { name: asset.path.clone(), bytes: Bytes::from(bytes) })
            })
            .collect();
        Ok(Dataset {
            source: source.to_owned(),
            assets: assets?,
            train: table(KeptSplit::Train)?.ok_or_else(|| missing(KeptSplit::Train))?,
            validation: table(KeptSplit::Validation)?,
            test: table(KeptSplit::Test)?.ok_or_else(|| missing(KeptSplit::Test))?,
        })
    }

    fn table(&self, kept: &KeptFile) -> Result<Table, DataError> {
        let path = self.folder.join(&kept.path);
        let place = path.to_string_lossy();
        let fail = |error| DataError::of_io(&place, error);
        let file = File::open(&path).map_err(fail)?;
        let size = file.metadata().map_err(fail)?.len();
        if size != kept.bytes {
            return Err(other_bytes(&place, size, kept.bytes));
        }
        let mut bytes = Vec::new();
        file.take(size).read_to_end(&mut bytes).map_err(fail)?;
        check(&place, &bytes, kept.bytes, &kept.sha256)?;
        let form = TableForm::of_name(&kept.path)
            .ok_or_else(|| DataError::file(&place, "it is no .npz, .safetensors or .tar.gz"))?;
        let most = self.description.row_bytes().unwrap_or(0).saturating_mul(kept.samples);
        let table = form.decode(&place, &bytes, most)?;
        let mut differences = self.description.differences(&table);
        if differences.is_empty() && table.rows() as u64 != kept.samples {
            differences.push(format!("it has {} rows instead of {}", table.rows(), kept.samples));
        }
        if differences.is_empty() {
            return Ok(table);
        }
        Err(DataError::file(
            &place,
            format!("not what `{DESCRIPTION}` says: {}", differences.join("; ")),
        ))
    }
}

fn other_bytes(place: &str, found: u64, wanted: u64) -> DataError {
    let how = if found < wanted { "it is cut short" } else { "it is another file" };
    DataError::file(
        place,
        format!("{found} bytes where `{DESCRIPTION}` says {wanted}: {how}; copy or make it again"),
    )
}

fn check(place: &str, bytes: &[u8], wanted: u64, sha256: &str) -> Result<(), DataError> {
    if bytes.len() as u64 != wanted {
        return Err(other_bytes(place, bytes.len() as u64, wanted));
    }
    let found = shard_hash(bytes);
    if found != sha256 {
        return Err(DataError::file(
            place,
            format!(
                "its SHA-256 is {found}, `{DESCRIPTION}` says {sha256}: it is damaged or another \
                 file; copy or make it again"
            ),
        ));
    }
    Ok(())
}
