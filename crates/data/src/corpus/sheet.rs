//! Texts in a CSV file with a header: a column for the text and one for the label; one for the set
//! where a single file has both.

use std::path::Path;

use super::{Corpus, LABEL_NAMES, SET_NAMES, Set, TEXT_NAMES, label_of, utf8};
use crate::DataError;

pub(super) fn read(path: &Path, set: Option<Set>, corpus: &mut Corpus) -> Result<(), DataError> {
    let place = path.to_string_lossy();
    let fail = |error: csv::Error| match error.into_kind() {
        csv::ErrorKind::Io(error) => DataError::of_io(&place, error),
        csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
            let line = pos.map_or(0, |pos| pos.line());
            let reason =
                format!("line {line} has {len} columns where the header has {expected_len}");
            DataError::file(&place, reason)
        }
        other => DataError::file(&place, format!("not a sound CSV file: {other:?}")),
    };
    let mut reader = csv::Reader::from_path(path).map_err(fail)?;
    let header = reader.byte_headers().map_err(fail)?.clone();
    let names: Vec<String> = header
        .iter()
        .map(|name| String::from_utf8_lossy(name).trim_start_matches('\u{feff}').to_lowercase())
        .collect();
    let find = |wanted: &[&str]| {
        wanted.iter().find_map(|&wanted| names.iter().position(|name| name.trim() == wanted))
    };
    let (Some(text), Some(label)) = (find(&TEXT_NAMES), find(&LABEL_NAMES)) else {
        return Err(DataError::file(
            &place,
            format!(
                "its columns are {}; one of {} and one of {} are needed",
                shown(&names),
                TEXT_NAMES.join(", "),
                LABEL_NAMES.join(", ")
            ),
        ));
    };
    let set_column = find(&SET_NAMES).filter(|_| set.is_none());
    let mut row = csv::ByteRecord::new();
    let mut place_in_file = 0;
    while reader.read_byte_record(&mut row).map_err(fail)? {
        let line = row.position().map_or(0, csv::Position::line);
        let at = format!("{place}: line {line}");
        let field = |column: usize| utf8(row.get(column).unwrap_or_default(), false, &at);
        let label = field(label)?;
        let label = label_of(label).ok_or_else(|| super::unknown_label(&at, label))?;
        let set = match (set, set_column) {
            (Some(set), _) => set,
            (None, Some(column)) => match Set::of(field(column)?) {
                Some(set) => set,
                // Unlabelled or other splits are not for us.
                None => continue,
            },
            (None, None) => Set::by_place(place_in_file),
        };
        place_in_file += 1;
        corpus.add_text("", set, label, field(text)?)?;
    }
    Ok(())
}

/// The header for a message, however long it is.
fn shown(names: &[String]) -> String {
    let names: Vec<String> = names
        .iter()
        .take(8)
        .map(|name| format!("`{}`", name.chars().take(40).collect::<String>()))
        .collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
