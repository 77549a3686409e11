//! `skep model` as a person meets it, and what Keras, PyTorch, h5py and onnxruntime say of the files
//! that it writes.
//!
//! `SKEP_KERAS` names an interpreter with keras, jax, h5py, onnx and onnxruntime, `SKEP_PYTHON` one
//! with PyTorch; `python3` otherwise. Where a package is missing the test says so and is skipped;
//! under CI it fails.

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use skep_data::{LoadedTensor, ModelFormat, model_file};
use skep_learn::{Assets, Task};
use skep_wire::{Dtype, Frame, Job, Layout};
use support::{Ended, HiveSetup, run_to_end, skep, skep_command};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn fixtures() -> PathBuf {
    repository().join("crates/data/tests/fixtures/models")
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn run(place: &Path, arguments: &str) -> Ended {
    run_to_end(skep_command(arguments).current_dir(place))
}

#[track_caller]
fn good(place: &Path, arguments: &str) -> String {
    let ended = run(place, arguments);
    assert_eq!(ended.code, Some(0), "{arguments}: {}", ended.stderr);
    ended.stdout
}

#[track_caller]
fn json(place: &Path, arguments: &str) -> Value {
    let text = good(place, arguments);
    serde_json::from_str(text.lines().last().expect("a last line")).expect("JSON")
}

/// Runs `scripts/check_model.py`, if there is an interpreter with these packages.
#[track_caller]
fn check(variable: &str, packages: &str, arguments: &[&Path]) {
    let program = std::env::var(variable).unwrap_or_else(|_| "python3".to_owned());
    let import = Command::new(&program)
        .args(["-c", &format!("import {packages}")])
        .env("KERAS_BACKEND", "jax")
        .output();
    if !import.is_ok_and(|output| output.status.success()) {
        let what = format!("no Python with {packages} ({variable}, or python3)");
        assert!(std::env::var_os("CI").is_none(), "{what}, and under CI nothing is skipped");
        println!("skipped: {what}");
        return;
    }
    let script = repository().join("scripts/check_model.py");
    let ended = run_to_end(
        Command::new(&program).arg(script).args(arguments).env("PYTHONDONTWRITEBYTECODE", "1"),
    );
    println!("{}{}", ended.stdout, ended.stderr);
    assert_eq!(ended.code, Some(0), "{arguments:?}: {}", ended.stderr);
}

/// Copies of fixtures in a folder of their own.
fn with_copies(place: &Path, names: &[&str]) {
    std::fs::create_dir_all(place.join("models")).expect("makes");
    for name in names {
        std::fs::copy(fixtures().join(name), place.join("models").join(name)).expect("copies");
    }
}

#[test]
fn keras_opens_the_average_of_its_models_and_answers_as_it_should() {
    let place = folder();
    for ending in ["h5", "keras"] {
        let names = ["a", "b", "c"].map(|name| format!("{name}.{ending}"));
        let _ = std::fs::remove_dir_all(place.path().join("models"));
        with_copies(place.path(), &[&names[2], &names[0], &names[1]]);
        let save = place.path().join(format!("mean.{ending}"));
        let flags = format!("model average --dir models --save mean.{ending} --weights 3,1,1");
        let text = good(place.path(), &flags);
        assert!(text.contains("60.00 %") && text.contains(&names[0]), "{text}");
        let truth = fixtures().join("mean.npz");
        check("SKEP_KERAS", "keras, jax, h5py", &[Path::new("keras"), &save, &truth]);
    }
}

#[test]
fn the_average_does_not_depend_on_how_files_are_listed_and_leaves_itself_out() {
    let place = folder();
    with_copies(place.path(), &["a.npz", "b.npz", "c.npz"]);
    let average = || {
        good(place.path(), "model average --dir models --save models/mean.npz");
        std::fs::read(place.path().join("models/mean.npz")).expect("was written")
    };
    let first = average();
    assert!(average() == first, "the average of last time is no model of this time");
    let in_order = "model average models/a.npz models/b.npz models/c.npz --save again.npz --json";
    let said = json(place.path(), in_order);
    assert_eq!(said["models"].as_array().expect("a list").len(), 3);
    assert!(std::fs::read(place.path().join("again.npz")).expect("was written") == first);
    // The same as a safetensors file, which other tools average to the same.
    good(place.path(), "model convert again.npz again.safetensors");
    let numpy = model_file::load(place.path().join("again.npz")).expect("reads");
    assert_eq!(model_file::load(place.path().join("again.safetensors")).expect("reads"), numpy);
}

#[test]
fn mistakes_are_named_and_leave_nothing() {
    let place = folder();
    with_copies(place.path(), &["a.h5", "b.npz"]);
    std::fs::create_dir(place.path().join("empty")).expect("makes");
    std::fs::create_dir(place.path().join("one")).expect("makes");
    std::fs::copy(fixtures().join("a.h5"), place.path().join("one/a.h5")).expect("copies");
    std::fs::copy(fixtures().join("other.h5"), place.path().join("other.h5")).expect("copies");
    let nan = LoadedTensor {
        dtype: Dtype::F32,
        shape: vec![2],
        bytes: [1f32.to_le_bytes(), f32::NAN.to_le_bytes()].concat(),
    };
    let tensors = BTreeMap::from([("w".to_owned(), nan)]);
    let file = model_file::encode(ModelFormat::Safetensors, &tensors, &BTreeMap::new(), None);
    std::fs::write(place.path().join("nan.safetensors"), file.expect("encodes")).expect("writes");
    for (flags, parts) in [
        ("average --dir empty --save x.h5", &["no model files in empty"][..]),
        ("average --dir one --save x.h5", &["one model file alone in one", "two or more"]),
        ("average --dir nowhere --save x.h5", &["nowhere"]),
        ("average --dir models --save x.h5", &["b.npz is a npz file", "skep model convert"]),
        (
            "average models/a.h5 other.h5 --save x.h5",
            &["other.h5:", "hidden/kernel` has shape [4, 5], not [4, 3]"],
        ),
        (
            "average nan.safetensors nan.safetensors --save x.npz",
            &["`w` has 1 of 2 numbers that are not finite"],
        ),
        ("average models/a.h5 models/a.h5 --save x", &["x has no ending", ".safetensors"]),
        ("average models/a.h5 models/a.h5 --save x.h5 --weights 1", &["1 weights for 2"]),
        ("average models/a.h5 models/a.h5 --save x.h5 --weights 1,-1", &["`-1`"]),
        ("average models/a.h5 models/a.h5 --save x.h5 --weights 0,0", &["all 0"]),
        (
            "average models/a.h5 models/a.h5 --save x.h5 --weights samples",
            &["does not say how many samples"],
        ),
        ("average models/a.h5 models/a.h5 --save x.keras", &["no Keras model"]),
        ("convert models/a.h5 x.keras", &["--like"]),
        ("convert models/b.npz x.h5 --like models/a.h5", &["`small/hidden/bias` is not there"]),
        ("inspect nowhere.h5", &["nowhere.h5"]),
        ("evaluate models/a.h5", &["does not say what kind", "--model"]),
        ("evaluate models/a.h5 --model lenet5", &["models/a.h5", "`conv1.bias` is missing"]),
        ("evaluate models/a.h5 --model lenet6", &["no kind of model `lenet6`"]),
        ("export models/a.h5 --onnx --save x.onnx", &["does not say what kind"]),
        ("pull skep-runs/none@best --save x.h5", &["there is no run at `skep-runs/none`"]),
        ("pull none@beste --save x.h5", &["`@beste` is no version", "@best"]),
    ] {
        let ended = run(place.path(), &format!("model {flags}"));
        assert_eq!(ended.code, Some(2), "{flags}: {}{}", ended.stdout, ended.stderr);
        for part in parts {
            assert!(ended.stderr.contains(part), "{flags} lacks `{part}`: {}", ended.stderr);
        }
        let left = std::fs::read_dir(place.path()).expect("lists").flatten();
        let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        let made = |name: &std::ffi::OsString| {
            let name = name.to_string_lossy();
            name.starts_with("x.") || name.starts_with(".skep")
        };
        assert!(!left.iter().any(made), "{flags} left {left:?}");
    }
}

#[test]
fn what_is_in_a_file_is_shown() {
    let place = folder();
    with_copies(place.path(), &["a.h5", "a.keras", "forms.h5"]);
    let text = good(place.path(), "model inspect models/a.h5");
    for part in ["HDF5, 2", "layer normed  BatchNormalization", "10 tensors", "[4, 3]"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let shown = json(place.path(), "model inspect models/forms.h5 --json");
    let packed = shown["tensors"].as_array().expect("a list").iter();
    let packed = packed.clone().find(|row| row["name"] == "group/packed").expect("is there");
    assert_eq!(
        (&packed["min"], &packed["mean"], &packed["max"]),
        (&0.0.into(), &5.5.into(), &11.0.into())
    );
    assert_eq!(
        json(place.path(), "model inspect models/a.keras --json")["layers"][0]["name"],
        "flowers"
    );
}

#[test]
fn pytorch_and_h5py_load_what_is_converted_to_the_bit() {
    let place = folder();
    let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let tensors = BTreeMap::from([
        (
            "fc.weight".to_owned(),
            LoadedTensor {
                dtype: Dtype::F32,
                shape: vec![2, 3],
                bytes: floats(&[0.1, -0.0, f32::MIN_POSITIVE / 8.0, 3.0e38, -7.25, 1.0]),
            },
        ),
        (
            "steps".to_owned(),
            LoadedTensor {
                dtype: Dtype::I64,
                shape: vec![],
                bytes: (1i64 << 62).to_le_bytes().into(),
            },
        ),
        (
            "flags".to_owned(),
            LoadedTensor { dtype: Dtype::BOOL, shape: vec![3], bytes: vec![1, 0, 1] },
        ),
        (
            "half".to_owned(),
            LoadedTensor { dtype: Dtype::F16, shape: vec![1, 2], bytes: vec![0, 0x3e, 0, 0xc0] },
        ),
        ("none".to_owned(), LoadedTensor { dtype: Dtype::U8, shape: vec![0, 4], bytes: vec![] }),
    ]);
    let npz = model_file::encode(ModelFormat::Npz, &tensors, &BTreeMap::new(), None);
    let truth = place.path().join("truth.npz");
    std::fs::write(&truth, npz.expect("encodes")).expect("writes");
    // Through every format, and back.
    for (from, to) in [
        ("truth.npz", "model.pt"),
        ("model.pt", "model.h5"),
        ("model.h5", "model.safetensors"),
        ("model.safetensors", "model.pth"),
        ("model.pth", "again.npz"),
    ] {
        good(place.path(), &format!("model convert {from} {to}"));
    }
    assert_eq!(std::fs::read(&truth).ok(), std::fs::read(place.path().join("again.npz")).ok());
    let file = |name: &str| place.path().join(name);
    check("SKEP_PYTHON", "torch, numpy", &[Path::new("torch"), &file("model.pt"), &truth]);
    check("SKEP_KERAS", "h5py, numpy", &[Path::new("hdf5"), &file("model.h5"), &truth]);
}

/// Our own logits of the first rows of the test data, and those rows as ONNX takes them.
fn logits(task: &dyn Task, job: &Job, assets: &Assets, model: &Path, rows: usize) -> Vec<u8> {
    let mut compute = task.compute(job).expect("a model");
    let layout = Layout::of_version(compute.schema(), skep_wire::Encoding::F32).expect("a layout");
    let mut frame = Frame::zeros(layout.into());
    model_file::apply(&mut frame, &model_file::load(model).expect("reads")).expect("fits");
    compute.load(&frame).expect("loads");
    let table = task.test_rows(job, assets).expect("rows");
    let batch = table.slice(0..rows.min(table.rows())).expect("rows");
    let scores = compute.infer(&batch).expect("answers");
    let rows = batch.rows();
    let (dtype, shape, bytes) = match (batch.column("image"), batch.column("tokens")) {
        (Some(image), _) => {
            let bytes = image.bytes.iter().flat_map(|&byte| f32::from(byte).to_le_bytes());
            (Dtype::F32, vec![rows, 1, 28, 28], bytes.collect())
        }
        (None, Some(tokens)) => {
            let pairs = tokens.bytes.chunks_exact(2);
            let wide = pairs.map(|pair| i64::from(u16::from_le_bytes([pair[0], pair[1]])));
            (Dtype::I64, vec![rows, tokens.shape[0]], wide.flat_map(i64::to_le_bytes).collect())
        }
        (None, None) => panic!("neither images nor texts"),
    };
    let classes = scores.len() / rows;
    let scores = LoadedTensor {
        dtype: Dtype::F32,
        shape: vec![rows, classes],
        bytes: scores.into_iter().flat_map(f32::to_le_bytes).collect(),
    };
    let tensors = BTreeMap::from([
        ("input".to_owned(), LoadedTensor { dtype, shape, bytes }),
        ("logits".to_owned(), scores),
    ]);
    model_file::encode(ModelFormat::Npz, &tensors, &BTreeMap::new(), None).expect("encodes")
}

/// Trains, and holds the ONNX file against our own answers, by onnxruntime.
fn export_agrees(train: &str, run: &str, kind: &str, rows: usize) -> tempfile::TempDir {
    let place = folder();
    good(place.path(), &format!("train {train} --name {run} --workers 2 --json"));
    let store = format!("skep-runs/{run}");
    good(place.path(), &format!("model export {store} --onnx --save model.onnx"));
    let shown = json(place.path(), "model inspect model.onnx --json");
    assert_eq!(shown["metadata"]["skep.kind"], kind);
    let folder = place.path().join("skep-runs/runs").join(run);
    let record: Value =
        serde_json::from_slice(&std::fs::read(folder.join("run.json")).expect("is there"))
            .expect("JSON");
    let job: Job = serde_json::from_value(record["spec"]["job"].clone()).expect("a job");
    let mut assets = Assets::new();
    if let Ok(vocabulary) = std::fs::read(folder.join("assets/vocabulary.json")) {
        let text = String::from_utf8_lossy(&vocabulary).into_owned();
        assert_eq!(shown["metadata"]["skep.vocabulary"], text);
        assets.insert("vocabulary.json".to_owned(), vocabulary);
    }
    let tasks = skep_learn::tasks();
    let task = tasks.iter().find(|task| task.name() == kind).expect("is known");
    let truth = logits(&**task, &job, &assets, &folder.join("model.safetensors"), rows);
    let path = place.path().join("truth.npz");
    std::fs::write(&path, truth).expect("writes");
    let model = place.path().join("model.onnx");
    check("SKEP_KERAS", "onnx, onnxruntime", &[Path::new("onnx"), &model, &path]);
    place
}

#[test]
fn onnxruntime_answers_as_we_do_for_digits() {
    let place = export_agrees("mnist --epochs 2", "digits", "lenet5", 1000);

    // Measured again, it does as well as the run says; from a file that is alone, too.
    let said = json(place.path(), "model evaluate skep-runs/digits@final --json");
    assert!(said["accuracy"].as_f64().expect("a share") > 0.85, "{said}");
    let pulled = json(place.path(), "model pull skep-runs/digits@best --json");
    assert!(pulled["samples"].as_u64().expect("a count") > 0, "{pulled}");
    std::fs::create_dir(place.path().join("alone")).expect("makes");
    let (from, to) = ("digits-best.safetensors", "alone/best.safetensors");
    std::fs::rename(place.path().join(from), place.path().join(to)).expect("moves");
    let best = json(place.path(), &format!("model evaluate {to} --json"));
    assert!(best["accuracy"].as_f64().expect("a share") > 0.85, "{best}");

    // Three of the same answer as one, by any vote.
    for vote in ["mean", "majority"] {
        let flags = format!("model evaluate {to} {to} {to} --vote {vote} --json");
        let together = json(place.path(), &flags);
        assert_eq!(together["accuracy"], best["accuracy"], "{vote}");
        assert_eq!(together["models"].as_array().expect("a list").len(), 3);
        let matrix = together["confusion"].as_array().expect("rows").iter();
        let all: u64 = matrix
            .flat_map(|row| row.as_array().expect("columns"))
            .map(|count| count.as_u64().expect("a count"))
            .sum();
        assert_eq!(all, together["samples"].as_u64().expect("a count"));
    }

    // Weights by samples, from the run and from the file's own word.
    let flags =
        format!("model average {to} skep-runs/runs/digits/model.safetensors --weights samples");
    let average = json(place.path(), &format!("{flags} --save average.safetensors --json"));
    let weights = average["models"].as_array().expect("a list").iter();
    let weights: Vec<f64> = weights.map(|model| model["weight"].as_f64().expect("one")).collect();
    assert_eq!(weights[0], pulled["samples"].as_f64().expect("a count"));
    assert!(weights[1] >= weights[0], "{weights:?}");
    // The average still says what it is, but not that it is a version.
    let shown = json(place.path(), "model inspect average.safetensors --json");
    assert_eq!(shown["metadata"]["skep.kind"], "lenet5");
    assert_eq!(shown["metadata"]["skep.version"], Value::Null);
    json(place.path(), "model evaluate average.safetensors --json");

    // From a hive, the same bytes.
    let store = place.path().join("skep-runs");
    let setup = HiveSetup::new(&skep(), &store, "");
    let _hive = setup.start();
    let flags = format!("model pull digits@best --save hive.safetensors --hive {}", setup.url());
    good(place.path(), &flags);
    let tensors = |name: &str| model_file::load(place.path().join(name)).expect("reads");
    assert_eq!(tensors("hive.safetensors"), tensors(to));
    let flags = format!("model pull {}/digits --save final.pt", setup.url());
    good(place.path(), &flags);
    assert_eq!(tensors("final.pt"), tensors("skep-runs/runs/digits/model.safetensors"));
    let ended = run(place.path(), &format!("model pull wasps@best --hive {}", setup.url()));
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
}

#[test]
fn onnxruntime_answers_as_we_do_for_texts() {
    let settings = "--set model.settings.words=500 --epochs 3 --rate 0.02";
    let train = format!("imdb {settings}");
    let place = export_agrees(&train, "average", "text-average", 200);

    // A pulled file has its vocabulary in it; one that has not is told what it lacks.
    good(place.path(), "model pull skep-runs/average --save pulled.safetensors");
    std::fs::create_dir(place.path().join("alone")).expect("makes");
    let to = place.path().join("alone/pulled.safetensors");
    std::fs::rename(place.path().join("pulled.safetensors"), &to).expect("moves");
    let flags = "model evaluate alone/pulled.safetensors --data reviews --json";
    assert!(json(place.path(), flags)["accuracy"].as_f64().expect("a share") > 0.8);
    good(place.path(), "model convert alone/pulled.safetensors alone/bare.npz");
    let bare = "model evaluate alone/bare.npz --model text-average --data reviews";
    let ended = run(place.path(), bare);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("vocabulary.json"), "{}", ended.stderr);

    let train = format!("reviews --model text-bigru {settings} --set model.settings.hidden=8");
    export_agrees(&train, "both", "text-bigru", 200);
}
