//! Writes a dataset into one or several folders of a store. Each file is whole or not there, and the
//! description comes last, so that a folder with one has everything that it names.

use bytes::Bytes;

use super::description::labels;
use super::{CopyNumber, DESCRIPTION, Description, KeptAsset, KeptFile, KeptSplit};
use crate::dataset::{Cut, all_rows};
use crate::table_file::{ColumnKind, TableForm};
use crate::{DataError, Dataset, PrepareSettings, Store, Table, classes, shard_hash};

/// How a dataset is written.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitSettings {
    /// How its rows are cut.
    pub prepare: PrepareSettings,
    /// The form of its files.
    pub form: TableForm,
}

/// A dataset on its way into folders, file by file.
pub struct Writer<'dataset> {
    dataset: &'dataset Dataset,
    form: TableForm,
    parts: Vec<Part<'dataset>>,
    description: Description,
    names: Option<Vec<String>>,
}

/// A file to be written.
struct Part<'dataset> {
    path: String,
    split: KeptSplit,
    table: &'dataset Table,
    rows: Vec<u64>,
}

impl<'dataset> Writer<'dataset> {
    /// Decides which rows go into which file; nothing is written yet.
    pub fn new(dataset: &'dataset Dataset, settings: &SplitSettings) -> Result<Self, DataError> {
        let Cut { train, validation } = dataset.cut(&settings.prepare)?;
        let form = settings.form;
        let shards = train.len();
        let part = |name: &str, split, table, rows| Part {
            path: format!("{name}.{}", form.ending()),
            split,
            table,
            rows,
        };
        let mut parts: Vec<Part> = train
            .into_iter()
            .zip(1..)
            .map(|(rows, number)| {
                let name = format!("train-{number:05}-of-{shards:05}");
                part(&name, KeptSplit::Train, &dataset.train, rows)
            })
            .collect();
        match &dataset.validation {
            Some(table) => {
                parts.push(part("validation", KeptSplit::Validation, table, all_rows(table)));
            }
            None if !validation.is_empty() => {
                parts.push(part("validation", KeptSplit::Validation, &dataset.train, validation));
            }
            None => {}
        }
        parts.push(part("test", KeptSplit::Test, &dataset.test, all_rows(&dataset.test)));
        let columns = ColumnKind::of(&dataset.train);
        let description = Description::new(dataset.source.clone(), settings.prepare.split, columns);
        let names = classes::names(dataset)?;
        Ok(Self { dataset, form, parts, description, names })
    }

    /// How many files with rows there are.
    pub fn files(&self) -> usize {
        self.parts.len()
    }

    /// Writes everything: into the store itself, or as so many whole copies into its folders
    /// `copy-1`, `copy-2`, …. `written` hears of each file that is done. The answer is the
    /// description of each folder.
    pub async fn write(
        mut self,
        store: &Store,
        copies: Option<usize>,
        mut written: impl FnMut(&KeptFile),
    ) -> Result<Vec<Description>, DataError> {
        let folders: Vec<String> = match copies {
            None => vec![String::new()],
            Some(copies) => (1..=copies).map(|number| format!("copy-{number}/")).collect(),
        };
        for folder in &folders {
            let path = format!("{folder}{DESCRIPTION}");
            if store.exists(&path).await? {
                return Err(DataError::Dataset {
                    source_name: self.dataset.source.clone(),
                    reason: format!(
                        "there is a dataset in {} already; give another folder, or delete that one",
                        store.url() + folder
                    ),
                });
            }
        }
        for part in std::mem::take(&mut self.parts) {
            // One file at a time is in memory, whatever the number of copies.
            let table = part.table.gather(&part.rows)?;
            let bytes = Bytes::from(self.form.encode(&table)?);
            let file = KeptFile {
                path: part.path,
                split: part.split,
                samples: table.rows() as u64,
                bytes: bytes.len() as u64,
                sha256: shard_hash(&bytes),
                labels: labels(&table),
            };
            drop(table);
            for folder in &folders {
                store.put(&format!("{folder}{}", file.path), bytes.clone()).await?;
            }
            written(&file);
            self.description.count(&file, self.names.as_deref());
            self.description.files.push(file);
        }
        for asset in &self.dataset.assets {
            for folder in &folders {
                store.put(&format!("{folder}{}", asset.name), asset.bytes.clone()).await?;
            }
            let (bytes, sha256) = (asset.bytes.len() as u64, shard_hash(&asset.bytes));
            self.description.assets.push(KeptAsset { path: asset.name.clone(), bytes, sha256 });
        }
        let mut descriptions = Vec::with_capacity(folders.len());
        for (folder, number) in folders.iter().zip(1..) {
            let mut description = self.description.clone();
            description.copy = copies.map(|of| CopyNumber { number, of });
            let bytes = Bytes::from(description.to_json());
            store.create(&format!("{folder}{DESCRIPTION}"), bytes).await?;
            descriptions.push(description);
        }
        Ok(descriptions)
    }
}
