//! Texts in a folder: the Large Movie Review Dataset's `{train,test}/{pos,neg}/*.txt`; or
//! `train` and `test` as one file each; or one file that has both.

use std::path::{Path, PathBuf};

use super::{CLASSES, Corpus, FILE_KINDS, Kind, Set, kind_of, read_text, utf8};
use crate::DataError;

const FOLDERS: [&str; CLASSES.len()] = ["neg", "pos"];

pub(super) fn read(folder: &Path, corpus: &mut Corpus) -> Result<(), DataError> {
    // What `aclImdb_v1.tar.gz` unpacks to, as often with a folder around it as without.
    let inner = folder.join("aclImdb");
    let folder = if inner.is_dir() { &inner } else { folder };
    if folder.join("train").is_dir() || folder.join("test").is_dir() {
        for (set, name) in [(Set::Train, "train"), (Set::Test, "test")] {
            for (label, class) in (0u8..).zip(FOLDERS) {
                read_class(&folder.join(name).join(class), set, label, corpus)?;
            }
        }
        return Ok(());
    }
    let files = list(folder)?;
    let files: Vec<_> = files
        .into_iter()
        .filter(|(name, _)| kind_of(&name.to_ascii_lowercase()).is_some())
        .collect();
    let of_set = |set: Set| {
        let mut found = files.iter().filter(|(name, _)| {
            let name = name.to_ascii_lowercase();
            let stem = name.split('.').next().and_then(Set::of);
            stem == Some(set) && matches!(kind_of(&name), Some(Kind::Sheet | Kind::Lines))
        });
        found.next().map(|(_, path)| path)
    };
    if let (Some(train), Some(test)) = (of_set(Set::Train), of_set(Set::Test)) {
        corpus.read_file(train, Some(Set::Train))?;
        return corpus.read_file(test, Some(Set::Test));
    }
    match files.as_slice() {
        [(_, only)] => corpus.read_file(only, None),
        [] => Err(corpus.refuse(format!(
            "the folder has neither train/pos, train/neg, test/pos and test/neg nor {FILE_KINDS}; \
             give the folder that the Large Movie Review Dataset unpacks to"
        ))),
        several => {
            let names: Vec<_> = several.iter().take(5).map(|(name, _)| name.as_str()).collect();
            Err(corpus.refuse(format!(
                "the folder has several files that could be meant: {}; give one of them, or a \
                 folder with one for train and one for test",
                names.join(", ")
            )))
        }
    }
}

/// What is in a folder, by name.
fn list(folder: &Path) -> Result<Vec<(String, PathBuf)>, DataError> {
    let place = folder.to_string_lossy();
    let fail = |error| DataError::of_io(&place, error);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.is_file() {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            files.push((name, path));
        }
    }
    files.sort();
    Ok(files)
}

fn read_class(folder: &Path, set: Set, label: u8, corpus: &mut Corpus) -> Result<(), DataError> {
    if !folder.is_dir() {
        return Err(corpus.refuse(format!("it has no folder `{}`", folder.display())));
    }
    let mut bytes = Vec::new();
    for (name, path) in list(folder)? {
        if !name.ends_with(".txt") {
            continue;
        }
        let place = path.to_string_lossy();
        let file = std::fs::File::open(&path).map_err(|error| DataError::of_io(&place, error))?;
        let cut = read_text(file, &mut bytes).map_err(|error| DataError::of_io(&place, error))?;
        let text = utf8(&bytes, cut, &place)?;
        let name = format!("{}/{name}", FOLDERS[usize::from(label)]);
        corpus.add_text(&name, set, label, text)?;
    }
    Ok(())
}
