//! Labelled texts: reviews with a verdict, from a folder, an archive or a file in any of the usual
//! forms, or the built-in ones that `made_up` writes. They become rows of word numbers, and a
//! vocabulary that is kept with the run.
//!
//! Every distinct word is kept once and texts refer to it by number, so that a text is cut into
//! words once, whatever vocabulary is made of it afterwards.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use skep_wire::Dtype;

use crate::vocabulary::UNKNOWN;
use crate::{Asset, Column, DataError, Dataset, Table, Vocabulary, VocabularySettings, tokeniser};

mod archive;
mod folder;
mod keras;
mod lines;
mod made_up;
pub mod numbers;
mod sheet;

/// The name of the built-in texts.
pub const BUILT_IN: &str = "reviews";

/// What the classes are called, by label.
pub const CLASSES: [&str; 2] = ["negative", "positive"];

/// The part of a text that is looked at. Longer ones are cut, not refused.
const MOST_TEXT_BYTES: usize = 1 << 20;

/// The most bytes of text, over all.
const MOST_BYTES: u64 = 4 << 30;

/// Whether a text is learned from or measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Train,
    Test,
}

impl Set {
    fn of(text: &str) -> Option<Self> {
        match text.trim().to_ascii_lowercase().as_str() {
            "train" | "training" => Some(Self::Train),
            "test" => Some(Self::Test),
            _ => None,
        }
    }

    /// For files that do not say: every fifth text is measured on.
    fn by_place(place: u64) -> Self {
        if place % 5 == 4 { Self::Test } else { Self::Train }
    }
}

/// One text.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Document {
    /// Its file, where it has one of its own: the order of texts must not depend on a disk's.
    name: String,
    set: Set,
    label: u8,
    words: Vec<u32>,
}

/// Labelled texts.
#[derive(Debug, Default)]
pub struct Corpus {
    source: String,
    words: Vec<String>,
    numbers: HashMap<String, u32>,
    documents: Vec<Document>,
    bytes: u64,
}

impl Corpus {
    /// Opens the built-in texts (`reviews`), a folder, or a file by how its name ends: `.tar.gz`,
    /// `.tgz`, `.csv`, `.jsonl`, `.npz`.
    pub fn open(source: &str) -> Result<Self, DataError> {
        let mut corpus = Self { source: source.to_owned(), ..Self::default() };
        if source == BUILT_IN {
            corpus.source = format!("{BUILT_IN}, made up by Skep and not IMDB");
            made_up::read(&mut corpus)?;
            return Ok(corpus);
        }
        let path = Path::new(source);
        if path.is_dir() {
            folder::read(path, &mut corpus)?;
        } else if path.is_file() {
            corpus.read_file(path, None)?;
        } else {
            return Err(corpus.refuse(format!(
                "neither built in (`{BUILT_IN}` is) nor a folder or file that is there"
            )));
        }
        corpus.documents.sort_by(|a, b| a.name.cmp(&b.name));
        corpus.check()?;
        Ok(corpus)
    }

    /// Reads one file. All of it is of one set, or it says or shows by place what is of which.
    fn read_file(&mut self, path: &Path, set: Option<Set>) -> Result<(), DataError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        match kind_of(&name) {
            Some(Kind::Archive) => archive::read(path, self),
            Some(Kind::Sheet) => sheet::read(path, set, self),
            Some(Kind::Lines) => lines::read(path, set, self),
            Some(Kind::Keras) => keras::read(path, self),
            None => Err(self.refuse(format!(
                "`{name}` is of no kind that is read; give a folder, {FILE_KINDS}"
            ))),
        }
    }

    fn refuse(&self, reason: String) -> DataError {
        DataError::Dataset { source_name: self.source.clone(), reason }
    }

    /// How many texts of each class there are to learn from, and how many to measure on.
    pub fn counts(&self) -> [[usize; CLASSES.len()]; 2] {
        let mut counts = [[0; CLASSES.len()]; 2];
        for document in &self.documents {
            counts[usize::from(document.set == Set::Test)][usize::from(document.label)] += 1;
        }
        counts
    }

    fn check(&self) -> Result<(), DataError> {
        for (found, name) in self.counts().iter().zip(["training", "test"]) {
            for (count, class) in found.iter().zip(CLASSES) {
                if *count == 0 && name == "training" {
                    return Err(self.refuse(format!("its {name} set has no {class} text")));
                }
            }
            if found.iter().sum::<usize>() == 0 {
                return Err(self.refuse(format!("its {name} set is empty")));
            }
        }
        Ok(())
    }

    fn number(&mut self, word: &str) -> u32 {
        if let Some(&number) = self.numbers.get(word) {
            return number;
        }
        let number = self.words.len() as u32;
        self.words.push(word.to_owned());
        self.numbers.insert(word.to_owned(), number);
        number
    }

    fn add_text(&mut self, name: &str, set: Set, label: u8, text: &str) -> Result<(), DataError> {
        let mut end = text.len().min(MOST_TEXT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut words = Vec::new();
        tokeniser::each_word(&text[..end], |word| words.push(self.number(word)));
        self.add(Document { name: name.to_owned(), set, label, words }, end as u64)
    }

    fn add(&mut self, document: Document, bytes: u64) -> Result<(), DataError> {
        self.bytes += bytes + 1;
        if self.bytes > MOST_BYTES {
            return Err(self.refuse(format!("it has more than {MOST_BYTES} bytes of text")));
        }
        self.documents.push(document);
        Ok(())
    }

    /// The rows: `tokens`, `U16` `[length]`, and `label`, `U8`; and the vocabulary, which is made of
    /// the training texts, as an asset.
    pub fn dataset(&self, settings: VocabularySettings) -> Result<Dataset, DataError> {
        let mut counts = vec![0u64; self.words.len()];
        for document in self.documents.iter().filter(|document| document.set == Set::Train) {
            for &word in &document.words {
                counts[word as usize] += 1;
            }
        }
        let counts = self.words.iter().map(String::as_str).zip(counts);
        self.encoded(&Vocabulary::build(counts, &CLASSES, settings))
    }

    /// The rows in the numbers of a vocabulary that is there already.
    pub fn encoded(&self, vocabulary: &Vocabulary) -> Result<Dataset, DataError> {
        let numbers: Vec<u16> = self.words.iter().map(|word| vocabulary.number(word)).collect();
        let table = |set: Set| {
            let documents = self.documents.iter().filter(|document| document.set == set);
            let (mut tokens, mut labels, mut row) = (Vec::new(), Vec::new(), Vec::new());
            for document in documents {
                let words = document.words.iter();
                row.clear();
                row.extend(words.map(|&at| numbers.get(at as usize).copied().unwrap_or(UNKNOWN)));
                vocabulary.fill(&row, &mut tokens);
                labels.push(document.label);
            }
            let bytes = tokens.into_iter().flat_map(u16::to_le_bytes).collect();
            let shape = vec![vocabulary.length()];
            Table::new(vec![
                Column { name: "tokens".to_owned(), dtype: Dtype::U16, shape, bytes },
                Column { name: "label".to_owned(), dtype: Dtype::U8, shape: vec![], bytes: labels },
            ])
        };
        let asset =
            Asset { name: Vocabulary::ASSET.to_owned(), bytes: vocabulary.to_json().into() };
        Ok(Dataset {
            source: self.source.clone(),
            train: table(Set::Train)?,
            validation: None,
            test: table(Set::Test)?,
            assets: vec![asset],
        })
    }
}

const FILE_KINDS: &str = "a .tar.gz, .csv, .jsonl or .npz file";

/// The forms that a file can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Archive,
    Sheet,
    Lines,
    Keras,
}

/// The form of a file by its name, in lower case.
fn kind_of(name: &str) -> Option<Kind> {
    let ends = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    if ends(&[".tar.gz", ".tgz"]) {
        Some(Kind::Archive)
    } else if ends(&[".csv"]) {
        Some(Kind::Sheet)
    } else if ends(&[".jsonl", ".ndjson"]) {
        Some(Kind::Lines)
    } else if ends(&[".npz"]) {
        Some(Kind::Keras)
    } else {
        None
    }
}

/// A label as people write it.
fn label_of(text: &str) -> Option<u8> {
    match text.trim().to_ascii_lowercase().as_str() {
        "positive" | "pos" | "1" | "true" => Some(1),
        "negative" | "neg" | "0" | "false" => Some(0),
        _ => None,
    }
}

fn unknown_label(place: &str, label: &str) -> DataError {
    let label: String = label.chars().take(40).collect();
    DataError::file(
        place,
        format!("`{label}` is no label; `positive`, `pos` or 1 and `negative`, `neg` or 0 are"),
    )
}

/// The text of bytes of which the end may have been cut off.
fn utf8<'bytes>(bytes: &'bytes [u8], cut: bool, name: &str) -> Result<&'bytes str, DataError> {
    std::str::from_utf8(bytes).or_else(|error| {
        let valid = &bytes[..error.valid_up_to()];
        match (cut && error.error_len().is_none(), std::str::from_utf8(valid)) {
            (true, Ok(text)) => Ok(text),
            _ => Err(DataError::file(
                name,
                format!(
                    "byte {} is not UTF-8; convert the file, for example with \
                     `iconv -f LATIN1 -t UTF-8`",
                    error.valid_up_to() + 1
                ),
            )),
        }
    })
}

/// Reads at most [`MOST_TEXT_BYTES`]; whether there was more.
fn read_text(reader: impl Read, into: &mut Vec<u8>) -> std::io::Result<bool> {
    into.clear();
    reader.take(MOST_TEXT_BYTES as u64 + 1).read_to_end(into)?;
    let cut = into.len() > MOST_TEXT_BYTES;
    into.truncate(MOST_TEXT_BYTES);
    Ok(cut)
}

/// Names of columns and fields, the first of which counts.
const TEXT_NAMES: [&str; 5] = ["review", "text", "sentence", "content", "comment"];
const LABEL_NAMES: [&str; 4] = ["sentiment", "label", "polarity", "class"];
const SET_NAMES: [&str; 2] = ["split", "set"];

#[cfg(test)]
mod tests;
