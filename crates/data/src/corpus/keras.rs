//! The Large Movie Review Dataset as Keras has it: `imdb.npz` with the arrays `x_train`, `y_train`,
//! `x_test`, `y_test`, texts as lists of word numbers, and the words in a file beside it,
//! `imdb_word_index.json`.
//!
//! Keras numbers words from 1 in that file, but adds 3 to make room in the arrays: there, 0 is
//! padding, 1 the start of a text, 2 an unknown word, and 3 stands for nothing.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Cursor, Read};
use std::path::{Path, PathBuf};

use zip::ZipArchive;

use super::numbers::{self, Numbers};
use super::{Corpus, Document, Set};
use crate::DataError;

/// How far the numbers in the arrays are from those in the word index.
const OFFSET: i64 = 3;

/// What every number up to the offset stands for.
const UNKNOWN: i64 = 2;

/// The most bytes an array may have once it is unpacked.
const MOST_ARRAY_BYTES: u64 = 1 << 30;

/// The most bytes of a word index; Keras' has 1.6 million.
const MOST_INDEX_BYTES: u64 = 256 << 20;

/// A word that no text has, since words are made of letters and digits.
const UNKNOWN_WORD: &str = "<unknown>";

pub(super) fn read(path: &Path, corpus: &mut Corpus) -> Result<(), DataError> {
    let place = path.to_string_lossy();
    let words = word_index(path)?;
    let file = File::open(path).map_err(|error| DataError::of_io(&place, error))?;
    let mut archive = ZipArchive::new(BufReader::new(file))
        .map_err(|error| DataError::file(&place, format!("not a sound .npz: {error}")))?;
    for (set, name) in [(Set::Train, "train"), (Set::Test, "test")] {
        let texts = array(&mut archive, &place, &format!("x_{name}"))?;
        let labels = array(&mut archive, &place, &format!("y_{name}"))?;
        let Numbers::Flat { shape, values } = labels else {
            return Err(DataError::file(&place, format!("y_{name} is not an array of numbers")));
        };
        let texts = match texts {
            Numbers::Lists(lists) => lists,
            Numbers::Flat { shape, values } if shape.len() == 2 && shape[1] > 0 => {
                values.chunks(shape[1]).map(<[i64]>::to_vec).collect()
            }
            Numbers::Flat { shape, .. } => {
                return Err(DataError::file(
                    &place,
                    format!("x_{name} has the shape {shape:?}; lists of word numbers are needed"),
                ));
            }
        };
        if shape.len() != 1 || values.len() != texts.len() {
            return Err(DataError::file(
                &place,
                format!("{} texts in x_{name}, but y_{name} has shape {shape:?}", texts.len()),
            ));
        }
        for (text, &label) in texts.iter().zip(&values) {
            let label = match label {
                0 => 0,
                1 => 1,
                other => {
                    let reason = format!("y_{name} has the label {other}; 0 and 1 are known");
                    return Err(DataError::file(&place, reason));
                }
            };
            // 0 is padding, 1 the start of a text.
            let numbers = text.iter().filter(|&&number| !(0..UNKNOWN).contains(&number));
            let words = numbers
                .map(|number| {
                    let word = words.get(&number.saturating_sub(OFFSET));
                    corpus.number(word.map_or(UNKNOWN_WORD, String::as_str))
                })
                .collect();
            let bytes = 8 * text.len() as u64;
            corpus.add(Document { name: String::new(), set, label, words }, bytes)?;
        }
    }
    Ok(())
}

/// One array of the file.
fn array(
    archive: &mut ZipArchive<BufReader<File>>,
    place: &str,
    name: &str,
) -> Result<Numbers, DataError> {
    let entry = archive.by_name(&format!("{name}.npy"));
    let entry = entry.map_err(|error| {
        DataError::file(
            place,
            format!("array `{name}`: {error}; x_train, y_train, x_test and y_test are needed"),
        )
    })?;
    let mut bytes = Vec::new();
    entry
        .take(MOST_ARRAY_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| DataError::file(place, format!("array `{name}`: {error}")))?;
    if bytes.len() as u64 > MOST_ARRAY_BYTES {
        let reason = format!("array `{name}` has more than {MOST_ARRAY_BYTES} bytes");
        return Err(DataError::file(place, reason));
    }
    numbers::decode(&bytes).map_err(|reason| DataError::file(place, format!("{name}: {reason}")))
}

/// The words by number, from the file beside the arrays.
fn word_index(path: &Path) -> Result<HashMap<i64, String>, DataError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let names = [
        format!("{stem}_word_index.json"),
        "imdb_word_index.json".to_owned(),
        "word_index.json".to_owned(),
    ];
    let found: Option<PathBuf> =
        names.iter().map(|name| folder.join(name)).find(|path| path.is_file());
    let Some(found) = found else {
        return Err(DataError::file(
            &path.to_string_lossy(),
            format!(
                "its texts are word numbers, and the words are not beside it; put `{}` into the \
                 same folder (keras.datasets.imdb.get_word_index downloads it)",
                names[1]
            ),
        ));
    };
    let place = found.to_string_lossy();
    let file = File::open(&found).map_err(|error| DataError::of_io(&place, error))?;
    let mut bytes = Vec::new();
    let limited = file.take(MOST_INDEX_BYTES).read_to_end(&mut bytes);
    limited.map_err(|error| DataError::of_io(&place, error))?;
    let index: HashMap<String, i64> = serde_json::from_reader(Cursor::new(bytes))
        .map_err(|error| DataError::file(&place, format!("not a word index: {error}")))?;
    // Two words of the same number: the first in the alphabet, on every machine.
    let mut words: Vec<_> = index.into_iter().map(|(word, number)| (number, word)).collect();
    words.sort_by(|a, b| b.cmp(a));
    Ok(words.into_iter().collect())
}
