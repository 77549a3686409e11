//! Rows of named columns. A shard is a table in a file and a batch is a table in memory, so one
//! type carries samples from the dataset to the model.
//!
//! A shard is a safetensors file with one tensor `[rows, ...]` per column: Python reads it without
//! Skep.

use std::borrow::Cow;
use std::ops::Range;

use safetensors::tensor::TensorView;
use sha2::{Digest, Sha256};
use skep_wire::{Dtype, FrameView};

use crate::DataError;

/// One column: the same kind of value in every row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its name, `image`.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// The shape of one row; empty for a single number.
    pub shape: Vec<usize>,
    /// All rows, one after the other, little-endian.
    pub bytes: Vec<u8>,
}

impl Column {
    /// The bytes as they are: the numbers themselves where the type is `U8`.
    pub fn u8s(&self) -> &[u8] {
        &self.bytes
    }

    /// The numbers of an `I64` column, in place where they happen to be aligned.
    pub fn i64s(&self) -> Result<Cow<'_, [i64]>, DataError> {
        self.numbers(Dtype::I64)
    }

    /// The numbers of an `F32` column, in place where they happen to be aligned.
    pub fn f32s(&self) -> Result<Cow<'_, [f32]>, DataError> {
        self.numbers(Dtype::F32)
    }

    fn numbers<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(
        &self,
        dtype: Dtype,
    ) -> Result<Cow<'_, [T]>, DataError> {
        if self.dtype != dtype {
            return Err(DataError::Table(format!(
                "column `{}` is {:?}, not {dtype:?}",
                self.name, self.dtype
            )));
        }
        Ok(match bytemuck::try_cast_slice(&self.bytes) {
            Ok(numbers) => Cow::Borrowed(numbers),
            Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(&self.bytes)),
        })
    }

    /// How many bytes a row has: at least one, or the column cannot be.
    fn row_bytes(&self) -> Result<usize, DataError> {
        let refuse = |reason: &str| {
            Err(DataError::Table(format!(
                "column `{}` of {:?} {:?} {reason}",
                self.name, self.dtype, self.shape
            )))
        };
        if !self.dtype.bitsize().is_multiple_of(8) {
            return refuse("has elements of less than a byte");
        }
        let bytes = self
            .shape
            .iter()
            .try_fold(self.dtype.bitsize() / 8, |product, &side| product.checked_mul(side));
        match bytes {
            None => refuse("is too large"),
            Some(0) => refuse("has empty rows"),
            Some(bytes) => Ok(bytes),
        }
    }
}

/// Columns with equally many rows, in the order of their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    columns: Vec<Column>,
    /// Bytes per row of each column.
    widths: Vec<usize>,
    rows: usize,
}

impl Table {
    /// Joins columns. They need a name each and as many rows as the others.
    pub fn new(mut columns: Vec<Column>) -> Result<Self, DataError> {
        columns.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(pair) = columns.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(DataError::Table(format!("column `{}` is there twice", pair[0].name)));
        }
        let mut widths = Vec::with_capacity(columns.len());
        let mut rows = None;
        for column in &columns {
            if column.name.is_empty() || column.name == "__metadata__" {
                return Err(DataError::Table(format!("`{}` cannot be a column", column.name)));
            }
            let width = column.row_bytes()?;
            let count = column.bytes.len() / width;
            if count * width != column.bytes.len() {
                return Err(DataError::Table(format!(
                    "column `{}` has {} bytes, which is no multiple of the {width} of a row",
                    column.name,
                    column.bytes.len()
                )));
            }
            match rows {
                Some((rows, first)) if rows != count => {
                    return Err(DataError::Table(format!(
                        "column `{}` has {count} rows, but `{first}` has {rows}",
                        column.name
                    )));
                }
                _ => rows = Some((count, column.name.as_str())),
            }
            widths.push(width);
        }
        let Some((rows, _)) = rows else {
            return Err(DataError::Table("there are no columns".to_owned()));
        };
        Ok(Self { columns, widths, rows })
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many bytes one row has, over all columns.
    pub fn row_bytes(&self) -> usize {
        self.widths.iter().sum()
    }

    /// All columns, in the order of their names.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// One column.
    pub fn column(&self, name: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.name == name)
    }

    /// One column that must be there, of this type and row shape: the check to make once, before
    /// the numbers of a shard from elsewhere are used.
    pub fn require(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&Column, DataError> {
        match self.column(name) {
            Some(column) if column.dtype == dtype && column.shape == shape => Ok(column),
            Some(column) => Err(DataError::Table(format!(
                "column `{name}` is {:?} {:?}, not {dtype:?} {shape:?}",
                column.dtype, column.shape
            ))),
            None => Err(DataError::Table(format!("column `{name}` is missing"))),
        }
    }

    /// The shard: a safetensors file whose bytes depend on nothing but the table.
    pub fn to_shard(&self) -> Vec<u8> {
        let views = self.columns.iter().map(|column| {
            let shape = std::iter::once(self.rows).chain(column.shape.iter().copied()).collect();
            let view = TensorView::new(column.dtype, shape, &column.bytes);
            (column.name.as_str(), view.expect("`new` compared sizes and shapes"))
        });
        safetensors::serialize(views, None).expect("`new` made names unique and sizes fit")
    }

    /// Reads a shard: every tensor has as many rows as the others.
    pub fn from_shard(bytes: &[u8]) -> Result<Self, DataError> {
        let file = FrameView::parse(bytes).map_err(|error| DataError::Table(error.to_string()))?;
        let mut columns = Vec::with_capacity(file.tensors.len());
        let mut rows = None;
        for (name, view) in file.tensors.iter() {
            let Some((&count, shape)) = view.shape().split_first() else {
                return Err(DataError::Table(format!("tensor `{name}` has no rows dimension")));
            };
            if *rows.get_or_insert(count) != count {
                return Err(DataError::Table(format!(
                    "tensor `{name}` has {count} rows, others have {}",
                    rows.unwrap_or_default()
                )));
            }
            columns.push(Column {
                name: name.to_owned(),
                dtype: view.dtype(),
                shape: shape.to_vec(),
                bytes: view.data().to_vec(),
            });
        }
        Self::new(columns)
    }

    /// These rows, in this order; a row may come more than once.
    pub fn gather(&self, rows: &[u64]) -> Result<Self, DataError> {
        let mut into = Self::default();
        self.gather_into(rows, &mut into)?;
        Ok(into)
    }

    /// As [`Table::gather`], into a table whose memory is used again: with a table of the same
    /// columns nothing is allocated once it has held as many rows. On an error it is left as it
    /// was.
    pub fn gather_into(&self, rows: &[u64], into: &mut Self) -> Result<(), DataError> {
        if let Some(row) = rows.iter().find(|&&row| row >= self.rows as u64) {
            return Err(DataError::Table(format!("row {row} of {} was asked for", self.rows)));
        }
        into.take_columns_of(self);
        for ((from, to), &width) in self.columns.iter().zip(&mut into.columns).zip(&self.widths) {
            to.bytes.clear();
            to.bytes.reserve(rows.len() * width);
            for &row in rows {
                let start = row as usize * width;
                to.bytes.extend_from_slice(&from.bytes[start..start + width]);
            }
        }
        into.rows = rows.len();
        Ok(())
    }

    /// Adds the rows of a table with the same columns.
    pub fn append(&mut self, other: &Self) -> Result<(), DataError> {
        if !self.has_columns_of(other) {
            return Err(DataError::Table("its columns differ from the others'".to_owned()));
        }
        for (to, from) in self.columns.iter_mut().zip(&other.columns) {
            to.bytes.extend_from_slice(&from.bytes);
        }
        self.rows += other.rows;
        Ok(())
    }

    fn has_columns_of(&self, other: &Self) -> bool {
        let same = |(a, b): (&Column, &Column)| {
            (&a.name, a.dtype, &a.shape) == (&b.name, b.dtype, &b.shape)
        };
        self.columns.len() == other.columns.len()
            && self.columns.iter().zip(&other.columns).all(same)
    }

    fn take_columns_of(&mut self, other: &Self) {
        if !self.has_columns_of(other) {
            self.columns = other
                .columns
                .iter()
                .map(|column| Column {
                    name: column.name.clone(),
                    dtype: column.dtype,
                    shape: column.shape.clone(),
                    bytes: Vec::new(),
                })
                .collect();
            self.widths.clone_from(&other.widths);
        }
    }

    /// A range of rows.
    pub fn slice(&self, rows: Range<usize>) -> Result<Self, DataError> {
        if rows.start > rows.end || rows.end > self.rows {
            return Err(DataError::Table(format!(
                "rows {}..{} of {} were asked for",
                rows.start, rows.end, self.rows
            )));
        }
        let columns = self.columns.iter().zip(&self.widths).map(|(column, &width)| Column {
            name: column.name.clone(),
            dtype: column.dtype,
            shape: column.shape.clone(),
            bytes: column.bytes[rows.start * width..rows.end * width].to_vec(),
        });
        Ok(Self { columns: columns.collect(), widths: self.widths.clone(), rows: rows.len() })
    }
}

/// A shard's name: the SHA-256 of its bytes, in hexadecimal digits.
pub fn shard_hash(bytes: &[u8]) -> String {
    use std::fmt::Write;
    Sha256::digest(bytes).iter().fold(String::with_capacity(64), |mut text, byte| {
        write!(text, "{byte:02x}").expect("strings take everything");
        text
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn sample(rows: usize) -> Table {
        let bytes = |width: usize| (0..rows * width).map(|at| (at % 251) as u8).collect();
        Table::new(vec![
            Column { name: "y".into(), dtype: Dtype::I64, shape: vec![], bytes: bytes(8) },
            Column { name: "x".into(), dtype: Dtype::F32, shape: vec![2, 3], bytes: bytes(24) },
            Column { name: "a".into(), dtype: Dtype::U8, shape: vec![3], bytes: bytes(3) },
        ])
        .expect("a good table")
    }

    fn column(name: &str, dtype: Dtype, shape: &[usize], bytes: usize) -> Column {
        Column { name: name.into(), dtype, shape: shape.to_vec(), bytes: vec![0; bytes] }
    }

    #[test]
    fn columns_that_do_not_fit_are_refused() {
        let cases = [
            (vec![], "no columns"),
            (vec![column("x", Dtype::U8, &[], 3), column("x", Dtype::U8, &[], 3)], "twice"),
            (vec![column("x", Dtype::U8, &[], 3), column("y", Dtype::U8, &[], 4)], "but `x` has 3"),
            (vec![column("x", Dtype::F32, &[], 5)], "no multiple of the 4"),
            (vec![column("x", Dtype::F32, &[0], 0)], "empty rows"),
            (vec![column("x", Dtype::F4, &[2], 0)], "less than a byte"),
            (vec![column("x", Dtype::F32, &[usize::MAX], 0)], "too large"),
            (vec![column("", Dtype::U8, &[], 0)], "cannot be a column"),
            (vec![column("__metadata__", Dtype::U8, &[], 0)], "cannot be a column"),
        ];
        for (columns, part) in cases {
            let error = Table::new(columns).expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_buffer_is_used_again() {
        let table = sample(10);
        let mut batch = Table::default();
        table.gather_into(&[1, 2, 3, 4], &mut batch).expect("gathers");
        let before: Vec<_> = batch.columns.iter().map(|column| column.bytes.as_ptr()).collect();
        table.gather_into(&[9, 0, 9], &mut batch).expect("gathers");
        let after: Vec<_> = batch.columns.iter().map(|column| column.bytes.as_ptr()).collect();
        assert_eq!(before, after, "nothing was allocated");
        assert_eq!(batch, table.gather(&[9, 0, 9]).expect("gathers"));
        let kept = batch.clone();
        let error = table.gather_into(&[1, 10], &mut batch).expect_err("no such row");
        assert_eq!(error.to_string(), "table: row 10 of 10 was asked for");
        assert_eq!(batch, kept);
        assert!(table.gather(&[u64::MAX]).is_err());
    }

    #[test]
    fn numbers_are_read_whatever_their_alignment() {
        let numbers = [1.5f32, -2.0, 3.25];
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let column = Column { name: "x".into(), dtype: Dtype::F32, shape: vec![], bytes };
        assert_eq!(*column.f32s().expect("floats"), numbers);
        assert!(column.i64s().is_err());
        assert_eq!(column.u8s().len(), 12);
        let table = Table::new(vec![column]).expect("a good table");
        assert!(table.require("x", Dtype::F32, &[]).is_ok());
        for (name, dtype, shape) in
            [("z", Dtype::F32, &[][..]), ("x", Dtype::I64, &[]), ("x", Dtype::F32, &[1])]
        {
            assert!(table.require(name, dtype, shape).is_err());
        }
    }

    #[test]
    fn a_shard_is_the_same_file_today_and_tomorrow() {
        let hash = shard_hash(&sample(3).to_shard());
        assert_eq!(hash, "8993d062e911c1a930ce873c34be0d019b860ee839115ce67cd075a0ba26101d");
        assert_eq!(
            shard_hash(b""),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
    }

    #[test]
    fn shards_whose_tensors_disagree_are_refused() {
        let view = |shape: &[usize], data: &'static [u8]| {
            TensorView::new(Dtype::U8, shape.to_vec(), data).expect("sizes agree")
        };
        let uneven = [("a", view(&[2], &[0; 2])), ("b", view(&[3], &[0; 3]))];
        let scalar = [("a", view(&[], &[0; 1]))];
        let empty_rows = [("a", view(&[5, 0], &[]))];
        for (bytes, part) in [
            (safetensors::serialize(uneven, None), "rows"),
            (safetensors::serialize(scalar, None), "no rows dimension"),
            (safetensors::serialize(empty_rows, None), "empty rows"),
        ] {
            let error = Table::from_shard(&bytes.expect("serialises")).expect_err(part);
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_table_survives_its_shard(rows in 0usize..20) {
            let table = sample(rows);
            let again = Table::from_shard(&table.to_shard()).expect("own shard");
            prop_assert_eq!(again, table);
        }

        #[test]
        fn arbitrary_bytes_are_refused_or_read(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = Table::from_shard(&bytes);
        }

        #[test]
        fn a_spoilt_shard_never_panics(at in 0usize..300, byte: u8, cut in 0usize..300) {
            let mut bytes = sample(4).to_shard();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(table) = Table::from_shard(&bytes) {
                let _ = table.to_shard();
            }
            let _ = Table::from_shard(&bytes[..cut.min(bytes.len())]);
        }

        #[test]
        fn gathering_is_slicing_row_by_row(rows in proptest::collection::vec(0u64..7, 0..12)) {
            let table = sample(7);
            let gathered = table.gather(&rows).expect("gathers");
            prop_assert_eq!(gathered.rows(), rows.len());
            for (at, &row) in rows.iter().enumerate() {
                let row = row as usize;
                prop_assert_eq!(
                    gathered.slice(at..at + 1).expect("is there"),
                    table.slice(row..row + 1).expect("is there")
                );
            }
            prop_assert!(table.slice(3..8).is_err());
        }
    }
}
