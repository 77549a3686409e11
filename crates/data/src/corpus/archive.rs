//! The Large Movie Review Dataset as it is downloaded: a compressed archive with
//! `{train,test}/{pos,neg}/*.txt` in it. It is read as a stream; nothing is unpacked to disk.

use std::fs::File;
use std::io::{BufReader, ErrorKind, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use super::{Corpus, MOST_BYTES, Set, label_of, read_text, utf8};
use crate::DataError;

pub(super) fn read(path: &Path, corpus: &mut Corpus) -> Result<(), DataError> {
    let place = path.to_string_lossy();
    let fail = |error: std::io::Error| match error.kind() {
        ErrorKind::UnexpectedEof => {
            DataError::file(&place, "the archive is cut short; get it again")
        }
        ErrorKind::NotFound | ErrorKind::PermissionDenied => DataError::of_io(&place, error),
        _ => DataError::file(&place, format!("not a sound .tar.gz: {error}")),
    };
    let file = BufReader::new(File::open(path).map_err(fail)?);
    // A small file can unpack to any size; what is passed over is bounded too.
    let unpacked = MultiGzDecoder::new(file).take(4 * MOST_BYTES);
    let mut archive = tar::Archive::new(BufReader::new(unpacked));
    let mut bytes = Vec::new();
    for entry in archive.entries().map_err(fail)? {
        let entry = entry.map_err(fail)?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let Some((set, label, file)) = place_of(&name) else { continue };
        let size = entry.size();
        let cut = read_text(entry, &mut bytes).map_err(fail)?;
        if !cut && (bytes.len() as u64) < size {
            return Err(fail(ErrorKind::UnexpectedEof.into()));
        }
        let inside = format!("{place}: {name}");
        corpus.add_text(&file, set, label, utf8(&bytes, cut, &inside)?)?;
    }
    if corpus.documents.is_empty() {
        return Err(DataError::file(
            &place,
            "the archive has no texts under train/pos, train/neg, test/pos and test/neg",
        ));
    }
    Ok(())
}

/// What `…/train/pos/17_8.txt` says of its text; `None` for every other file.
fn place_of(name: &str) -> Option<(Set, u8, String)> {
    let mut parts = name.rsplit('/');
    let (file, class, set) = (parts.next()?, parts.next()?, parts.next()?);
    if !file.ends_with(".txt") || !matches!(class, "pos" | "neg") {
        return None;
    }
    Some((Set::of(set)?, label_of(class)?, format!("{class}/{file}")))
}
