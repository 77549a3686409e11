//! MNIST and every dataset in its four files: handwritten digits, Fashion-MNIST, KMNIST, EMNIST.
//!
//! A sample of MNIST is built in (`assets/README.md` says which), so that `skep train mnist` needs
//! no download: 10,000 images to learn from, 2,000 to measure on.

use std::path::{Path, PathBuf};

use skep_wire::Dtype;

use crate::idx::{self, IdxArray};
use crate::{Column, DataError, Dataset, Table, classes};

/// The name of the built-in sample.
pub const BUILT_IN: &str = "mnist";

const TRAIN_IMAGES: &[u8] = include_bytes!("../assets/train-images-idx3-ubyte.gz");
const TRAIN_LABELS: &[u8] = include_bytes!("../assets/train-labels-idx1-ubyte.gz");
const TEST_IMAGES: &[u8] = include_bytes!("../assets/t10k-images-idx3-ubyte.gz");
const TEST_LABELS: &[u8] = include_bytes!("../assets/t10k-labels-idx1-ubyte.gz");

/// The four files.
const NAMES: [&str; 4] = ["train-images", "train-labels", "t10k-images", "t10k-labels"];

/// Opens the built-in sample (`mnist`) or a folder with the four files
/// `{train,t10k}-{images-idx3,labels-idx1}-ubyte`, compressed or not. Columns: `image`, `U8`
/// [height, width], and `label`, `U8`. A `classes.json` beside them, a list, names the classes.
pub fn open(source: &str) -> Result<Dataset, DataError> {
    let (train, test) = if source == BUILT_IN {
        let images = idx::decode("train-images (built in)", TRAIN_IMAGES)?;
        let labels = idx::decode("train-labels (built in)", TRAIN_LABELS)?;
        let train = join(source, "training", images, labels)?;
        let images = idx::decode("t10k-images (built in)", TEST_IMAGES)?;
        let labels = idx::decode("t10k-labels (built in)", TEST_LABELS)?;
        (train, join(source, "test", images, labels)?)
    } else {
        read_folder(source)?
    };
    if train.columns()[0].shape != test.columns()[0].shape {
        return Err(DataError::Dataset {
            source_name: source.to_owned(),
            reason: format!(
                "training images are {:?}, test images {:?}",
                train.columns()[0].shape,
                test.columns()[0].shape
            ),
        });
    }
    let mut assets = Vec::new();
    let names = Path::new(source).join(classes::ASSET);
    if source != BUILT_IN && names.is_file() {
        let place = names.to_string_lossy();
        let bytes = std::fs::read(&names).map_err(|error| DataError::of_io(&place, error))?;
        assets.push(classes::asset(&classes::parse(&place, &bytes)?));
    }
    Ok(Dataset { source: source.to_owned(), train, validation: None, test, assets })
}

/// Whether a folder has any of the four files.
pub(crate) fn has_files(folder: &Path) -> bool {
    NAMES.iter().any(|name| find(folder, name).is_some())
}

fn read_folder(source: &str) -> Result<(Table, Table), DataError> {
    let refuse = |reason: String| DataError::Dataset { source_name: source.to_owned(), reason };
    let folder = Path::new(source);
    if !folder.is_dir() {
        return Err(refuse(format!(
            "neither built in (`{BUILT_IN}` is) nor a folder that is there"
        )));
    }
    let found = NAMES.map(|name| (name, find(folder, name)));
    let missing: Vec<String> = found
        .iter()
        .filter(|(_, path)| path.is_none())
        .map(|(name, _)| format!("`{name}-idx{}-ubyte[.gz]`", rank_of(name)))
        .collect();
    let [Some(train_images), Some(train_labels), Some(test_images), Some(test_labels)] =
        found.map(|(_, path)| path)
    else {
        return Err(refuse(format!("the folder lacks {}", missing.join(", "))));
    };
    let train = join(source, "training", idx::read(&train_images)?, idx::read(&train_labels)?)?;
    let test = join(source, "test", idx::read(&test_images)?, idx::read(&test_labels)?)?;
    Ok((train, test))
}

fn rank_of(name: &str) -> u8 {
    if name.ends_with("images") { 3 } else { 1 }
}

/// Some unpackers turn the dash before `idx` into a dot.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let rank = rank_of(name);
    ["-", "."]
        .iter()
        .flat_map(|dash| ["", ".gz"].map(|end| format!("{name}{dash}idx{rank}-ubyte{end}")))
        .map(|file| folder.join(file))
        .find(|path| path.is_file())
}

/// Images and labels become the two columns of a table.
fn join(source: &str, set: &str, images: IdxArray, labels: IdxArray) -> Result<Table, DataError> {
    let refuse = |reason: String| DataError::Dataset { source_name: source.to_owned(), reason };
    let (&[count, height, width], Dtype::U8) = (&images.shape[..], images.dtype) else {
        return Err(refuse(format!(
            "{set} images are {:?} {:?}; bytes [count, height, width] are needed",
            images.dtype, images.shape
        )));
    };
    let (&[label_count], Dtype::U8) = (&labels.shape[..], labels.dtype) else {
        return Err(refuse(format!(
            "{set} labels are {:?} {:?}; bytes [count] are needed",
            labels.dtype, labels.shape
        )));
    };
    if count != label_count {
        return Err(refuse(format!("{count} {set} images, but {label_count} labels")));
    }
    let shape = vec![height, width];
    Table::new(vec![
        Column { name: "image".to_owned(), dtype: Dtype::U8, shape, bytes: images.bytes },
        Column { name: "label".to_owned(), dtype: Dtype::U8, shape: vec![], bytes: labels.bytes },
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(shape: &[usize]) -> Vec<u8> {
        let bytes = vec![3; shape.iter().product()];
        idx::encode(&IdxArray { dtype: Dtype::U8, shape: shape.to_vec(), bytes }).expect("encodes")
    }

    fn write(folder: &Path, files: &[(&str, &[usize])]) {
        for (name, shape) in files {
            std::fs::write(folder.join(name), file(shape)).expect("writes");
        }
    }

    #[test]
    fn the_built_in_sample_is_a_fair_one() {
        let dataset = open("mnist").expect("is built in");
        // How often each digit is in the whole of MNIST.
        let train = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949];
        let test = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009];
        for (table, rows, step, whole) in
            [(&dataset.train, 10_000, 6, train), (&dataset.test, 2_000, 5, test)]
        {
            assert_eq!(table.rows(), rows);
            table.require("image", Dtype::U8, &[28, 28]).expect("images");
            let labels = table.require("label", Dtype::U8, &[]).expect("labels").u8s();
            for (digit, &all) in (0u8..).zip(&whole) {
                let count = labels.iter().filter(|&&label| label == digit).count();
                assert!(count.abs_diff(all / step) <= 1, "{count} of {all} are a {digit}");
            }
        }
        let pixels = dataset.train.column("image").expect("images").u8s();
        let mean = pixels.iter().map(|&pixel| u64::from(pixel)).sum::<u64>() / pixels.len() as u64;
        assert!((30..37).contains(&mean), "MNIST's mean is 33, this is {mean}");
    }

    #[test]
    fn a_folder_may_have_any_of_the_usual_names() {
        let folder = tempfile::tempdir().expect("a folder");
        write(
            folder.path(),
            &[
                ("train-images-idx3-ubyte", &[4, 5, 6]),
                ("train-labels.idx1-ubyte", &[4]),
                ("t10k-images-idx3-ubyte.gz", &[2, 5, 6]),
                ("t10k-labels-idx1-ubyte", &[2]),
            ],
        );
        let source = folder.path().to_string_lossy();
        let dataset = open(&source).expect("all are there; one is not compressed in spite of .gz");
        assert_eq!((dataset.train.rows(), dataset.test.rows()), (4, 2));
        assert!(dataset.test.require("image", Dtype::U8, &[5, 6]).is_ok());
        assert_eq!(dataset.source, source);
    }

    #[test]
    fn what_is_missing_or_does_not_fit_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let source = folder.path().to_string_lossy();
        write(folder.path(), &[("train-images-idx3-ubyte", &[4, 5, 6])]);
        let error = open(&source).expect_err("three are missing").to_string();
        for name in ["train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"] {
            assert!(error.contains(name), "{error}");
        }
        assert!(!error.contains("train-images"), "{error}");
        let rest: [(&str, &[usize]); 3] = [
            ("train-labels-idx1-ubyte", &[3]),
            ("t10k-images-idx3-ubyte", &[2, 5, 5]),
            ("t10k-labels-idx1-ubyte", &[2]),
        ];
        write(folder.path(), &rest);
        let error = open(&source).expect_err("counts differ").to_string();
        assert!(error.contains("4 training images, but 3 labels"), "{error}");
        write(folder.path(), &[("train-labels-idx1-ubyte", &[4])]);
        let error = open(&source).expect_err("sizes differ").to_string();
        assert!(error.contains("[5, 6]") && error.contains("[5, 5]"), "{error}");
        write(folder.path(), &[("train-labels-idx1-ubyte", &[4, 1])]);
        assert!(open(&source).is_err());
        let error = open("fashion").expect_err("not there").to_string();
        assert!(error.contains("`mnist`"), "{error}");
    }
}
