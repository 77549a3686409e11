//! Texts in a file with one JSON object to a line: a field for the text and one for the label; one
//! for the set where a single file has both.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde_json::{Map, Value};

use super::{Corpus, LABEL_NAMES, SET_NAMES, Set, TEXT_NAMES, label_of, utf8};
use crate::DataError;

/// JSON cannot be cut, so that a line has a limit of its own.
const MOST_LINE_BYTES: u64 = 64 << 20;

pub(super) fn read(path: &Path, set: Option<Set>, corpus: &mut Corpus) -> Result<(), DataError> {
    let place = path.to_string_lossy();
    let fail = |error| DataError::of_io(&place, error);
    let mut reader = BufReader::new(File::open(path).map_err(fail)?);
    let mut bytes = Vec::new();
    let mut texts = 0;
    for line in 1u64.. {
        bytes.clear();
        let limit = MOST_LINE_BYTES + 1;
        if reader.by_ref().take(limit).read_until(b'\n', &mut bytes).map_err(fail)? == 0 {
            break;
        }
        let at = format!("{place}: line {line}");
        if bytes.len() as u64 == limit {
            return Err(DataError::file(&at, format!("over {MOST_LINE_BYTES} bytes long")));
        }
        let text = utf8(&bytes, false, &at)?.trim_start_matches('\u{feff}').trim();
        if text.is_empty() {
            continue;
        }
        let object: Map<String, Value> = serde_json::from_str(text)
            .map_err(|error| DataError::file(&at, format!("not a JSON object: {error}")))?;
        let find = |wanted: &[&str]| wanted.iter().find_map(|&name| object.get(name));
        let (Some(Value::String(text)), Some(label)) = (find(&TEXT_NAMES), find(&LABEL_NAMES))
        else {
            return Err(DataError::file(
                &at,
                format!(
                    "one of {} (a text) and one of {} are needed",
                    TEXT_NAMES.join(", "),
                    LABEL_NAMES.join(", ")
                ),
            ));
        };
        let label = match label {
            Value::String(label) => label.clone(),
            other => other.to_string(),
        };
        let label = label_of(&label).ok_or_else(|| super::unknown_label(&at, &label))?;
        let set = match (set, find(&SET_NAMES).and_then(Value::as_str)) {
            (Some(set), _) => set,
            (None, Some(name)) => match Set::of(name) {
                Some(set) => set,
                None => continue,
            },
            (None, None) => Set::by_place(texts),
        };
        texts += 1;
        corpus.add_text("", set, label, text)?;
    }
    Ok(())
}
