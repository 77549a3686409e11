//! What the labels of a dataset mean: the names of its classes, which travel as an asset, and how
//! often each label is there.

use std::collections::BTreeMap;

use skep_wire::Dtype;

use crate::{Asset, DataError, Dataset, Table, Vocabulary};

/// What the asset with the names is called: a JSON list, the name of label 0 first.
pub const ASSET: &str = "classes.json";

/// Labels have 8 bits.
pub const MOST: usize = 256;

/// The longest name of a class, in bytes.
const MOST_NAME_BYTES: usize = 200;

/// Names as an asset.
pub fn asset(names: &[String]) -> Asset {
    let bytes = serde_json::to_vec(names).expect("texts are JSON");
    Asset { name: ASSET.to_owned(), bytes: bytes.into() }
}

/// Reads what [`asset`] wrote.
pub fn parse(place: &str, bytes: &[u8]) -> Result<Vec<String>, DataError> {
    let names: Vec<String> = serde_json::from_slice(bytes).map_err(|error| {
        DataError::file(place, format!("not a list of the names of classes: {error}"))
    })?;
    let good = |name: &String| !name.is_empty() && name.len() <= MOST_NAME_BYTES;
    if names.is_empty() || names.len() > MOST || !names.iter().all(good) {
        let reason = format!("1 to {MOST} names are needed, of 1 to {MOST_NAME_BYTES} bytes each");
        return Err(DataError::file(place, reason));
    }
    Ok(names)
}

/// The names of a dataset's classes, where its assets say them.
pub fn names(dataset: &Dataset) -> Result<Option<Vec<String>>, DataError> {
    let find = |name: &str| dataset.assets.iter().find(|asset| asset.name == name);
    if let Some(asset) = find(ASSET) {
        return parse(ASSET, &asset.bytes).map(Some);
    }
    let Some(asset) = find(Vocabulary::ASSET) else { return Ok(None) };
    Ok(Some(Vocabulary::parse(Vocabulary::ASSET, &asset.bytes)?.classes().to_vec()))
}

/// How many rows have which label; `None` where there is no column `label` of single whole numbers.
pub fn counts(table: &Table) -> Option<BTreeMap<i64, u64>> {
    let column = table.column("label").filter(|column| column.shape.is_empty())?;
    let mut counts = BTreeMap::new();
    let mut count = |label: i64| *counts.entry(label).or_insert(0u64) += 1;
    match column.dtype {
        Dtype::U8 => column.bytes.iter().for_each(|&label| count(label.into())),
        Dtype::I64 => column.i64s().ok()?.iter().for_each(|&label| count(label)),
        _ => return None,
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_their_asset_and_others_are_refused() {
        let own = ["cat", "dog"].map(str::to_owned);
        assert_eq!(parse("x", &asset(&own).bytes).expect("own"), own);
        let many = serde_json::to_string(&vec!["x"; 257]).expect("JSON");
        for bad in ["", "{}", "[]", "[1]", "[\"\"]", &many] {
            assert!(parse("x", bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
