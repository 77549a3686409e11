//! `skep data split`, `copy` and `inspect` as a person meets them, and training on what they wrote;
//! pictures of one's own.

mod support;

use std::path::Path;
use std::process::Command;

use image::{DynamicImage, GrayImage, Luma};
use serde_json::{Value, json};
use support::{Ended, run_to_end, skep_command};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn run(place: &Path, arguments: &str) -> Ended {
    run_to_end(skep_command(arguments).current_dir(place))
}

#[track_caller]
fn done(place: &Path, arguments: &str) -> String {
    let ended = run(place, arguments);
    assert_eq!(ended.code, Some(0), "{arguments}: {}", ended.stderr);
    ended.stdout
}

#[track_caller]
fn result(place: &Path, arguments: &str) -> Value {
    let stdout = done(place, arguments);
    serde_json::from_str(stdout.lines().last().expect("a last line")).expect("JSON")
}

#[track_caller]
fn mistake(place: &Path, arguments: &str, parts: &[&str]) {
    let ended = run(place, arguments);
    assert_eq!(ended.code, Some(2), "{arguments}: {}{}", ended.stdout, ended.stderr);
    for part in parts {
        assert!(ended.stderr.contains(part), "{arguments}: {part}: {}", ended.stderr);
    }
}

#[test]
fn one_shard_of_images_is_enough_to_train_and_test_on() {
    let place = folder();
    let place = place.path();
    let text = done(place, "data split mnist --shards 5 --out parts");
    assert!(text.contains("5 shards of 2,000 training samples, 2,000 test samples"), "{text}");
    assert!(text.contains("--data parts/train-00001-of-00005.npz"), "{text}");

    let whole = result(place, "data inspect parts --json");
    assert_eq!(whole["samples"], json!({ "train": 10_000, "test": 2_000 }));
    assert_eq!(whole["columns"][0], json!({ "name": "image", "dtype": "U8", "shape": [28, 28] }));
    assert_eq!(whole["files"].as_array().map(Vec::len), Some(6));
    let built_in = result(place, "data inspect mnist --json");
    assert_eq!(whole["classes"], built_in["classes"], "no image is lost, doubled or mislabelled");

    let one = "train mnist --data parts/train-00003-of-00005.npz --epochs 4 --workers 2 --json";
    let trained = result(place, one);
    assert_eq!(trained["samples"], 4 * 1_900, "5 % are held out to validate on");
    assert!(trained["accuracy"].as_f64().expect("a share") > 0.8, "{trained}");
    let all = result(place, "train mnist --data parts --steps 5 --workers 1 --json --name all");
    assert_eq!(all["state"], "done", "{all}");

    // A split can be split again, into another form and by label.
    let again = "data split mnist --data parts --shards 10 --by label --format tar.gz \
                 --validation 0.1 --out labels --json";
    let again = result(place, again);
    let files = again["datasets"][0]["files"].as_array().expect("files");
    let train = files.iter().filter(|file| file["split"] == "train");
    for file in train {
        let labels = file["labels"].as_object().expect("labels").len();
        assert!(labels <= 3, "{file}");
    }
    let shard = result(place, "data inspect labels/train-00001-of-00010.tar.gz --json");
    assert_eq!(shard["samples"], json!({ "train": 900, "validation": 1_000, "test": 2_000 }));
    assert_eq!(shard["split"], "label");
    let flags =
        "train mnist --data labels/train-00002-of-00010.tar.gz --epochs 1 --workers 1 --json";
    assert_eq!(result(place, &format!("{flags} --name label"))["samples"], 900);
}

#[test]
fn shards_of_texts_share_a_vocabulary() {
    let place = folder();
    let place = place.path();
    let split = "data split imdb --shards 3 --out parts --format safetensors \
                 --set model.settings.length=60";
    done(place, split);
    let text = done(place, "data inspect parts/train-00001-of-00003.safetensors");
    for part in ["negative", "positive", "words of a training text", "all of them sound", "█"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let vocabularies: Vec<Vec<u8>> = (1..=3)
        .map(|number| {
            let flags = format!(
                "train imdb --data parts/train-0000{number}-of-00003.safetensors --workers 1 \
                 --epochs 15 --batch 20 --json --name part-{number}"
            );
            let trained = result(place, &flags);
            assert!(trained["accuracy"].as_f64().expect("a share") > 0.8, "{trained}");
            let assets = place.join(format!("skep-runs/runs/part-{number}/assets"));
            std::fs::read(assets.join("vocabulary.json")).expect("is kept")
        })
        .collect();
    assert!(vocabularies.iter().all(|vocabulary| *vocabulary == vocabularies[0]));
    // The other model takes the length over too, and another one is refused.
    let other = "train imdb --model text-bigru --data parts --steps 2 --workers 1 --json --name both \
                 --set model.settings.hidden=4";
    assert_eq!(result(place, other)["state"], "done");
    let longer = "train imdb --data parts --set model.settings.length=80";
    mistake(place, longer, &["have 60 numbers", "`length` 80", "split again"]);
    mistake(place, "train mnist --data parts", &["column `image`"]);
}

#[test]
fn copies_are_whole_datasets_of_their_own() {
    let place = folder();
    let place = place.path();
    let text = done(place, "data copy imdb --copies 3 --out copies");
    assert!(text.contains("3 copies of"), "{text}");
    let of = |number: usize| result(place, &format!("data inspect copies/copy-{number} --json"));
    let (first, third) = (of(1), of(3));
    assert_eq!(first["samples"], third["samples"]);
    assert_eq!(third["copy"], json!({ "number": 3, "of": 3 }));
    let built_in = result(place, "data inspect imdb --json");
    assert_eq!(first["classes"], built_in["classes"]);
    assert_eq!(first["lengths"], built_in["lengths"]);
    let trained = result(place, "train imdb --data copies/copy-2 --steps 2 --workers 1 --json");
    assert_eq!(trained["run"], "imdb");
}

#[test]
fn numpy_opens_what_was_split() {
    let program = std::env::var("SKEP_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let check = Command::new(&program).args(["-c", "import numpy"]).output();
    if !check.is_ok_and(|output| output.status.success()) {
        let what = "no Python with numpy (SKEP_PYTHON, or python3)";
        assert!(std::env::var_os("CI").is_none(), "{what}, and under CI nothing is skipped");
        println!("skipped: {what}");
        return;
    }
    let place = folder();
    done(place.path(), "data split mnist --shards 4 --out parts --validation 0.2");
    let script = "\
import glob, numpy
shards = [numpy.load(path) for path in sorted(glob.glob('parts/*.npz'))]
images = numpy.concatenate([shard['image'] for shard in shards])
labels = numpy.concatenate([shard['label'] for shard in shards])
print(images.shape, images.dtype, labels.shape, labels.dtype, labels.max(), len({row.tobytes() for row in images}))
";
    let mut python = Command::new(program);
    let ended = run_to_end(python.args(["-c", script]).current_dir(place.path()));
    assert_eq!(
        ended.stdout.trim(),
        "(12000, 28, 28) uint8 (12000,) uint8 9 12000",
        "{}",
        ended.stderr
    );
}

#[test]
fn mistakes_are_named_and_exit_with_2() {
    let place = folder();
    let place = place.path();
    std::fs::create_dir(place.join("empty")).expect("makes");
    done(place, "data split mnist --shards 2 --out parts");
    mistake(place, "data split mnist --shards 3 --out parts", &["there is a dataset in"]);
    mistake(place, "data split mnist --shards 2 --out s3://bucket/x", &["no `s3://` stores"]);
    mistake(place, "data split mnist --shards 0 --out x", &["0 shards cannot be cut"]);
    mistake(place, "data split mnist --shards 99999 --out x", &["from 10000 training rows"]);
    mistake(place, "data split mnist --shards 2 --validation 1 --out x", &["share of 1"]);
    mistake(place, "data split nothing --shards 2 --out x", &["no task or job file `nothing`"]);
    mistake(place, "data copy mnist --copies 0 --out x", &["--copies must be 1 or more"]);
    assert!(!place.join("x").exists(), "nothing was made");
    mistake(place, "data inspect empty", &["as mnist", "as reviews", "--task"]);
    mistake(place, "data inspect nowhere", &["neither there nor a task"]);
    mistake(place, "train mnist --data empty", &["`./empty`", "nor a folder of .png"]);

    let shard = place.join("parts/train-00002-of-00002.npz");
    let good = std::fs::read(&shard).expect("is there");
    std::fs::write(&shard, &good[..good.len() - 100]).expect("writes");
    for command in ["train mnist --data parts", "data inspect parts"] {
        mistake(place, command, &["train-00002-of-00002.npz", "cut short"]);
    }
    let mut other = good;
    other[1000] ^= 1;
    std::fs::write(&shard, other).expect("writes");
    let one = "train mnist --data parts/train-00002-of-00002.npz";
    mistake(place, one, &["train-00002-of-00002.npz", "SHA-256"]);
    mistake(place, "train mnist --data parts/test.npz", &["it is the test set"]);
    std::fs::remove_file(place.join("parts/dataset.json")).expect("is there");
    mistake(place, one, &["needs the `dataset.json` beside it"]);
}

/// A light bar on a dark ground, upright or lying, at some place.
fn bar(side: u32, upright: bool, place: u32) -> DynamicImage {
    DynamicImage::ImageLuma8(GrayImage::from_fn(side, side, |x, y| {
        let (across, along) = if upright { (x, y) } else { (y, x) };
        let middle = side / 3 + place % (side / 3);
        let inside = across.abs_diff(middle) < side / 10 && along.abs_diff(side / 2) < side / 3;
        Luma([if inside { 220 } else { 10 + (x * y % 13) as u8 }])
    }))
}

#[test]
fn pictures_of_ones_own_are_learned_and_answered_by_name() {
    let place = folder();
    let place = place.path();
    for (class, upright) in [("upright", true), ("lying", false)] {
        let folder = place.join("bars").join(class);
        std::fs::create_dir_all(&folder).expect("makes");
        for at in 0..100 {
            let picture = bar(40 + at % 7, upright, at * 5);
            picture.save(folder.join(format!("{at:03}.png"))).expect("writes");
        }
    }
    let seen = result(place, "data inspect bars --json");
    assert_eq!(seen["samples"], json!({ "train": 160, "test": 40 }));
    assert_eq!(seen["classes"][1]["name"], "upright");

    // The same through a split: the names travel with it.
    done(place, "data split mnist --data bars --shards 2 --out parts");
    let flags = "--epochs 8 --batch 8 --workers 1 --json";
    for (data, name) in [("bars", "whole"), ("parts/train-00001-of-00002.npz", "shard")] {
        let trained = result(place, &format!("train mnist --data {data} --name {name} {flags}"));
        assert!(trained["accuracy"].as_f64().expect("a share") > 0.9, "{trained}");
        let path = place.join("skep-runs").join(name).to_string_lossy().into_owned();
        let runtime = tokio::runtime::Runtime::new().expect("starts");
        let source = runtime
            .block_on(skep_serve::open(
                &[path],
                None,
                &skep_learn::tasks(),
                &skep_serve::GraphSettings::default(),
            ))
            .unwrap_or_else(|error| panic!("{error}"));
        let inference = source.model.inference.expect("it can be asked");
        assert_eq!(inference.classes, ["lying", "upright"]);
    }
    let few = "train mnist --data bars --set model.settings.classes=1";
    mistake(place, few, &["`classes` are 1", "labels up to 1"]);
    mistake(
        place,
        "train mnist --data bars --set model.settings.form=oil",
        &["`ink` or `photograph`"],
    );
    std::fs::write(place.join("bars/lying/broken.png"), b"no picture").expect("writes");
    mistake(place, "train mnist --data bars", &["bars/lying/broken.png", "not a picture"]);
}
