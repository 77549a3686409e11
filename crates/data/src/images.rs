//! Labelled pictures from wherever they are: the four files of MNIST, folders of PNG and JPEG files,
//! or tables of pixels. All become the same two columns: `image`, `U8`, in the form that a model
//! takes, and `label`, `U8`; with the names of the classes as an asset where they are not the ten
//! digits.

use std::path::Path;

use skep_wire::Dtype;

use crate::{Column, DataError, Dataset, ImageForm, Table, classes, mnist};

mod folder;
mod sheet;

/// Of data that does not say what is to be measured on, every fifth picture of a class is.
const HELD_OUT: u64 = 5;

/// The most bytes of pixels, over all pictures.
const MOST_BYTES: u64 = 8 << 30;

/// What pictures are brought to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSettings {
    /// Channels (1 or 3), height, width.
    pub shape: [usize; 3],
    /// How pictures of another size are brought to it. Where nothing is said: as ink if the classes
    /// are digits, else as photographs.
    pub form: Option<ImageForm>,
}

/// Opens the built-in sample (`mnist`), a folder with MNIST's four files, a folder
/// `{train,test}/CLASS/*.png` or `CLASS/*.png` (`.jpg`, `.jpeg`), a `.csv` file of labels and
/// pixels, or a folder with one for training and one for testing.
pub fn open(source: &str, settings: ImageSettings) -> Result<Dataset, DataError> {
    let refuse = |reason: String| DataError::Dataset { source_name: source.to_owned(), reason };
    let path = Path::new(source);
    if source == mnist::BUILT_IN || mnist::has_files(path) {
        return mnist::open(source);
    }
    if path.is_file() {
        if !sheet::is_sheet(path) {
            return Err(refuse("of files, only .csv is read; or give a folder".to_owned()));
        }
        return sheet::read(source, &[(path, None)], settings);
    }
    if !path.is_dir() {
        return Err(refuse(format!(
            "neither built in (`{}` is) nor a folder or .csv file that is there",
            mnist::BUILT_IN
        )));
    }
    if let Some(files) = sheet::find(path)? {
        let files: Vec<_> = files.iter().map(|(path, set)| (path.as_path(), *set)).collect();
        return sheet::read(source, &files, settings);
    }
    folder::read(source, path, settings)
}

/// Whether a picture is learned from or measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Train,
    Test,
}

impl Set {
    /// For data that does not say.
    fn by_place(place: u64) -> Self {
        if place % HELD_OUT == HELD_OUT - 1 { Self::Test } else { Self::Train }
    }
}

/// Which label each class has, from the names that the data gives them: numbers stand for
/// themselves, other names are numbered in the order of the alphabet.
struct ClassList {
    names: Vec<String>,
    numeric: bool,
}

impl ClassList {
    fn new<'name>(found: impl IntoIterator<Item = &'name str>) -> Result<Self, String> {
        let mut names: Vec<String> = found.into_iter().map(str::to_owned).collect();
        names.sort();
        names.dedup();
        let numbers: Option<Vec<usize>> = names.iter().map(|name| number(name)).collect();
        if let Some(numbers) = numbers {
            let most = numbers.into_iter().max().unwrap_or(0);
            let names = (0..=most).map(|number| number.to_string()).collect();
            return Ok(Self { names, numeric: true });
        }
        if names.len() > classes::MOST {
            let most = classes::MOST;
            return Err(format!(
                "it has {} classes; at most {most} can be told apart",
                names.len()
            ));
        }
        Ok(Self { names, numeric: false })
    }

    fn label(&self, name: &str) -> Option<u8> {
        let at = if self.numeric {
            number(name)?
        } else {
            self.names.iter().position(|known| known == name)?
        };
        u8::try_from(at).ok()
    }

    /// MNIST's.
    fn are_digits(&self) -> bool {
        self.numeric && self.names.len() <= 10
    }

    fn form(&self, settings: ImageSettings) -> ImageForm {
        let usual = if self.are_digits() { ImageForm::Ink } else { ImageForm::Photograph };
        settings.form.unwrap_or(usual)
    }
}

/// A label that is its own number.
fn number(name: &str) -> Option<usize> {
    let plain = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    name.parse().ok().filter(|&number| plain && number < classes::MOST)
}

/// The rows of one set, on their way into a table.
#[derive(Default)]
struct Rows {
    pixels: Vec<u8>,
    labels: Vec<u8>,
}

impl Rows {
    fn add(&mut self, pixels: &[u8], label: u8) -> Result<(), String> {
        if self.pixels.len() as u64 + pixels.len() as u64 > MOST_BYTES {
            return Err(format!("its pictures have more than {MOST_BYTES} bytes of pixels"));
        }
        self.pixels.extend_from_slice(pixels);
        self.labels.push(label);
        Ok(())
    }
}

/// Both sets become a dataset.
fn join(
    source: &str,
    [train, test]: [Rows; 2],
    classes: &ClassList,
    shape: [usize; 3],
) -> Result<Dataset, DataError> {
    let refuse = |reason: String| DataError::Dataset { source_name: source.to_owned(), reason };
    for (rows, set) in [(&train, "training"), (&test, "test")] {
        if rows.labels.is_empty() {
            return Err(refuse(format!("its {set} set is empty")));
        }
    }
    if let Some(&label) = test.labels.iter().find(|&label| !train.labels.contains(label)) {
        let name = classes.names.get(usize::from(label)).map_or("", String::as_str);
        return Err(refuse(format!(
            "the class `{name}` is in its test set, but not in its training set"
        )));
    }
    // As MNIST's own files have it, a single channel goes without saying.
    let shape = match shape {
        [1, height, width] => vec![height, width],
        all => all.to_vec(),
    };
    let table = |rows: Rows| {
        Table::new(vec![
            Column {
                name: "image".to_owned(),
                dtype: Dtype::U8,
                shape: shape.clone(),
                bytes: rows.pixels,
            },
            Column {
                name: "label".to_owned(),
                dtype: Dtype::U8,
                shape: vec![],
                bytes: rows.labels,
            },
        ])
    };
    let assets =
        if classes.are_digits() { Vec::new() } else { vec![classes::asset(&classes.names)] };
    let (train, test) = (table(train)?, table(test)?);
    Ok(Dataset { source: source.to_owned(), train, validation: None, test, assets })
}

#[cfg(test)]
mod tests;
