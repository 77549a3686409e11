//! Pictures in a CSV file, one to a line: a label and the pixels, as on Kaggle
//! (`label,pixel0,pixel1,…`), with a header or without.

use std::path::{Path, PathBuf};

use super::{ClassList, ImageSettings, Rows, Set, join};
use crate::{DataError, Dataset, picture};

/// What the column of the label can be called; it is the first where none is.
const LABEL_NAMES: [&str; 5] = ["label", "class", "digit", "target", "y"];

/// The most numbers of a line.
const MOST_COLUMNS: usize = 1 << 20;

pub(super) fn is_sheet(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("csv"))
}

/// A file, and what it is for where that is said.
type SheetFile = (PathBuf, Option<Set>);

/// The files of a folder: one whose name says `train` and one that says `test`, or a single one.
pub(super) fn find(folder: &Path) -> Result<Option<Vec<SheetFile>>, DataError> {
    let place = folder.to_string_lossy();
    let fail = |error| DataError::of_io(&place, error);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.is_file() && is_sheet(&path) {
            files.push(path);
        }
    }
    files.sort();
    let named = |part: &str| {
        let says = |path: &&PathBuf| {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
            name.contains(part)
        };
        let mut found = files.iter().filter(says);
        found.next().filter(|_| found.next().is_none()).cloned()
    };
    match (&files[..], named("train"), named("test")) {
        ([], _, _) => Ok(None),
        (_, Some(train), Some(test)) if train != test => {
            Ok(Some(vec![(train, Some(Set::Train)), (test, Some(Set::Test))]))
        }
        ([only], _, _) => Ok(Some(vec![(only.clone(), None)])),
        _ => Err(DataError::file(
            &place,
            "it has several .csv files; give one of them, or have one `train.csv` and one `test.csv`",
        )),
    }
}

/// A line, without its pixels, which lie among those of all.
struct Line {
    /// Which file it is in, and where there: for messages.
    file: usize,
    number: u64,
    set: Option<Set>,
    label: String,
}

pub(super) fn read(
    source: &str,
    files: &[(&Path, Option<Set>)],
    settings: ImageSettings,
) -> Result<Dataset, DataError> {
    let refuse = |reason: String| DataError::Dataset { source_name: source.to_owned(), reason };
    let (mut lines, mut pixels, mut width) = (Vec::new(), Vec::new(), None);
    for (file, (path, set)) in files.iter().enumerate() {
        read_file(path, (file, *set), &mut width, &mut lines, &mut pixels)?;
    }
    let width = width.ok_or_else(|| refuse("it has no line".to_owned()))?;
    let [_, height, across] = settings.shape;
    let size = if width == height * across {
        [across, height]
    } else {
        let side = width.isqrt();
        if side * side != width {
            return Err(refuse(format!(
                "{width} pixels to a line are neither the model's {across} x {height} nor a square"
            )));
        }
        [side, side]
    };
    let classes =
        ClassList::new(lines.iter().map(|line: &Line| line.label.as_str())).map_err(refuse)?;
    let form = classes.form(settings);
    let mut sets = [Rows::default(), Rows::default()];
    let mut places = vec![0u64; classes.names.len()];
    for (line, pixels) in lines.iter().zip(pixels.chunks_exact(width)) {
        let label = classes.label(&line.label);
        let label = label.ok_or_else(|| refuse(format!("`{}` cannot be a class", line.label)))?;
        let place = &mut places[usize::from(label)];
        let set = line.set.unwrap_or_else(|| Set::by_place(*place));
        *place += 1;
        let pixels = picture::grey_to_sample(pixels.to_vec(), size, settings.shape, form).map_err(
            |error| {
                let at = format!("{}: line {}", files[line.file].0.display(), line.number);
                DataError::file(&at, error.to_string())
            },
        )?;
        sets[usize::from(set == Set::Test)].add(&pixels, label).map_err(refuse)?;
    }
    join(source, sets, &classes, settings.shape)
}

fn read_file(
    path: &Path,
    (file, set): (usize, Option<Set>),
    width: &mut Option<usize>,
    lines: &mut Vec<Line>,
    pixels: &mut Vec<u8>,
) -> Result<(), DataError> {
    let place = path.to_string_lossy();
    let fail = |error: csv::Error| match error.into_kind() {
        csv::ErrorKind::Io(error) => DataError::of_io(&place, error),
        csv::ErrorKind::UnequalLengths { pos, expected_len, len } => DataError::file(
            &place,
            format!(
                "line {} has {len} columns where the first has {expected_len}",
                pos.map_or(0, |pos| pos.line())
            ),
        ),
        other => DataError::file(&place, format!("not a sound CSV file: {other:?}")),
    };
    let reader = csv::ReaderBuilder::new().has_headers(false).from_path(path);
    let mut reader = reader.map_err(fail)?;
    let mut row = csv::ByteRecord::new();
    let mut label_at = 0;
    let mut first = true;
    while reader.read_byte_record(&mut row).map_err(fail)? {
        let number = row.position().map_or(0, csv::Position::line);
        let at = format!("{place}: line {number}");
        if row.len() < 2 || row.len() > MOST_COLUMNS {
            let reason = format!(
                "{} columns; a label and up to {MOST_COLUMNS} pixels are needed",
                row.len()
            );
            return Err(DataError::file(&at, reason));
        }
        if std::mem::take(&mut first) && row.iter().skip(1).any(|field| byte(field).is_none()) {
            let name = |field: &[u8]| String::from_utf8_lossy(field).trim().to_lowercase();
            let names: Vec<String> = row
                .iter()
                .map(|field| name(field).trim_start_matches('\u{feff}').to_owned())
                .collect();
            let found =
                LABEL_NAMES.iter().find_map(|&label| names.iter().position(|name| name == label));
            label_at = match found {
                Some(at) => at,
                // A header without a label whose columns are all alike has none.
                None if names[0].starts_with("pixel") => {
                    return Err(DataError::file(
                        &place,
                        "it has no column `label`; where only the training file has labels, as on \
                         Kaggle, give that file alone: every fifth line is then measured on",
                    ));
                }
                None => 0,
            };
            continue;
        }
        let columns = row.len() - 1;
        if *width.get_or_insert(columns) != columns {
            let wanted = width.unwrap_or_default();
            let reason = format!("{columns} pixels where others have {wanted}");
            return Err(DataError::file(&at, reason));
        }
        if (pixels.len() + columns) as u64 > super::MOST_BYTES {
            let reason = format!("more than {} bytes of pixels", super::MOST_BYTES);
            return Err(DataError::file(&at, reason));
        }
        for (column, field) in row.iter().enumerate() {
            if column == label_at {
                let label = String::from_utf8_lossy(field).trim().to_owned();
                if label.is_empty() || label.len() > 200 {
                    return Err(DataError::file(&at, "it has no label"));
                }
                lines.push(Line { file, number, set, label });
            } else {
                pixels.push(byte(field).ok_or_else(|| {
                    let shown: String = String::from_utf8_lossy(field).chars().take(40).collect();
                    DataError::file(&at, format!("`{shown}` is no pixel; 0 to 255 are"))
                })?);
            }
        }
    }
    Ok(())
}

/// A pixel. Some programs write whole numbers with a point.
fn byte(field: &[u8]) -> Option<u8> {
    let text = std::str::from_utf8(field).ok()?.trim();
    let whole = text.strip_suffix(".0").unwrap_or(text);
    whole.parse().ok()
}
