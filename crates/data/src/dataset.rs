//! A dataset becomes shards. The training rows are shuffled once, by an algorithm that is written
//! down here and keyed by nothing, so that sorted data shards well and the same data always gives
//! the same shards: hashes match between runs, and a store keeps them once. For experiments on data
//! that is spread unevenly, they can be put in the order of their labels after that.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use skep_wire::{AssetRef, Manifest, ShardRef};

use crate::{DataError, Table, shard_hash};

/// How many bytes of rows a shard has unless told otherwise: small enough that a worker starts
/// soon, large enough that asking for it costs little.
const SHARD_BYTES: usize = 1 << 20;

/// More copies than this are a slip of the finger.
const MOST_COPIES: usize = 1000;

/// Rows to learn from and rows to measure on.
#[derive(Clone, Debug, PartialEq)]
pub struct Dataset {
    /// Where it came from, for people.
    pub source: String,
    /// To learn from.
    pub train: Table,
    /// To measure on while training, where the data says which rows; else some of the training
    /// rows are held out.
    pub validation: Option<Table>,
    /// To measure on at the end.
    pub test: Table,
    /// What a model that is trained on it needs besides its parameters; none for most.
    pub assets: Vec<Asset>,
}

/// A small file that belongs to a model: a vocabulary, names of classes. A run keeps it as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asset {
    /// Its name, such as `vocabulary.json`.
    pub name: String,
    /// Its bytes, whatever they mean.
    pub bytes: Bytes,
}

/// How a dataset is cut.
#[derive(Clone, Debug, PartialEq)]
pub struct PrepareSettings {
    /// How many shards the training rows are cut into; by size where it is left out.
    pub shards: Option<usize>,
    /// How often the run has each of these shards: 1, unless it is of whole copies.
    pub copies: usize,
    /// The share of the training rows that is held out to validate on, from 0 to below 1.
    pub validation: f64,
    /// Which rows go together.
    pub split: RowSplit,
}

/// Which rows go together in a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowSplit {
    /// Any: every shard looks like the whole.
    #[default]
    Shuffled,
    /// Those of the same label, by the column `label`: a shard has few different ones.
    Label,
}

/// A dataset in shards.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// What a run is told.
    pub manifest: Manifest,
    /// The shards themselves: training, validation, test; then the assets, which travel like them.
    pub shards: Vec<(ShardRef, Bytes)>,
}

impl Dataset {
    /// Shuffles, holds out, cuts. The same data and settings give the same bytes, everywhere.
    pub fn prepare(&self, settings: &PrepareSettings) -> Result<Prepared, DataError> {
        let Cut { train, validation } = self.cut(settings)?;
        let mut prepared = Prepared {
            manifest: Manifest { source: self.source.clone(), ..Manifest::default() },
            shards: Vec::new(),
        };
        // A copy is the same shards once more: their bytes are kept once, their positions are not,
        // and each has an order of its own.
        let copy = prepared.add(&self.train, &train)?;
        prepared.manifest.train = vec![copy; settings.copies].concat();
        prepared.manifest.validation = match &self.validation {
            Some(table) => prepared.add(table, &by_size(table, &all_rows(table)))?,
            None => prepared.add(&self.train, &by_size(&self.train, &validation))?,
        };
        prepared.manifest.test =
            prepared.add(&self.test, &by_size(&self.test, &all_rows(&self.test)))?;
        for Asset { name, bytes } in &self.assets {
            let (hash, size) = (shard_hash(bytes), bytes.len() as u64);
            let asset = AssetRef { name: name.clone(), hash: hash.clone(), bytes: size };
            prepared.manifest.assets.push(asset);
            prepared.shards.push((ShardRef::kept(hash, 1, size), bytes.clone()));
        }
        Ok(prepared)
    }

    /// Which training rows go where.
    pub(crate) fn cut(&self, settings: &PrepareSettings) -> Result<Cut, DataError> {
        let refuse =
            |reason: String| DataError::Dataset { source_name: self.source.clone(), reason };
        for (name, table) in [("training", &self.train), ("test", &self.test)] {
            if table.rows() == 0 {
                return Err(refuse(format!("its {name} set is empty")));
            }
        }
        let share = settings.validation;
        if !(0.0..1.0).contains(&share) {
            return Err(refuse(format!(
                "a validation share of {share} cannot be; give one from 0 to below 1"
            )));
        }
        if !(1..=MOST_COPIES).contains(&settings.copies) {
            return Err(refuse(format!(
                "{} copies cannot be made; give from 1 to {MOST_COPIES}",
                settings.copies
            )));
        }
        let rows = self.train.rows();
        let held = if share == 0.0 || self.validation.is_some() {
            0
        } else if rows < 2 {
            return Err(refuse(
                "with one training row none can be held out; set `validation` to 0".to_owned(),
            ));
        } else {
            ((rows as f64 * share).round() as usize).clamp(1, rows - 1)
        };
        let order = shuffled(rows);
        let (validation, train) = order.split_at(held);
        let mut train = train.to_vec();
        if settings.split == RowSplit::Label {
            let labels = self.train.column("label").ok_or_else(|| {
                refuse(
                    "it has no column `label` to split by; use `split = \"shuffled\"`".to_owned(),
                )
            })?;
            let width = labels.bytes.len() / rows;
            // The last byte weighs most. Stable: among equal labels the shuffled order stays.
            train.sort_by_key(|&row| {
                let start = row as usize * width;
                labels.bytes[start..start + width].iter().rev().copied().collect::<Vec<_>>()
            });
        }
        let shards = settings.shards.unwrap_or_else(|| count_by_size(&self.train, train.len()));
        if shards == 0 || shards > train.len() {
            return Err(refuse(format!(
                "{shards} shards cannot be cut from {} training rows; give from 1 to {}",
                train.len(),
                train.len()
            )));
        }
        Ok(Cut { train: in_parts(&train, shards), validation: validation.to_vec() })
    }
}

/// Rows of the training table, part by part, and those that are held out.
pub(crate) struct Cut {
    pub(crate) train: Vec<Vec<u64>>,
    pub(crate) validation: Vec<u64>,
}

impl Prepared {
    /// Adds a shard for each part.
    fn add(&mut self, table: &Table, parts: &[Vec<u64>]) -> Result<Vec<ShardRef>, DataError> {
        let mut refs = Vec::with_capacity(parts.len());
        let mut part = Table::default();
        for rows in parts {
            table.gather_into(rows, &mut part)?;
            let bytes = Bytes::from(part.to_shard());
            let shard = ShardRef::kept(shard_hash(&bytes), rows.len() as u64, bytes.len() as u64);
            refs.push(shard.clone());
            self.shards.push((shard, bytes));
        }
        Ok(refs)
    }
}

pub(crate) fn all_rows(table: &Table) -> Vec<u64> {
    (0..table.rows() as u64).collect()
}

/// Rows in parts of about a mebibyte.
fn by_size(table: &Table, rows: &[u64]) -> Vec<Vec<u64>> {
    in_parts(rows, count_by_size(table, rows.len()))
}

/// Rows in parts whose sizes differ by one at most.
fn in_parts(rows: &[u64], parts: usize) -> Vec<Vec<u64>> {
    let (length, extra) = (rows.len() / parts.max(1), rows.len() % parts.max(1));
    let mut rest = rows;
    let next = |at| {
        let (these, others) = rest.split_at(length + usize::from(at < extra));
        rest = others;
        these.to_vec()
    };
    (0..parts).map(next).collect()
}

/// About a mebibyte of rows each; none for no rows.
fn count_by_size(table: &Table, rows: usize) -> usize {
    rows.div_ceil((SHARD_BYTES / table.row_bytes().max(1)).max(1))
}

/// The numbers below `rows` in an order that looks random and is always the same: Fisher–Yates
/// from the end; for place `i` the partner is the high half of `i + 1` times the next number of
/// SplitMix64, which starts from 0.
fn shuffled(rows: usize) -> Vec<u64> {
    let mut order: Vec<u64> = (0..rows as u64).collect();
    let mut state = 0u64;
    for place in (1..rows).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = state;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        number ^= number >> 31;
        let partner = (u128::from(number) * (place as u128 + 1)) >> 64;
        order.swap(place, partner as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use skep_wire::{Dtype, Split};

    use super::*;
    use crate::Column;

    fn numbered(rows: usize, width: usize) -> Table {
        let id = (0..rows as i64).flat_map(i64::to_le_bytes).collect();
        let data = vec![1; rows * width];
        Table::new(vec![
            Column { name: "id".into(), dtype: Dtype::I64, shape: vec![], bytes: id },
            Column { name: "data".into(), dtype: Dtype::U8, shape: vec![width], bytes: data },
        ])
        .expect("a good table")
    }

    fn dataset(rows: usize, test: usize, width: usize) -> Dataset {
        let source = "numbers".to_owned();
        let (train, test) = (numbered(rows, width), numbered(test, width));
        Dataset { source, train, validation: None, test, assets: Vec::new() }
    }

    fn settings(shards: Option<usize>, validation: f64) -> PrepareSettings {
        PrepareSettings { shards, copies: 1, validation, split: RowSplit::Shuffled }
    }

    fn ids(prepared: &Prepared, split: Split) -> Vec<i64> {
        let bytes_of = |shard: &ShardRef| {
            let found = prepared.shards.iter().find(|(other, _)| other == shard);
            found.expect("every shard is there").1.clone()
        };
        let shards = prepared.manifest.split(split).iter();
        shards
            .flat_map(|shard| {
                let bytes = bytes_of(shard);
                assert_eq!(shard.hash, shard_hash(&bytes));
                assert_eq!(shard.bytes, bytes.len() as u64);
                let table = Table::from_shard(&bytes).expect("own shard");
                assert_eq!(shard.samples, table.rows() as u64);
                table.column("id").expect("is there").i64s().expect("numbers").into_owned()
            })
            .collect()
    }

    #[test]
    fn the_order_is_the_written_one() {
        assert_eq!(shuffled(10), [4, 9, 2, 5, 1, 7, 6, 0, 3, 8]);
        assert!(shuffled(0).is_empty());
        assert_eq!(shuffled(1), [0]);
    }

    #[test]
    fn the_same_data_always_gives_the_same_shards() {
        let prepared = dataset(100, 10, 4).prepare(&settings(Some(3), 0.1)).expect("prepares");
        let first = &prepared.manifest.train[0];
        assert_eq!(first.hash, "71fdde5e2b3616122158a179c3c30dd9dcdc49a63364bd46ccba18a115b7e1d9");
        let samples: Vec<_> = prepared.manifest.train.iter().map(|shard| shard.samples).collect();
        assert_eq!(samples, [30, 30, 30]);
        assert_eq!(prepared.manifest.source, "numbers");
    }

    #[test]
    fn a_split_by_label_puts_equal_labels_together() {
        let mut dataset = dataset(100, 10, 4);
        let label: Vec<u8> = (0..100i64).flat_map(|row| (row % 5).to_le_bytes()).collect();
        let mut columns = dataset.train.columns().to_vec();
        columns.push(Column {
            name: "label".into(),
            dtype: Dtype::I64,
            shape: vec![],
            bytes: label,
        });
        dataset.train = Table::new(columns).expect("a good table");
        let by_label = PrepareSettings { split: RowSplit::Label, ..settings(Some(5), 0.0) };
        let prepared = dataset.prepare(&by_label).expect("prepares");
        let rows = ids(&prepared, Split::Train);
        assert_eq!(
            rows.iter()
                .map(|row| row % 5)
                .collect::<Vec<_>>()
                .chunks(20)
                .map(|labels| { labels.iter().collect::<BTreeSet<_>>().len() })
                .collect::<Vec<_>>(),
            [1; 5]
        );
        let mut sorted = rows.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        dataset.train = numbered(100, 4);
        let error = dataset.prepare(&by_label).expect_err("no labels").to_string();
        assert!(error.contains("no column `label`"), "{error}");
    }

    #[test]
    fn a_copy_has_positions_of_its_own_and_the_same_bytes() {
        let copies = PrepareSettings { copies: 3, ..settings(Some(2), 0.0) };
        let prepared = dataset(100, 10, 4).prepare(&copies).expect("prepares");
        let train = &prepared.manifest.train;
        assert_eq!((train.len(), prepared.manifest.samples(Split::Train)), (6, 300));
        assert_eq!((&train[0], &train[1]), (&train[2], &train[5]));
        assert_eq!(prepared.shards.len(), 2 + 1, "two of training rows, one of test rows");
        let none = PrepareSettings { copies: 0, ..copies };
        let error = dataset(100, 10, 4).prepare(&none).expect_err("no copy").to_string();
        assert!(error.contains("0 copies cannot be made"), "{error}");
    }

    #[test]
    fn shards_are_about_a_mebibyte_unless_told_otherwise() {
        let prepared = dataset(5000, 700, 1000).prepare(&settings(None, 0.3)).expect("prepares");
        // 1008 bytes a row: 1040 rows to the mebibyte.
        assert_eq!(prepared.manifest.train.len(), 4);
        assert_eq!(prepared.manifest.validation.len(), 2);
        assert_eq!(prepared.manifest.test.len(), 1);
        let wide = dataset(3, 1, 3 << 20).prepare(&settings(None, 0.0)).expect("prepares");
        assert_eq!(wide.manifest.train.len(), 3, "a row is never cut");
        assert!(wide.manifest.validation.is_empty());
    }

    #[test]
    fn what_cannot_be_cut_is_refused_with_a_reason() {
        for (rows, test, cut, part) in [
            (0, 5, settings(None, 0.0), "training set is empty"),
            (5, 0, settings(None, 0.0), "test set is empty"),
            (5, 5, settings(Some(0), 0.0), "0 shards cannot be cut from 5"),
            (5, 5, settings(Some(5), 0.1), "5 shards cannot be cut from 4"),
            (5, 5, settings(None, 1.0), "share of 1 cannot be"),
            (5, 5, settings(None, -0.1), "share of -0.1 cannot be"),
            (5, 5, settings(None, f64::NAN), "share of NaN cannot be"),
            (1, 5, settings(None, 0.5), "set `validation` to 0"),
        ] {
            let error = dataset(rows, test, 1).prepare(&cut).expect_err(part).to_string();
            assert!(error.contains(part) && error.contains("numbers"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn every_row_is_in_exactly_one_place(
            rows in 2usize..200, test in 1usize..20, share in 0.0f64..1.0, shards in 1usize..9,
        ) {
            let made = dataset(rows, test, 2).prepare(&settings(Some(shards), share));
            let Ok(prepared) = made else {
                prop_assert!(rows < shards + (rows as f64 * share) as usize + 2);
                return Ok(());
            };
            let (train, held) = (ids(&prepared, Split::Train), ids(&prepared, Split::Validation));
            prop_assert_eq!(share > 0.0, !held.is_empty());
            prop_assert!(!train.is_empty());
            prop_assert_eq!(train.len() + held.len(), rows);
            let all: BTreeSet<_> = train.iter().chain(&held).copied().collect();
            prop_assert_eq!(all, (0..rows as i64).collect::<BTreeSet<_>>());
            prop_assert_eq!(ids(&prepared, Split::Test), (0..test as i64).collect::<Vec<_>>());
            let sizes: Vec<_> = prepared.manifest.train.iter().map(|shard| shard.samples).collect();
            prop_assert!(sizes.iter().max().unwrap_or(&0) - sizes.iter().min().unwrap_or(&0) <= 1);
            prop_assert_eq!(sizes.len(), shards);
        }
    }
}
