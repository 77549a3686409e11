//! `skep serve` with ONNX files that real PyTorch made, checked against onnxruntime on real digits.
//!
//! `SKEP_ONNX_PYTHON` names an interpreter with torch, onnx and onnxruntime, `python3` otherwise.
//! Where one of them is missing the tests say so and are skipped; under CI they fail.

mod drawing;
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use drawing::{PLAIN, draw, encode};
use image::ImageFormat;
use serde_json::{Value, json};
use support::server::{Connection, Server, try_page};
use support::{run_to_end, skep_command};

/// How many of MNIST's test pictures are asked about.
const DIGITS: usize = 40;

/// The files, with onnxruntime's answers.
struct Made {
    folder: tempfile::TempDir,
    expected: Value,
    /// Bytes and labels.
    digits: Vec<(Vec<u8>, u8)>,
}

impl Made {
    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_string_lossy().into_owned()
    }

    fn serve(&self, name: &str, flags: &[&str]) -> Server {
        Server::start(&[&[&self.path(name)[..]], flags].concat())
    }
}

fn python() -> Command {
    let named =
        ["SKEP_ONNX_PYTHON", "SKEP_PYTHON"].into_iter().find_map(|name| std::env::var(name).ok());
    Command::new(named.unwrap_or_else(|| "python3".to_owned()))
}

/// Trains a model and makes the files, once for all tests here.
fn made() -> Option<&'static Made> {
    static MADE: OnceLock<Option<Made>> = OnceLock::new();
    MADE.get_or_init(|| {
        let check = python().args(["-c", "import torch, onnx, onnxruntime"]).output();
        if !check.is_ok_and(|output| output.status.success()) {
            let what = "no Python with torch, onnx and onnxruntime (SKEP_ONNX_PYTHON, or python3)";
            assert!(std::env::var_os("CI").is_none(), "{what}, and under CI nothing is skipped");
            println!("skipped: {what}");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = skep_command("train mnist --epochs 4 --json");
        let ended = run_to_end(command.arg("--store").arg(folder.path()));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let test = skep_data::mnist::open("mnist").expect("is built in").test;
        let column = |name: &str| test.column(name).expect("is there").bytes.clone();
        let pictures = column("image");
        let pictures = pictures.chunks_exact(784).map(<[u8]>::to_vec);
        let digits: Vec<_> = pictures.zip(column("label")).take(DIGITS).collect();
        let raw: Vec<u8> = digits.iter().flat_map(|(bytes, _)| bytes.clone()).collect();
        std::fs::write(folder.path().join("digits.u8"), raw).expect("writes");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/onnx/make.py");
        let mut make = python();
        make.arg(script).arg(folder.path().join("runs/mnist/model.safetensors"));
        let ended = run_to_end(make.arg(folder.path().join("digits.u8")).arg(folder.path()));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let expected = std::fs::read(folder.path().join("expected.json")).expect("is written");
        let expected = serde_json::from_slice(&expected).expect("JSON");
        Some(Made { folder, expected, digits })
    })
    .as_ref()
}

#[track_caller]
fn assert_near(found: &Value, expected: &Value) {
    fn flat(value: &Value, into: &mut Vec<f64>) {
        match value {
            Value::Array(list) => list.iter().for_each(|one| flat(one, into)),
            one => into.push(one.as_f64().expect("a number")),
        }
    }
    let (mut left, mut right) = (Vec::new(), Vec::new());
    flat(found, &mut left);
    flat(expected, &mut right);
    assert_eq!(left.len(), right.len());
    for (a, b) in left.iter().zip(&right) {
        assert!((a - b).abs() <= 1e-4 * b.abs().max(1.0), "{a}, and onnxruntime has {b}");
    }
}

#[track_caller]
fn infer(connection: &mut Connection, model: &str, inputs: Value) -> Value {
    let answer =
        connection.post(&format!("/v2/models/{model}/infer"), &json!({ "inputs": inputs }));
    assert_eq!(answer.status, 200, "{}", answer.json());
    answer.json()
}

#[test]
fn a_model_of_pytorch_answers_as_onnxruntime_does() {
    let Some(made) = made() else { return };
    let server = made.serve("digits.onnx", &["--mean", "0.1307", "--std", "0.3081"]);
    let mut connection = server.connect();
    let metadata = connection.send("GET", "/v2/models/digits", "", b"").json();
    let input = json!([{ "name": "image", "datatype": "FP32", "shape": [-1, 1, 28, 28] }]);
    let output = json!([{ "name": "logits", "datatype": "FP32", "shape": [-1, 10] }]);
    assert_eq!((&metadata["inputs"], &metadata["outputs"]), (&input, &output), "{metadata}");
    let normal = |bytes: &[u8]| -> Vec<f32> {
        bytes.iter().map(|&byte| (f32::from(byte) / 255.0 - 0.1307) / 0.3081).collect()
    };
    let tensor = |rows: usize, data: Vec<f32>| json!([{ "name": "image", "shape": [rows, 1, 28, 28], "datatype": "FP32", "data": data }]);
    let mut right = 0;
    for (at, (bytes, label)) in made.digits.iter().enumerate() {
        let answer = infer(&mut connection, "digits", tensor(1, normal(bytes)));
        let scores = &answer["outputs"][0]["data"];
        assert_near(scores, &made.expected["digits"][at]);
        let scores: Vec<f64> =
            scores.as_array().expect("a list").iter().filter_map(Value::as_f64).collect();
        let best = (0..10).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).expect("ten");
        right += usize::from(best == usize::from(*label));
    }
    println!("{right} of {DIGITS} digits right");
    assert!(right * 10 >= DIGITS * 9, "{right} of {DIGITS}");
    // All rows at once, and another number of rows.
    for rows in [DIGITS, 3] {
        let data = made.digits[..rows].iter().flat_map(|(bytes, _)| normal(bytes)).collect();
        let answer = infer(&mut connection, "digits", tensor(rows, data));
        assert_eq!(answer["outputs"][0]["shape"], json!([rows, 10]));
        let expected = &made.expected["digits"].as_array().expect("rows")[..rows];
        assert_near(&answer["outputs"][0]["data"], &json!(expected));
    }
    assert!(answer_of(&mut connection, 4)["answer"] == "4");
}

fn answer_of(connection: &mut Connection, digit: usize) -> Value {
    let answer = connection.predict(&encode(draw(digit, &PLAIN), ImageFormat::Png));
    assert_eq!(answer.status, 200, "{}", answer.json());
    answer.json()
}

#[test]
fn pictures_are_answered_by_graphs_of_every_make() {
    let Some(made) = made() else { return };
    let names = made.path("names.txt");
    std::fs::write(&names, "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n").expect("writes");
    let words = ["nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
    let letters = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
    let numbers = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];
    // Names and bytes from the metadata; flags; channels behind, and a softmax of the graph's own.
    for (file, flags, classes) in [
        ("named.onnx", vec![], words),
        ("named.onnx", vec!["--classes", names.as_str()], letters),
        ("bytes.onnx", vec!["--scale", "1"], numbers),
        ("last.onnx", vec![], numbers),
    ] {
        let server = made.serve(file, &flags);
        let mut connection = server.connect();
        let model = connection.send("GET", "/model", "", b"").json();
        assert_eq!((&model["kind"], &model["takes"]), (&json!("onnx"), &json!("image")));
        assert!(model["version"].as_str().is_some_and(|name| name.starts_with("sha256-")));
        for (digit, class) in classes.iter().enumerate().take(10) {
            let answer = answer_of(&mut connection, digit);
            assert_eq!(answer["answer"], *class, "{file}: {answer}");
            let shares = answer["probabilities"].as_object().expect("an object");
            let sum: f64 = shares.values().filter_map(Value::as_f64).sum();
            assert!((sum - 1.0).abs() < 1e-5, "{file}: {sum}");
        }
    }
    let server = made.serve("last.onnx", &[]);
    let mut connection = server.connect();
    for (at, (bytes, _)) in made.digits.iter().enumerate() {
        let data: Vec<f32> = bytes.iter().map(|&byte| f32::from(byte) / 255.0).collect();
        let input = json!([{ "name": "picture", "shape": [1, 28, 28, 1], "datatype": "FP32", "data": data }]);
        let answer = infer(&mut connection, "last", input);
        assert_near(&answer["outputs"][0]["data"], &made.expected["last"][at]);
    }
    let server = made.serve("named.onnx", &[]);
    let mut connection = server.connect();
    let (bytes, _) = &made.digits[0];
    let input =
        json!([{ "name": "image", "shape": [1, 1, 28, 28], "datatype": "FP32", "data": bytes }]);
    let answer = infer(&mut connection, "named", input);
    assert_near(&answer["outputs"][0]["data"], &made.expected["bytes"][0]);
}

#[test]
fn tensors_of_any_names_types_and_lengths_go_in_and_out() {
    let Some(made) = made() else { return };
    let server = made.serve("two.onnx", &[]);
    let mut connection = server.connect();
    let left = json!({ "name": "left", "shape": [2, 3], "datatype": "FP32", "data": [[1, 2, 3], [4, 5, 6]] });
    let right = json!({ "name": "right", "shape": [2], "datatype": "INT64", "data": [2, 9_007_199_254_740_993i64] });
    // In any order; whole numbers to the last digit.
    for inputs in [json!([left, right]), json!([right, left])] {
        let answer = infer(&mut connection, "two", inputs);
        assert_near(&answer["outputs"][0]["data"], &made.expected["two"][0]);
        assert_eq!(answer["outputs"][1]["datatype"], "INT64");
        assert_eq!(answer["outputs"][1]["data"], json!([3, 9_007_199_254_740_994i64]));
        assert_eq!(answer["outputs"][1]["data"], made.expected["two"][1]);
    }
    let only = json!({ "inputs": [left, right], "outputs": [{ "name": "counts" }] });
    let only = connection.post("/v2/models/two/infer", &only).json();
    assert_eq!(only["outputs"].as_array().map(Vec::len), Some(1));
    let changed = |name: &str, value: Value| {
        let mut other = left.clone();
        other[name] = value;
        other
    };
    for (inputs, part) in [
        (json!([left]), "1 inputs, not 2"),
        (json!([left, left]), "needed once"),
        (json!([changed("name", json!("middle")), right]), "no input `middle`"),
        (json!([changed("datatype", json!("FP64")), right]), "`left` is FP64"),
        (json!([changed("shape", json!([3, 2])), right]), "shape [3, 2]"),
        (json!([changed("shape", json!([1, 3])), right]), "needs 3 elements, not 6"),
        (json!([changed("data", json!([1, 2, 3, 4, 5, "six"])), right]), "cannot be read"),
        (
            json!([left, { "name": "right", "shape": [2], "datatype": "INT64", "data": [0.5, 1] }]),
            "0.5 is not INT64",
        ),
        (
            json!([left, { "name": "right", "shape": [3], "datatype": "INT64", "data": [1, 2, 3] }]),
            "cannot be run",
        ),
    ] {
        let answer = connection.post("/v2/models/two/infer", &json!({ "inputs": inputs }));
        assert_eq!(answer.status, 400, "{}", answer.json());
        let message = answer.json()["message"].as_str().expect("a message").to_owned();
        assert!(message.contains(part), "lacks `{part}`: {message}");
    }
    let answer = connection.predict(&encode(draw(4, &PLAIN), ImageFormat::Png));
    assert_eq!(answer.status, 400);
    let answer = answer.json();
    assert!(answer["message"].to_string().contains("takes tensors, not an image"), "{answer}");
    assert!(answer["hint"].to_string().contains("/v2/models/two/infer"), "{answer}");
    if support::browser::is_there() {
        try_page("tensors", &server, &[]);
    }

    let server = made.serve("words.onnx", &[]);
    let mut connection = server.connect();
    let tokens = |rows: Value, shape: [usize; 2]| json!([{ "name": "tokens", "shape": shape, "datatype": "INT64", "data": rows }]);
    let one = infer(&mut connection, "words", tokens(json!([3, 1, 4]), [1, 3]));
    assert_near(&one["outputs"][0]["data"], &made.expected["words"][0]);
    let two = infer(&mut connection, "words", tokens(json!([[3, 1, 4, 1], [5, 9, 2, 6]]), [2, 4]));
    assert_near(&two["outputs"][0]["data"], &made.expected["words"][1]);
}

#[test]
fn files_that_cannot_be_served_are_refused_with_what_is_wrong() {
    let Some(made) = made() else { return };
    let whole = std::fs::read(made.path("digits.onnx")).expect("is there");
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(made.path(name), bytes).expect("writes");
        PathBuf::from(made.path(name)).to_string_lossy().into_owned()
    };
    let cut = write("cut.onnx", &whole[..whole.len() / 2]);
    let empty = write("empty.onnx", b"");
    let text = write("text.onnx", b"this is no model at all, and never was");
    let few = write("few.txt", b"a\nb\n");
    let (strange, digits, two) =
        (made.path("strange.onnx"), made.path("digits.onnx"), made.path("two.onnx"));
    for (arguments, parts) in [
        (vec![strange.as_str()], &["strange.onnx", "Frobnicate", "onnxruntime"][..]),
        (vec![&cut], &["cut.onnx", "ONNX"]),
        (vec![&empty], &["empty.onnx", "ONNX"]),
        (vec![&text], &["text.onnx", "ONNX"]),
        (vec![&digits, "--classes", &few], &["2 names", "10 scores"]),
        (vec![&digits, "--mean", "1,2,3"], &["the mean has 3 numbers", "1 channels"]),
        (vec![&digits, "--std", "0"], &["is 0"]),
        (vec![&digits, "--form", "oil"], &["ink", "photograph"]),
        (vec![&two, "--scale", "1"], &["--scale", "`left`"]),
        (vec![&digits, "--classes", "/nowhere"], &["/nowhere"]),
    ] {
        let ended = run_to_end(skep_command("serve").args(&arguments));
        assert_eq!(ended.code, Some(2), "{arguments:?}: {}", ended.stderr);
        for part in parts {
            assert!(ended.stderr.contains(part), "lacks `{part}`: {}", ended.stderr);
        }
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
    }
}
