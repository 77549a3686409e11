//! `dataset.json`: what is in a folder, so that a reader can check each file before it is used.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::table_file::{ColumnKind, TableForm};
use crate::{DataError, RowSplit, Table, classes};

/// What tells our descriptions from others of the same name.
const KIND: &str = "skep-dataset";

/// The newest form of the file that is known here.
const FORMAT: u64 = 1;

/// What is in a folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    kind: String,
    format: u64,
    /// Where the rows came from, for people.
    pub source: String,
    /// Which training rows went together.
    pub split: RowSplit,
    /// Which copy this is, where several were made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<CopyNumber>,
    /// The columns of every file.
    pub columns: Vec<ColumnKind>,
    /// The classes, by label; none where rows have no labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<ClassCounts>,
    /// The files with rows.
    pub files: Vec<KeptFile>,
    /// Files that a model needs besides its parameters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub assets: Vec<KeptAsset>,
}

/// One copy of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyNumber {
    /// Which, from 1.
    pub number: usize,
    /// Of how many.
    pub of: usize,
}

/// A class, and how many rows it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassCounts {
    /// The number in the column `label`.
    pub label: i64,
    /// What it is called.
    pub name: String,
    /// Training rows.
    pub train: u64,
    /// Validation rows.
    pub validation: u64,
    /// Test rows.
    pub test: u64,
}

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeptSplit {
    /// To learn from.
    Train,
    /// To measure on while training.
    Validation,
    /// To measure on at the end.
    Test,
}

impl fmt::Display for KeptSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Test => "test",
        })
    }
}

/// A file with rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptFile {
    /// Its name in the folder.
    pub path: String,
    /// What it is for.
    pub split: KeptSplit,
    /// Rows.
    pub samples: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// The SHA-256 of the file, in hexadecimal digits.
    pub sha256: String,
    /// How many rows have which label.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<i64, u64>,
}

/// A file that a model needs besides its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptAsset {
    /// Its name in the folder, and in a run.
    pub path: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// The SHA-256 of the file.
    pub sha256: String,
}

impl Description {
    pub(super) fn new(source: String, split: RowSplit, columns: Vec<ColumnKind>) -> Self {
        Self {
            kind: KIND.to_owned(),
            format: FORMAT,
            source,
            split,
            copy: None,
            columns,
            classes: Vec::new(),
            files: Vec::new(),
            assets: Vec::new(),
        }
    }

    /// Reads a file; `None` where it is of another kind.
    pub fn parse(place: &str, bytes: &[u8]) -> Result<Option<Self>, DataError> {
        let refuse = |reason: String| DataError::file(place, reason);
        let broken = |error: serde_json::Error| refuse(format!("not a description: {error}"));
        let value: Value = serde_json::from_slice(bytes).map_err(broken)?;
        if value.get("kind").and_then(Value::as_str) != Some(KIND) {
            return Ok(None);
        }
        match value.get("format").and_then(Value::as_u64) {
            Some(found) if found > FORMAT => {
                return Err(DataError::Format { path: place.to_owned(), found, known: FORMAT });
            }
            _ => {}
        }
        let description: Self = serde_json::from_value(value).map_err(broken)?;
        let files = description.files.iter().map(|file| &file.path);
        for path in files.chain(description.assets.iter().map(|asset| &asset.path)) {
            // It could point anywhere otherwise.
            if path.is_empty() || path.contains(['/', '\\', '\0']) || path.starts_with('.') {
                return Err(refuse(format!("`{path}` is not the name of a file in the folder")));
            }
        }
        for file in &description.files {
            if TableForm::of_name(&file.path).is_none() {
                return Err(refuse(format!("`{}` is no .npz, .safetensors or .tar.gz", file.path)));
            }
        }
        for wanted in [KeptSplit::Train, KeptSplit::Test] {
            if description.of(wanted).next().is_none() {
                return Err(refuse(format!("it names no file with {wanted} rows")));
            }
        }
        Ok(Some(description))
    }

    /// The file.
    pub fn to_json(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).expect("texts and numbers are JSON");
        text.push(b'\n');
        text
    }

    /// The files that are for something.
    pub fn of(&self, split: KeptSplit) -> impl Iterator<Item = &KeptFile> {
        self.files.iter().filter(move |file| file.split == split)
    }

    /// How many rows are for something.
    pub fn samples(&self, split: KeptSplit) -> u64 {
        self.of(split).fold(0u64, |sum, file| sum.saturating_add(file.samples))
    }

    /// How many bytes a row has; `None` for what cannot be.
    pub(super) fn row_bytes(&self) -> Option<u64> {
        self.columns.iter().try_fold(0u64, |sum, column| {
            let bits = column.dtype.bitsize() as u64;
            let mut sides = column.shape.iter();
            let bytes = sides.try_fold(bits / 8, |size, &side| size.checked_mul(side as u64))?;
            sum.checked_add(bytes)
        })
    }

    /// What a table has that the description does not, for people.
    pub(super) fn differences(&self, table: &Table) -> Vec<String> {
        let found = ColumnKind::of(table);
        let find = |list: &[ColumnKind], name: &str| {
            list.iter().find(|column| column.name == name).cloned()
        };
        let mut differences: Vec<String> = self
            .columns
            .iter()
            .filter_map(|wanted| match find(&found, &wanted.name) {
                Some(column) if column == *wanted => None,
                Some(column) => Some(format!("it has {column} instead of {wanted}")),
                None => Some(format!("it lacks {wanted}")),
            })
            .collect();
        let more = found.iter().filter(|column| find(&self.columns, &column.name).is_none());
        differences.extend(more.map(|column| format!("it also has {column}")));
        differences
    }

    /// Adds a file's labels to the counts of the classes.
    pub(super) fn count(&mut self, file: &KeptFile, names: Option<&[String]>) {
        for (&label, &count) in &file.labels {
            let at = self.classes.iter().position(|class| class.label >= label);
            let at = at.unwrap_or(self.classes.len());
            if self.classes.get(at).is_none_or(|class| class.label != label) {
                let name = usize::try_from(label).ok().and_then(|at| names?.get(at)).cloned();
                let name = name.unwrap_or_else(|| label.to_string());
                let class = ClassCounts { label, name, train: 0, validation: 0, test: 0 };
                self.classes.insert(at, class);
            }
            let class = &mut self.classes[at];
            *match file.split {
                KeptSplit::Train => &mut class.train,
                KeptSplit::Validation => &mut class.validation,
                KeptSplit::Test => &mut class.test,
            } += count;
        }
    }
}

/// The labels of a table, for its entry.
pub(super) fn labels(table: &Table) -> BTreeMap<i64, u64> {
    // A column of many numbers is no set of classes.
    classes::counts(table).filter(|counts| counts.len() <= classes::MOST).unwrap_or_default()
}
