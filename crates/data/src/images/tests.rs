use std::path::Path;

use image::{DynamicImage, GrayImage, ImageFormat, Luma};

use super::*;

const SETTINGS: ImageSettings = ImageSettings { shape: [1, 28, 28], form: None };

/// A light bar on black, upright or lying.
fn bar(side: u32, upright: bool) -> DynamicImage {
    let (thick, long) = (side / 6, side * 3 / 4);
    let picture = GrayImage::from_fn(side, side, |x, y| {
        let (across, along) = if upright { (x, y) } else { (y, x) };
        let inside = across.abs_diff(side / 2) < thick && along.abs_diff(side / 2) < long / 2;
        Luma([if inside { 230 } else { 5 }])
    });
    DynamicImage::ImageLuma8(picture)
}

fn save(path: &Path, picture: &DynamicImage) {
    std::fs::create_dir_all(path.parent().expect("has a folder")).expect("makes");
    let format = ImageFormat::from_path(path).expect("known");
    picture.save_with_format(path, format).expect("writes");
}

fn error(path: &Path) -> String {
    open(&path.to_string_lossy(), SETTINGS).expect_err("is refused").to_string()
}

fn names(dataset: &Dataset) -> Option<Vec<String>> {
    classes::names(dataset).expect("are sound")
}

#[test]
fn folders_of_pictures_of_any_size_become_rows_of_the_models() {
    let folder = tempfile::tempdir().expect("a folder");
    for at in 0..10 {
        save(&folder.path().join(format!("upright/{at}.png")), &bar(40 + at, true));
        save(&folder.path().join(format!("lying/{at}.JPG")), &bar(90, false));
    }
    save(&folder.path().join(".hidden/x.png"), &bar(9, true));
    let source = folder.path().to_string_lossy();
    let dataset = open(&source, SETTINGS).expect("opens");
    assert_eq!((dataset.train.rows(), dataset.test.rows()), (16, 4));
    assert_eq!(names(&dataset).expect("are kept"), ["lying", "upright"]);
    assert!(dataset.train.require("image", Dtype::U8, &[28, 28]).is_ok());
    let labels = dataset.train.column("label").expect("is there").u8s();
    assert_eq!(labels, [[0; 8], [1; 8]].concat());
    assert_eq!(open(&source, SETTINGS).expect("opens"), dataset, "always the same");
    // In the middle of a bar it is light, at its side it is dark.
    let image = dataset.train.column("image").expect("is there").u8s();
    let at = |row: usize, y: usize, x: usize| image[row * 784 + y * 28 + x];
    assert!(at(0, 14, 6) > 200 && at(0, 6, 14) < 50 && at(8, 6, 14) > 200 && at(8, 14, 6) < 50);
}

#[test]
fn digits_are_numbers_and_pictures_of_the_right_size_stay_as_they_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let picture = bar(28, true);
    for class in ["3", "7"] {
        for set in ["train", "test"] {
            save(&folder.path().join(format!("{set}/{class}/a.png")), &picture);
        }
    }
    let dataset = open(&folder.path().to_string_lossy(), SETTINGS).expect("opens");
    assert_eq!(dataset.train.column("label").expect("is there").u8s(), [3, 7]);
    assert_eq!(names(&dataset), None, "the ten digits go without saying");
    let image = &dataset.test.column("image").expect("is there").u8s()[..784];
    assert_eq!(image, picture.to_luma8().into_raw());
}

#[test]
fn tables_of_pixels_are_read_with_a_header_or_without() {
    let folder = tempfile::tempdir().expect("a folder");
    let header: Vec<String> = (0..784).map(|at| format!("pixel{at}")).collect();
    let line =
        |label: &str, value: u8| format!("{label},{}\n", vec![value.to_string(); 784].join(","));
    let body: String = (0..10).map(|at| line(&(at % 2).to_string(), at)).collect();
    let path = folder.path().join("digits.csv");
    std::fs::write(&path, format!("label,{}\n{body}", header.join(","))).expect("writes");
    let with = open(&path.to_string_lossy(), SETTINGS).expect("opens");
    assert_eq!((with.train.rows(), with.test.rows()), (8, 2));
    assert_eq!(with.test.column("image").expect("is there").u8s()[0], 8);
    std::fs::write(&path, &body).expect("writes");
    let without = open(&folder.path().to_string_lossy(), SETTINGS).expect("opens");
    assert_eq!((&with.train, &with.test), (&without.train, &without.test));

    // One file for each set, names for classes, and another size.
    std::fs::remove_file(&path).expect("is there");
    let small = "cat,0,9,0,0,200,0,0,0,0\ndog,1,2,3,4,5,6,7,8,9\n";
    std::fs::write(folder.path().join("my_train.csv"), small).expect("writes");
    std::fs::write(folder.path().join("my_test.csv"), "dog,1,2,3,4,5,6,7,8,9\n").expect("writes");
    let named = open(&folder.path().to_string_lossy(), SETTINGS).expect("opens");
    assert_eq!(names(&named).expect("are kept"), ["cat", "dog"]);
    assert_eq!(named.test.column("label").expect("is there").u8s(), [1]);
}

#[test]
fn what_cannot_be_used_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    assert!(error(folder.path()).contains("nor a folder of .png"));
    assert!(error(&folder.path().join("nowhere")).contains("neither built in"));
    let csv = folder.path().join("x.csv");
    for (text, part) in [
        ("", "no line"),
        ("1,2,3\n", "nor a square"),
        ("1,0,0,0,0\n1,0,0,0\n", "4 columns where the first has 5"),
        ("1,0,0,0,0\n1,0,0,0,256\n", "line 2`: `256` is no pixel"),
        ("1,0,0,0,0\n,0,0,0,1\n", "line 2`: it has no label"),
        ("pixel0,pixel1,pixel2\n0,0,0\n", "no column `label`"),
        ("cat,0,0,0,0\n", "test set is empty"),
        ("1,0,0,0,0\n", "line 1`: there is nothing on the picture"),
        ("1\n", "1 columns"),
    ] {
        std::fs::write(&csv, text).expect("writes");
        let error = error(&csv);
        assert!(error.contains(part), "{text}: {error}");
    }
    std::fs::rename(&csv, folder.path().join("x.txt")).expect("moves");
    assert!(error(&folder.path().join("x.txt")).contains("only .csv is read"));
    std::fs::create_dir(folder.path().join("cat")).expect("makes");
    assert!(error(folder.path()).contains("nor a folder of .png"));
    save(&folder.path().join("dog/a.png"), &bar(28, true));
    assert!(error(folder.path()).contains("class `cat` has no .png"));
    std::fs::write(folder.path().join("cat/a.png"), b"GIF89a").expect("writes");
    assert!(error(folder.path()).contains("cat/a.png`: this is not a picture"));
    std::fs::remove_dir_all(folder.path().join("cat")).expect("is there");
    std::fs::remove_dir_all(folder.path().join("dog")).expect("is there");
    save(&folder.path().join("train/cat/a.png"), &bar(28, true));
    save(&folder.path().join("test/dog/a.png"), &bar(28, true));
    assert!(error(folder.path()).contains("`dog` is in its test set, but not in its training set"));
}
