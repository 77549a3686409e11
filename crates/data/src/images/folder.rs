//! Pictures in folders that are called like their classes: `{train,test}/CLASS/*.png`, or
//! `CLASS/*.png`, of which some are held out to measure on.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::{ClassList, ImageSettings, Rows, Set, join};
use crate::{DataError, Dataset, picture};

/// The most bytes of a picture file.
const MOST_FILE_BYTES: u64 = 64 << 20;

pub(super) fn read(
    source: &str,
    folder: &Path,
    settings: ImageSettings,
) -> Result<Dataset, DataError> {
    let refuse = |reason: String| DataError::Dataset { source_name: source.to_owned(), reason };
    let (train, test) = (folder.join("train"), folder.join("test"));
    let parted = train.is_dir() && test.is_dir();
    let roots = if parted {
        vec![(train, Some(Set::Train)), (test, Some(Set::Test))]
    } else {
        vec![(folder.to_owned(), None)]
    };
    let mut found = Vec::new();
    for (root, set) in roots {
        for class in list(&root)?.into_iter().filter(|entry| entry.is_dir()) {
            let name = class.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let pictures: Vec<_> =
                list(&class)?.into_iter().filter(|path| is_picture(path)).collect();
            found.push((name, set, pictures));
        }
    }
    if found.iter().all(|(_, _, pictures)| pictures.is_empty()) {
        return Err(refuse(
            "the folder has neither the four files of MNIST (`train-images-idx3-ubyte` to \
             `t10k-labels-idx1-ubyte`, .gz or not), nor .csv files, nor a folder of .png or .jpg \
             files for each class"
                .to_owned(),
        ));
    }
    if let Some((name, _, _)) = found.iter().find(|(_, _, pictures)| pictures.is_empty()) {
        let reason = format!("the folder of the class `{name}` has no .png, .jpg or .jpeg file");
        return Err(refuse(reason));
    }
    let classes = ClassList::new(found.iter().map(|(name, _, _)| name.as_str())).map_err(refuse)?;
    let form = classes.form(settings);
    let (mut sets, mut bytes) = ([Rows::default(), Rows::default()], Vec::new());
    for (name, set, pictures) in &found {
        let label = classes.label(name);
        let label = label.ok_or_else(|| refuse(format!("`{name}` cannot be a class")))?;
        for (path, place) in pictures.iter().zip(0..) {
            let shown = path.to_string_lossy();
            read_file(path, &mut bytes).map_err(|error| DataError::of_io(&shown, error))?;
            if bytes.len() as u64 > MOST_FILE_BYTES {
                let reason = format!("it has more than {MOST_FILE_BYTES} bytes");
                return Err(DataError::file(&shown, reason));
            }
            let pixels = picture::to_sample(&bytes, settings.shape, form)
                .map_err(|error| DataError::file(&shown, error.to_string()))?;
            let set = set.unwrap_or_else(|| Set::by_place(place));
            sets[usize::from(set == Set::Test)].add(&pixels, label).map_err(refuse)?;
        }
    }
    join(source, sets, &classes, settings.shape)
}

fn read_file(path: &Path, into: &mut Vec<u8>) -> std::io::Result<()> {
    into.clear();
    File::open(path)?.take(MOST_FILE_BYTES + 1).read_to_end(into)?;
    Ok(())
}

fn is_picture(path: &Path) -> bool {
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_ascii_lowercase());
    path.is_file() && ending.is_some_and(|ending| ["png", "jpg", "jpeg"].contains(&&*ending))
}

/// What is in a folder, by name, without what is hidden.
fn list(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let place = folder.to_string_lossy();
    let fail = |error| DataError::of_io(&place, error);
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        if !entry.file_name().to_string_lossy().starts_with('.') {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}
