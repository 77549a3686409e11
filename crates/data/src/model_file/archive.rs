//! The zip files among model files: PyTorch's, numpy's and Keras'.

use std::collections::BTreeMap;
use std::io::{Cursor, Read, Write};

use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipArchive, ZipWriter};

use crate::DataError;

fn broken(error: impl std::fmt::Display) -> DataError {
    DataError::file("zip", error.to_string())
}

/// The names of what is in a zip file.
pub(super) fn names(bytes: &[u8]) -> Result<Vec<String>, DataError> {
    let archive = ZipArchive::new(Cursor::new(bytes)).map_err(broken)?;
    Ok(archive.file_names().map(str::to_owned).collect())
}

/// What lies uncompressed in a zip file, in place.
pub(super) fn stored(bytes: &[u8]) -> Result<BTreeMap<String, &[u8]>, DataError> {
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
    Ok(entries)
}

/// Everything in a zip file, unpacked, in its order; `limit` bounds the bytes over all.
pub(super) fn unpacked(bytes: &[u8], limit: usize) -> Result<Vec<(String, Vec<u8>)>, DataError> {
    let mut archive = ZipArchive::new(Cursor::new(bytes)).map_err(broken)?;
    let mut left = limit;
    let mut entries = Vec::new();
    for at in 0..archive.len() {
        let entry = archive.by_index(at).map_err(broken)?;
        if entry.is_dir() {
            continue;
        }
        let path = entry.name().to_owned();
        let mut data = Vec::new();
        entry
            .take(left as u64 + 1)
            .read_to_end(&mut data)
            .map_err(|error| DataError::file(&path, format!("{error}; the file is damaged")))?;
        left = left.checked_sub(data.len()).ok_or_else(|| {
            let reason = format!("unpacked, the file has more than the {limit} bytes allowed");
            DataError::file(&path, reason)
        })?;
        entries.push((path, data));
    }
    Ok(entries)
}

/// A zip file that is not compressed and whose bytes depend on nothing but its contents. Data
/// starts at multiples of 64, so that it can be used in place.
pub(super) fn pack(entries: &[(String, Vec<u8>)]) -> Result<Vec<u8>, DataError> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    for (path, data) in entries {
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Stored)
            .last_modified_time(DateTime::default())
            .with_alignment(64)
            .large_file(data.len() as u64 >= u64::from(u32::MAX));
        writer.start_file(path.as_str(), options).map_err(broken)?;
        writer.write_all(data).map_err(broken)?;
    }
    Ok(writer.finish().map_err(broken)?.into_inner())
}
