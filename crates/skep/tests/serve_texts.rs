//! `skep serve` with models of texts: reviews in, a verdict and the words that drove it out.

mod support;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Value, json};
use support::server::{Server, try_page};
use support::{HiveSetup, run_to_end, skep_command, wait_for};

const PRAISE: &str = "What a wonderful, superb film! The ending is dull, the music delightful.";
const BLAME: &str = "An awful, tedious story. The cast was charming. Save your money.";

/// A store with the runs `reviews` and `both`, trained once for all tests here.
fn trained() -> &'static Path {
    static STORE: OnceLock<tempfile::TempDir> = OnceLock::new();
    let store = STORE.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        for flags in [
            "train imdb --json --workers 2",
            "train reviews --model text-bigru --json --workers 2 --epochs 4 --rate 0.02 --name both \
             --set model.settings.words=500 --set model.settings.hidden=8",
        ] {
            train(flags, folder.path());
        }
        folder
    });
    store.path()
}

fn train(flags: &str, store: &Path) -> Value {
    let ended = run_to_end(skep_command(flags).arg("--store").arg(store));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    println!("{}", ended.stdout.trim());
    serde_json::from_str(ended.stdout.lines().last().expect("a last line")).expect("JSON")
}

fn serve(path: &Path) -> Server {
    Server::start(&[&path.to_string_lossy()])
}

/// What a word added to the answer, by the answer of `/predict`.
fn weight(answer: &Value, word: &str) -> f64 {
    let words = answer["words"].as_array().unwrap_or_else(|| panic!("no words: {answer}"));
    let found = words.iter().find(|one| {
        let shown = one["word"].as_str().expect("a word");
        shown.trim_matches(|c: char| !c.is_alphanumeric()).eq_ignore_ascii_case(word)
    });
    found.unwrap_or_else(|| panic!("no {word}: {answer}"))["weight"].as_f64().expect("a number")
}

#[test]
fn a_review_is_answered_with_its_sentiment_and_the_words_that_drove_it() {
    for run in ["reviews", "both"] {
        let server = serve(&trained().join(run));
        let mut connection = server.connect();
        let good = connection.post("/predict", &json!({ "text": PRAISE })).json();
        assert_eq!(good["answer"], "positive", "{run}: {good}");
        assert!(weight(&good, "wonderful") > 0.0, "{run}: {good}");
        assert!(weight(&good, "dull") < 0.0, "{run}: {good}");
        let bad = connection.send("POST", "/predict", "text/plain", BLAME.as_bytes()).json();
        assert_eq!(bad["answer"], "negative", "{run}: {bad}");
        assert!(weight(&bad, "tedious") > 0.0 && weight(&bad, "charming") < 0.0, "{run}: {bad}");

        // The same in the protocol: one text alone and two together, and a word nobody knows.
        let path = format!("/v2/models/{run}/infer");
        let infer = |texts: &[&str]| {
            json!({ "inputs": [
                { "name": "text", "shape": [texts.len()], "datatype": "BYTES", "data": texts }
            ] })
        };
        let alone = connection.post(&path, &infer(&[PRAISE])).json();
        let share = alone["outputs"][0]["data"][1].as_f64().expect("a number");
        let shown = good["probabilities"]["positive"].as_f64().expect("a number");
        assert!((share - shown).abs() < 1e-6, "{share} and {shown}");
        let both = connection.post(&path, &infer(&[PRAISE, "xyzzy"])).json();
        assert_eq!(both["outputs"][0]["shape"], json!([2, 2]));
        let beside = both["outputs"][0]["data"][1].as_f64().expect("a number");
        assert!((share - beside).abs() < 1e-5, "{share} and {beside}");
        let metadata = connection.send("GET", &format!("/v2/models/{run}"), "", b"").json();
        assert_eq!(
            metadata["inputs"],
            json!([{ "name": "text", "datatype": "BYTES", "shape": [-1] }])
        );
        assert_eq!(metadata["parameters"]["classes"], json!(["negative", "positive"]));

        // A long review is taken apart in groups of neighbours: every word has its weight.
        let long = format!("{} wonderful", "the film ".repeat(700));
        let answer = connection.post("/predict", &json!({ "text": long })).json();
        assert_eq!(answer["words"].as_array().map(Vec::len), Some(1401));
    }
}

#[test]
fn bad_questions_are_refused_and_the_server_goes_on() {
    let server = serve(&trained().join("reviews"));
    let mut connection = server.connect();
    let mut refused = |kind: &str, body: &[u8], status: u16, part: &str| {
        let answer = server.connect().send("POST", "/predict", kind, body);
        assert_eq!(answer.status, status, "{}", answer.json());
        let message = answer.json()["message"].as_str().expect("a message").to_owned();
        assert!(message.contains(part), "{message}");
        assert_eq!(connection.post("/predict", &json!({ "text": PRAISE })).status, 200);
    };
    // 10 MB, less what the JSON around it takes.
    let review = "dull ".repeat(1_999_900);
    refused("text/plain", review.as_bytes(), 413, "more than 20000 bytes");
    let question = json!({ "text": review }).to_string();
    refused("application/json", question.as_bytes(), 413, "more than 20000 bytes");
    let picture = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR";
    refused("image/png", picture, 400, "takes a text, not an image");
    refused("text/plain", b"  ", 400, "empty");
    refused("text/plain", &[0xff, 0xfe], 400, "UTF-8");
    refused("application/json", b"{\"text\": 3}", 400, "cannot be read");
    refused("application/json", b"{\"url\": \"http://10.0.0.1/\"}", 403, "public");
}

#[test]
fn a_file_that_left_its_run_needs_its_vocabulary_beside_it() {
    let run = trained().join("runs/reviews");
    let folder = tempfile::tempdir().expect("a folder");
    let copied = |name: &str, from: PathBuf| {
        let to = folder.path().join(name);
        std::fs::copy(from, &to).expect("copies");
        to
    };
    let model = copied("mine.safetensors", run.join("model.safetensors"));
    let model = model.to_string_lossy();
    let arguments = ["serve", &model, "--model", "text-average"];
    let fails = |parts: &[&str], arguments: &[&str]| {
        let ended = run_to_end(skep_command("").args(arguments));
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        for part in parts {
            assert!(ended.stderr.contains(part), "lacks `{part}`: {}", ended.stderr);
        }
    };
    fails(&["text-average", "vocabulary.json", "beside the file"], &arguments);
    std::fs::write(folder.path().join("vocabulary.json"), "{").expect("writes");
    fails(&["vocabulary.json", "not a vocabulary"], &arguments);
    copied("vocabulary.json", run.join("assets/vocabulary.json"));
    // A model of another task, and one of another shape.
    fails(&["embedding.weight", "is not the model's"], &["serve", &model, "--model", "lenet5"]);
    fails(&["gru1"], &["serve", &model, "--model", "text-bigru"]);
    fails(
        &["--classes is for ONNX"],
        &[
            "serve",
            &model,
            "--model",
            "text-average",
            "--classes",
            &model.replace("mine.safetensors", "vocabulary.json"),
        ],
    );
    let server = Server::start(&arguments[1..]);
    let answer = server.connect().post("/predict", &json!({ "text": BLAME })).json();
    assert_eq!(answer["answer"], "negative", "{answer}");
    assert!(answer["version"].as_str().is_some_and(|name| name.starts_with("sha256-")), "{answer}");

    // A run whose assets were lost says so too.
    let lost = tempfile::tempdir().expect("a folder");
    for name in ["run.json", "model.safetensors"] {
        std::fs::copy(run.join(name), lost.path().join(name)).expect("copies");
    }
    let lost = lost.path().join("model.safetensors");
    fails(&["vocabulary.json", "assets"], &["serve", &lost.to_string_lossy()]);
}

#[test]
fn a_run_of_reviews_is_followed_while_it_trains() {
    let folder = tempfile::tempdir().expect("a folder");
    let setup = HiveSetup::new(
        &support::skep(),
        folder.path(),
        "imdb --name live --steps 0 --policy batch:1 --rate 0.01",
    );
    let _hive = setup.start();
    let server = Server::start(&["--follow", &format!("{}/live", setup.url())]);
    wait_for("the server to be ready", || {
        let answer = server.connect().send("GET", "/v2/health/ready", "", b"");
        (answer.status == 200).then_some(())
    });
    let mut connection = server.connect();
    let mut ask = |text: &str| {
        let answer = connection.post("/predict", &json!({ "text": text }));
        assert_eq!(answer.status, 200, "{}", answer.json());
        let json = answer.json();
        assert_eq!(json["version"].as_str(), answer.version.as_deref());
        json
    };
    let first = ask(PRAISE)["version"].clone();
    let _worker = setup.worker(&[]);
    wait_for("the run to learn", || {
        let (good, bad) = (ask(PRAISE), ask(BLAME));
        let learned = good["answer"] == "positive"
            && bad["answer"] == "negative"
            && good["probabilities"]["positive"].as_f64() > Some(0.9);
        (learned && good["version"] != first).then_some(())
    });
}

#[test]
fn the_page_reads_reviews_in_a_browser() {
    if !support::browser::is_there() {
        return;
    }
    let server = serve(&trained().join("reviews"));
    let review = "A charming, clever film with a superb cast. The second half is predictable.";
    let words = ["--praise", "wonderful", "--blame", "dreadful", "--review", review];
    try_page("write", &server, &words);
}

/// The Large Movie Review Dataset, where `SKEP_IMDB` says that it is: a model that learned from
/// people's reviews reads others, on the page too.
#[test]
fn a_model_of_real_reviews_reads_reviews() {
    let Some(data) = std::env::var_os("SKEP_IMDB").filter(|path| !path.is_empty()) else {
        println!("skipped: SKEP_IMDB does not say where the Large Movie Review Dataset is");
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let data = std::fs::canonicalize(data).expect("SKEP_IMDB is there");
    let flags = format!("train imdb --epochs 3 --workers 2 --json --data {}", data.display());
    let result = train(&flags, folder.path());
    assert!(result["accuracy"].as_f64().expect("a share") > 0.85, "{result}");
    let server = serve(&folder.path().join("imdb"));
    let mut connection = server.connect();
    let reviews = [
        (
            "positive",
            "I went in with low hopes and came out smiling. The two leads are wonderful together, the jokes land, and the last scene is one of the best I have seen this year.",
        ),
        (
            "negative",
            "Two hours of my life that I will not get back. The plot makes no sense, the acting is awful, and I was bored long before the ridiculous ending.",
        ),
        (
            "positive",
            "A quiet, beautiful film about growing old. Superb performances; it moved me to tears, and I would happily see it again.",
        ),
        (
            "negative",
            "The worst sequel ever made: poor effects, a terrible script and not one laugh. Avoid it.",
        ),
    ];
    for (verdict, review) in reviews {
        let answer = connection.post("/predict", &json!({ "text": review })).json();
        assert_eq!(answer["answer"], verdict, "{answer}");
        let words = answer["words"].as_array().expect("a list");
        let most = words.iter().max_by(|a, b| {
            a["weight"].as_f64().partial_cmp(&b["weight"].as_f64()).expect("numbers")
        });
        println!("{verdict}: {}", most.expect("words"));
    }
    if support::browser::is_there() {
        try_page("write", &server, &["--review-only", "--review", reviews[0].1]);
    }
}
