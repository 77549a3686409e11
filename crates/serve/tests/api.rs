//! Every route, in process: what it takes, what it answers, and what it refuses while it goes on
//! serving. LeNet-5 with the parameters of version 0 stands in for a trained model.

use std::io::Cursor;
use std::process::Command;
use std::sync::{Arc, Barrier, Mutex};

use axum::Router;
use axum::body::Body;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use image::{DynamicImage, GrayImage, ImageFormat, Luma};
use serde_json::{Value, json};
use skep_data::{Column, Dataset, Table};
use skep_learn::{Assets, Compute, Encoder, Inference, Input, LearnError, Task};
use skep_serve::{FetchSettings, Fetcher, Loaded, Model, Serving, ServingSettings, app};
use skep_wire::{Dtype, Encoding, EvaluationCounts, Frame, Job, Layout, Role, Schema, TensorSpec};
use tower::ServiceExt;

fn fetcher() -> Fetcher {
    Fetcher::new(FetchSettings::default()).expect("makes ready")
}

fn settings() -> ServingSettings {
    ServingSettings { threads: 2, ..ServingSettings::default() }
}

fn lenet5() -> Arc<dyn Task> {
    skep_serve::task_of(&skep_learn::tasks(), "lenet5").expect("is known")
}

fn digits() -> Arc<Serving> {
    let task = lenet5();
    let model =
        Model::new("digits", task.clone(), task.defaults(), &Assets::new()).expect("can be asked");
    Serving::start(model, fetcher(), settings()).expect("starts")
}

fn version(serving: &Serving, seed: u64) -> Loaded {
    let parameters = serving.model().compute().and_then(|c| Ok(c.initial(seed)?)).expect("draws");
    Loaded { version: format!("1.{seed}"), parameters }
}

fn ready() -> Router {
    let serving = digits();
    serving.publish(version(&serving, 7));
    app(serving)
}

struct Answered {
    status: StatusCode,
    version: Option<String>,
    body: Vec<u8>,
}

impl Answered {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    /// The shape that every refusal has.
    #[track_caller]
    fn refused(&self, status: u16, code: &str, part: &str) {
        let body = String::from_utf8_lossy(&self.body);
        assert_eq!(self.status, status, "{body}");
        let json = self.json();
        assert_eq!(json["code"], code, "{body}");
        assert!(json["message"].as_str().is_some_and(|text| text.contains(part)), "{body}");
        assert!(json["hint"].is_string(), "{body}");
    }
}

async fn send(app: &Router, request: Request<Body>) -> Answered {
    let response = app.clone().oneshot(request).await.expect("a router always answers");
    let status = response.status();
    let version = response.headers().get("skep-version").and_then(|v| v.to_str().ok());
    let version = version.map(str::to_owned);
    let body = response.into_body().collect().await.expect("is whole").to_bytes().to_vec();
    Answered { status, version, body }
}

async fn get(app: &Router, path: &str) -> Answered {
    send(app, Request::get(path).body(Body::empty()).expect("a request")).await
}

async fn post(app: &Router, path: &str, kind: &str, body: impl Into<Body>) -> Answered {
    let request = Request::post(path).header(header::CONTENT_TYPE, kind);
    send(app, request.body(body.into()).expect("a request")).await
}

async fn post_json(app: &Router, path: &str, body: &Value) -> Answered {
    post(app, path, "application/json", body.to_string()).await
}

/// A picture with a bar on it.
fn picture(format: ImageFormat) -> Vec<u8> {
    let grey = GrayImage::from_fn(60, 80, |x, y| {
        Luma([if (25..34).contains(&x) && (10..70).contains(&y) { 20 } else { 235 }])
    });
    let mut bytes = Cursor::new(Vec::new());
    DynamicImage::ImageLuma8(grey).write_to(&mut bytes, format).expect("encodes");
    bytes.into_inner()
}

#[tokio::test]
async fn a_picture_is_answered_however_it_is_sent() {
    let app = ready();
    let png = picture(ImageFormat::Png);
    let form = |name: &str, file: &str| {
        let mut body =
            format!("--xyz\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n")
                .into_bytes();
        body.extend_from_slice(&png);
        body.extend_from_slice(b"\r\n--xyz--\r\n");
        body
    };
    let base64 = STANDARD.encode(&png);
    let answers = [
        post(&app, "/predict", "image/png", png.clone()).await,
        post(&app, "/predict", "", png.clone()).await,
        post(&app, "/predict", "application/x-www-form-urlencoded", png.clone()).await,
        post_json(&app, "/predict", &json!({ "image": base64 })).await,
        post_json(&app, "/predict", &json!({ "image": format!("data:image/png;base64,{base64}") }))
            .await,
        post(&app, "/predict", "multipart/form-data; boundary=xyz", form("image", "")).await,
        post(
            &app,
            "/predict",
            "multipart/form-data; boundary=xyz",
            form("whatever", "; filename=\"a.png\""),
        )
        .await,
    ];
    let first = answers[0].json();
    for answer in &answers {
        let json = answer.json();
        assert_eq!(answer.status, StatusCode::OK, "{json}");
        assert_eq!(answer.version.as_deref(), Some("1.7"));
        assert_eq!(json["version"], "1.7");
        assert!(json["milliseconds"].is_f64(), "{json}");
        assert_eq!(json["probabilities"], first["probabilities"]);
        let shares = json["probabilities"].as_object().expect("an object");
        assert_eq!(shares.len(), 10);
        let sum: f64 = shares.values().filter_map(Value::as_f64).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{sum}");
        let highest =
            shares.iter().max_by(|a, b| a.1.as_f64().partial_cmp(&b.1.as_f64()).expect("numbers"));
        assert_eq!(json["answer"], *highest.expect("ten of them").0);
    }
    let jpeg = post(&app, "/predict", "image/jpeg", picture(ImageFormat::Jpeg)).await;
    assert_eq!(jpeg.status, StatusCode::OK);
}

#[tokio::test]
async fn what_cannot_be_answered_is_refused_and_the_server_goes_on() {
    let app = ready();
    let png = picture(ImageFormat::Png);
    let predict = |kind: &'static str, body: Vec<u8>| post(&app, "/predict", kind, body);
    predict("image/png", vec![]).await.refused(400, "bad_request", "empty");
    predict("image/png", b"no picture".to_vec()).await.refused(400, "bad_request", "not a picture");
    predict("image/png", png[..60].to_vec()).await.refused(400, "bad_request", "cannot be read");
    predict("image/gif", b"GIF89a\x01\0\x01\0".to_vec()).await.refused(400, "bad_request", "not a");
    predict("image/png", vec![0; 10_000_001]).await.refused(413, "too_large", "10000000 bytes");
    predict("application/json", b"{".to_vec()).await.refused(400, "bad_request", "cannot be read");
    for (question, part) in [
        (json!({}), "one of"),
        (json!({ "url": "x", "image": "y" }), "one of"),
        (json!({ "picture": "x" }), "picture"),
        (json!({ "image": "***" }), "base64"),
        (json!({ "image": STANDARD.encode("hello") }), "not a picture"),
        (json!({ "text": "good" }), "takes an image, not a text"),
        (json!({ "url": "nonsense" }), "not an address"),
        (json!(3), "cannot be read"),
    ] {
        post_json(&app, "/predict", &question).await.refused(400, "bad_request", part);
    }
    post_json(&app, "/predict", &json!({ "url": "http://169.254.169.254/" })).await.refused(
        403,
        "forbidden",
        "public",
    );
    predict("multipart/form-data", png.clone()).await.refused(400, "bad_request", "form");
    predict("multipart/form-data; boundary=b", b"--b--\r\n".to_vec()).await.refused(
        400,
        "bad_request",
        "form",
    );
    // A header that claims 60,000 x 60,000 pixels takes no memory for them.
    let mut bomb = png.clone();
    bomb[16..24].copy_from_slice(&[0, 0, 0xea, 0x60, 0, 0, 0xea, 0x60]);
    let answer = predict("image/png", bomb).await;
    assert!(answer.status.is_client_error(), "{}", answer.status);
    // A blank sheet has no figure on it.
    let mut blank = Cursor::new(Vec::new());
    let sheet = DynamicImage::ImageLuma8(GrayImage::from_pixel(50, 50, Luma([200])));
    sheet.write_to(&mut blank, ImageFormat::Png).expect("encodes");
    predict("image/png", blank.into_inner()).await.refused(400, "bad_request", "nothing");

    get(&app, "/nowhere").await.refused(404, "not_found", "nothing at this address");
    get(&app, "/predict").await.refused(400, "bad_request", "method");
    let other_site = Request::post("/predict")
        .header(header::HOST, "127.0.0.1:8080")
        .header(header::ORIGIN, "https://example.org");
    send(&app, other_site.body(Body::from(png.clone())).expect("a request")).await.refused(
        403,
        "forbidden",
        "other sites",
    );
    let own = Request::post("/predict")
        .header(header::HOST, "127.0.0.1:8080")
        .header(header::ORIGIN, "http://127.0.0.1:8080");
    let own = send(&app, own.body(Body::from(png.clone())).expect("a request")).await;
    assert_eq!(own.status, StatusCode::OK);
}

#[tokio::test]
async fn the_open_inference_protocol_is_spoken() {
    let serving = digits();
    let app = app(serving.clone());
    assert_eq!(get(&app, "/v2/health/live").await.status, StatusCode::OK);
    get(&app, "/v2/health/ready").await.refused(503, "busy", "no version");
    get(&app, "/v2/models/digits/ready").await.refused(503, "busy", "no version");
    post(&app, "/predict", "image/png", picture(ImageFormat::Png)).await.refused(
        503,
        "busy",
        "no version",
    );
    assert_eq!(get(&app, "/model").await.json()["version"], Value::Null);
    serving.publish(version(&serving, 3));
    assert_eq!(get(&app, "/v2/health/ready").await.status, StatusCode::OK);
    assert_eq!(get(&app, "/v2/models/digits/ready").await.json()["ready"], true);
    get(&app, "/v2/models/other").await.refused(404, "not_found", "`other`");
    assert_eq!(get(&app, "/v2").await.json()["name"], "skep");
    let metadata = get(&app, "/v2/models/digits").await.json();
    assert_eq!(metadata["versions"], json!(["1.3"]));
    assert_eq!(
        metadata["inputs"],
        json!([{ "name": "image", "datatype": "FP32", "shape": [-1, 1, 28, 28] }])
    );
    assert_eq!(metadata["outputs"][0]["shape"], json!([-1, 10]));

    let row: Vec<u8> = (0..784).map(|at| (at % 256) as u8).collect();
    let rows: Vec<Vec<&[u8]>> = vec![row.chunks(28).collect(), row.chunks(28).collect()];
    let floats: Vec<f32> = row.iter().map(|&byte| f32::from(byte) / 255.0).collect();
    let infer = |input: Value| {
        let body = json!({ "id": "q", "inputs": [input] });
        let app = app.clone();
        async move { post_json(&app, "/v2/models/digits/infer", &body).await }
    };
    let flat = infer(
        json!({ "name": "image", "shape": [1, 1, 28, 28], "datatype": "UINT8", "data": row }),
    )
    .await;
    let nested =
        infer(json!({ "name": "image", "shape": [2, 28, 28], "datatype": "UINT8", "data": rows }))
            .await;
    let real =
        infer(json!({ "name": "image", "shape": [1, 28, 28], "datatype": "FP32", "data": floats }))
            .await;
    for (answer, rows) in [(&flat, 1), (&nested, 2), (&real, 1)] {
        let json = answer.json();
        assert_eq!(answer.status, StatusCode::OK, "{json}");
        assert_eq!(answer.version.as_deref(), Some("1.3"));
        assert_eq!(
            (&json["model_name"], &json["model_version"]),
            (&json!("digits"), &json!("1.3"))
        );
        assert_eq!(json["id"], "q");
        assert_eq!(json["outputs"][0]["shape"], json!([rows, 10]));
        assert_eq!(json["outputs"][0]["data"].as_array().map(Vec::len), Some(rows * 10));
    }
    let numbers = |answer: &Answered, output: usize| -> Vec<f64> {
        let json = answer.json();
        let data = json["outputs"][output]["data"].as_array().expect("a list").clone();
        data.iter().filter_map(Value::as_f64).collect()
    };
    // The same picture, alone and in company: the same scores, in every form.
    for output in 0..2 {
        let (alone, company) = (numbers(&flat, output), numbers(&nested, output));
        for (at, share) in alone.iter().enumerate() {
            assert!((share - company[at]).abs() < 1e-5 && (share - company[10 + at]).abs() < 1e-5);
            assert!((share - numbers(&real, output)[at]).abs() < 1e-5);
        }
    }
    let wanted = json!({ "inputs": [{ "name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": row }], "outputs": [{ "name": "logits" }] });
    let wanted = post_json(&app, "/v2/models/digits/infer", &wanted).await.json();
    assert_eq!(wanted["outputs"].as_array().map(Vec::len), Some(1));
    assert_eq!(wanted["outputs"][0]["name"], "logits");

    let short: Vec<u8> = row[1..].to_vec();
    for (input, part) in [
        (
            json!({ "name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": short }),
            "784 elements, not 783",
        ),
        (
            json!({ "name": "image", "shape": [1, 32, 32], "datatype": "UINT8", "data": row }),
            "shape [1, 32, 32]",
        ),
        (
            json!({ "name": "image", "shape": [784], "datatype": "UINT8", "data": row }),
            "shape [784]",
        ),
        (json!({ "name": "image", "shape": [], "datatype": "UINT8", "data": row }), "shape []"),
        (
            json!({ "name": "image", "shape": [0, 28, 28], "datatype": "UINT8", "data": [] }),
            "elements",
        ),
        (
            json!({ "name": "image", "shape": [usize::MAX, 28, 28], "datatype": "UINT8", "data": row }),
            "elements",
        ),
        (
            json!({ "name": "image", "shape": [1, 28, 28], "datatype": "INT64", "data": row }),
            "INT64",
        ),
        (
            json!({ "name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": vec![256; 784] }),
            "256",
        ),
        (
            json!({ "name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": vec!["x"; 784] }),
            "expected numbers",
        ),
        (
            json!({ "name": "image", "shape": [1, 28, 28], "datatype": "FP32", "data": vec![1e60; 784] }),
            "finite",
        ),
        (
            json!({ "name": "pixels", "shape": [1, 28, 28], "datatype": "UINT8", "data": row }),
            "`pixels`",
        ),
        (
            json!({ "name": "image", "shape": [1, -28, 28], "datatype": "UINT8", "data": row }),
            "cannot be read",
        ),
        (
            json!({ "name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": { "a": 1 } }),
            "cannot be read",
        ),
        (json!({ "name": "image", "shape": [1, 28, 28], "datatype": "UINT8" }), "data"),
    ] {
        infer(input).await.refused(400, "bad_request", part);
    }
    post_json(&app, "/v2/models/digits/infer", &json!({ "inputs": [] })).await.refused(
        400,
        "bad_request",
        "0 inputs",
    );
    assert_eq!(get(&app, "/v2/health/ready").await.status, StatusCode::OK);
}

#[tokio::test]
async fn the_page_brings_everything_itself() {
    let app = ready();
    let request = Request::get("/").body(Body::empty()).expect("a request");
    let response = app.oneshot(request).await.expect("answers");
    let policy = response.headers()[header::CONTENT_SECURITY_POLICY].to_str().expect("text");
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
    let bytes = response.into_body().collect().await.expect("is whole").to_bytes();
    let page = std::str::from_utf8(&bytes).expect("UTF-8");
    for elsewhere in ["src=\"http", "href=\"http", "url(http", "@import", "//cdn"] {
        assert!(!page.contains(elsewhere), "{elsewhere}");
    }
    // The policy names one script and one style by their hashes: others would not run.
    assert_eq!((page.matches("<script").count(), page.matches("<style").count()), (1, 1));
    assert!(!page.contains("style=\"") && !page.contains("onclick"));
}

/// Counts words: what a text model needs of the server, and nothing else.
struct Mood;

struct MoodCompute(Schema);

impl Task for Mood {
    fn name(&self) -> &str {
        "mood"
    }

    fn about(&self) -> &str {
        "good minus bad"
    }

    fn defaults(&self) -> Job {
        Job::default()
    }

    fn dataset(&self, _job: &Job) -> Result<Dataset, LearnError> {
        Err(LearnError::NoInference("mood".to_owned()))
    }

    fn compute(&self, _job: &Job) -> Result<Box<dyn Compute>, LearnError> {
        let tensor = TensorSpec {
            name: "bias".to_owned(),
            dtype: Dtype::F32,
            shape: vec![1],
            role: Role::Trainable { group: "default".to_owned() },
        };
        Ok(Box::new(MoodCompute(Schema::new(vec![tensor])?)))
    }

    fn inference(&self, _job: &Job) -> Option<Inference> {
        let classes = ["negative", "positive"].map(str::to_owned).to_vec();
        Some(Inference { input: Input::Text, classes })
    }

    fn encoder(&self, _job: &Job, _assets: &Assets) -> Result<Box<dyn Encoder>, LearnError> {
        Ok(Box::new(Counted))
    }
}

struct Counted;

impl Encoder for Counted {
    fn encode(&self, texts: &[String]) -> Result<Table, LearnError> {
        let score = |text: &String| {
            assert!(!text.contains("panic"), "asked to");
            text.split_whitespace()
                .map(|word| match word.trim_matches('.') {
                    "good" => 1.0f32,
                    "bad" => -1.0,
                    _ => 0.0,
                })
                .sum::<f32>()
        };
        let bytes = texts.iter().flat_map(|text| score(text).to_le_bytes()).collect();
        let column = Column { name: "score".to_owned(), dtype: Dtype::F32, shape: vec![], bytes };
        Ok(Table::new(vec![column])?)
    }
}

impl Compute for MoodCompute {
    fn schema(&self) -> &Schema {
        &self.0
    }

    fn initial(&self, _seed: u64) -> Result<Frame, LearnError> {
        Ok(Frame::zeros(Arc::new(Layout::of_version(&self.0, Encoding::F32)?)))
    }

    fn load(&mut self, _parameters: &Frame) -> Result<(), LearnError> {
        Ok(())
    }

    fn gradient(&mut self, _: &Table, _: u64, _: &mut Frame) -> Result<f64, LearnError> {
        Err(LearnError::NoInference("mood".to_owned()))
    }

    fn evaluate(&mut self, _: &Table) -> Result<EvaluationCounts, LearnError> {
        Err(LearnError::NoInference("mood".to_owned()))
    }

    fn infer(&mut self, batch: &Table) -> Result<Vec<f32>, LearnError> {
        let scores = batch.columns()[0].f32s()?.into_owned();
        Ok(scores.iter().flat_map(|score| [-score, *score]).collect())
    }
}

fn mood(queue: usize, threads: usize) -> (Arc<Serving>, Router) {
    let model =
        Model::new("mood", Arc::new(Mood), Job::default(), &Assets::new()).expect("can be asked");
    let settings = ServingSettings { queue, threads, ..ServingSettings::default() };
    let serving = Serving::start(model, fetcher(), settings).expect("starts");
    serving.publish(version(&serving, 0));
    (serving.clone(), app(serving))
}

#[tokio::test]
async fn a_text_is_answered_with_the_words_that_drove_it() {
    let (_, app) = mood(16, 1);
    assert_eq!(get(&app, "/model").await.json()["takes"], "text");
    let question = json!({ "text": "A good film, good and not bad." });
    let answer = post_json(&app, "/predict", &question).await.json();
    assert_eq!(answer["answer"], "positive");
    let words = answer["words"].as_array().expect("a list");
    assert_eq!(words.len(), 7);
    let weight = |at: usize| words[at]["weight"].as_f64().expect("a number");
    assert_eq!(words[1]["word"], "good");
    assert!(weight(1) > 0.0 && weight(3) > 0.0 && weight(6) < 0.0, "{answer}");
    assert_eq!(weight(0), 0.0);
    // Without a "good" its score falls by one and the other's rises by one: two in log-odds.
    assert!((weight(1) - 2.0).abs() < 1e-6, "{answer}");
    // However sure the model is.
    let sure = json!({ "text": "good ".repeat(30) });
    let sure = post_json(&app, "/predict", &sure).await.json();
    assert!((sure["words"][7]["weight"].as_f64().expect("a number") - 2.0).abs() < 1e-6, "{sure}");
    let plain = post(&app, "/predict", "text/plain", "bad").await.json();
    assert_eq!(plain["answer"], "negative");
    let infer = json!({ "inputs": [{ "name": "text", "shape": [2], "datatype": "BYTES", "data": ["good", "bad"] }] });
    let inferred = post_json(&app, "/v2/models/mood/infer", &infer).await.json();
    assert_eq!(inferred["outputs"][1]["data"], json!([-1.0, 1.0, 1.0, -1.0]));

    post(&app, "/predict", "image/png", picture(ImageFormat::Png)).await.refused(
        400,
        "bad_request",
        "takes a text, not an image",
    );
    post_json(&app, "/predict", &json!({ "text": " " })).await.refused(400, "bad_request", "empty");
    post_json(&app, "/predict", &json!({ "text": "x".repeat(20_001) })).await.refused(
        413,
        "too_large",
        "20000",
    );
    post(&app, "/predict", "text/plain", vec![0xff]).await.refused(400, "bad_request", "UTF-8");
    // A question that makes the model panic costs its own answer only.
    post_json(&app, "/predict", &json!({ "text": "panic" })).await.refused(500, "internal", "");
    let after = post_json(&app, "/predict", &json!({ "text": "good" })).await;
    assert_eq!(after.json()["answer"], "positive");
}

/// The page of a text model in a real browser. Needs chromium, chromium-driver and python3.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_of_a_text_model_works_in_a_browser() {
    let there = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if !(there("chromium") && there("chromedriver") && there("python3")) {
        let what = "no chromium, chromedriver and python3";
        assert!(std::env::var_os("CI").is_none(), "{what}, and under CI nothing is skipped");
        println!("skipped: {what}");
        return;
    }
    let (_, app) = mood(64, 1);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("binds");
    let url = format!("http://{}", listener.local_addr().expect("is bound"));
    let (down, shutdown) = tokio::sync::watch::channel(false);
    let server = tokio::spawn(skep_serve::run(listener, app, shutdown));
    let ended = tokio::task::spawn_blocking(move || {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/try_page.py");
        let mut command = Command::new("python3");
        command.args([script, "write", &url]);
        if let Some(folder) = std::env::var_os("SKEP_SCREENSHOTS") {
            command.arg("--screenshots").arg(folder);
        }
        command.output().expect("python3 starts")
    });
    let ended = ended.await.expect("no panic");
    println!("{}", String::from_utf8_lossy(&ended.stdout));
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    down.send_replace(true);
    assert!(server.await.is_ok_and(|ended| ended.is_ok()), "ends in good order");
}

#[tokio::test]
async fn a_full_queue_says_so_and_when_to_come_back() {
    let (_, app) = mood(1, 1);
    // Long enough that the others are there before it is done.
    let long = json!({ "text": "good ".repeat(250) });
    let busy = (0..64).map(|_| {
        let (app, long) = (app.clone(), long.to_string());
        tokio::spawn(async move {
            let request =
                Request::post("/predict").header(header::CONTENT_TYPE, "application/json");
            let request = request.body(Body::from(long)).expect("a request");
            let response = app.oneshot(request).await.expect("answers");
            let again = response.headers().contains_key(header::RETRY_AFTER);
            (response.status(), again)
        })
    });
    let mut refused = 0;
    for answer in futures::future::join_all(busy).await {
        let (status, again) = answer.expect("no panic");
        assert!(matches!(status.as_u16(), 200 | 503), "{status}");
        assert_eq!(status == 503, again);
        refused += usize::from(status == 503);
    }
    assert!((1..64).contains(&refused), "{refused} of 64 were refused");
    let after = post_json(&app, "/predict", &json!({ "text": "good" })).await;
    assert_eq!(after.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_is_the_named_versions_while_versions_change() {
    let serving = digits();
    serving.publish(version(&serving, 0));
    let app = app(serving.clone());
    let row: Vec<u8> = (0..784).map(|at| (at * 7 % 256) as u8).collect();
    let question = json!({ "inputs": [{ "name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": row }], "outputs": [{ "name": "logits" }] });
    let column = Column { name: "image".into(), dtype: Dtype::U8, shape: vec![28, 28], bytes: row };
    let batch = Table::new(vec![column]).expect("a table");
    let mut compute = serving.model().compute().expect("builds");
    let mut expected = |seed: u64| {
        compute.load(&version(&serving, seed).parameters).expect("loads");
        compute.infer(&batch).expect("infers")
    };
    let expected: Vec<Vec<f32>> = (0..8).map(&mut expected).collect();
    let askers: Vec<_> = (0..16)
        .map(|_| {
            let (app, question) = (app.clone(), question.clone());
            tokio::spawn(async move {
                let mut answers = Vec::new();
                for _ in 0..40 {
                    let answer = post_json(&app, "/v2/models/digits/infer", &question).await;
                    assert_eq!(answer.status, StatusCode::OK);
                    let json = answer.json();
                    assert_eq!(json["model_version"].as_str(), answer.version.as_deref());
                    answers.push(json);
                }
                answers
            })
        })
        .collect();
    for change in 0..200 {
        serving.publish(version(&serving, change % 8));
        tokio::task::yield_now().await;
    }
    for asker in askers {
        for answer in asker.await.expect("no panic") {
            let version = answer["model_version"].as_str().expect("is named");
            let seed: usize = version[2..].parse().expect("a seed");
            let data = answer["outputs"][0]["data"].as_array().expect("a list");
            let scores: Vec<f32> =
                data.iter().filter_map(|value| Some(value.as_f64()? as f32)).collect();
            assert_eq!(scores, expected[seed], "version {version}, to the last bit");
        }
    }
}

/// LeNet-5 that keeps notes of what it computes, waits the first time, and panics at a row that
/// begins with 13.
#[derive(Clone)]
struct Watched {
    lenet5: Arc<dyn Task>,
    /// How many rows each computation had.
    rows: Arc<Mutex<Vec<usize>>>,
    go_on: Arc<Barrier>,
}

struct WatchedCompute {
    compute: Box<dyn Compute>,
    by: Watched,
}

impl Task for Watched {
    fn name(&self) -> &str {
        "watched"
    }

    fn about(&self) -> &str {
        "LeNet-5 with notes"
    }

    fn defaults(&self) -> Job {
        self.lenet5.defaults()
    }

    fn dataset(&self, job: &Job) -> Result<Dataset, LearnError> {
        self.lenet5.dataset(job)
    }

    fn compute(&self, job: &Job) -> Result<Box<dyn Compute>, LearnError> {
        Ok(Box::new(WatchedCompute { compute: self.lenet5.compute(job)?, by: self.clone() }))
    }

    fn inference(&self, job: &Job) -> Option<Inference> {
        self.lenet5.inference(job)
    }
}

impl Compute for WatchedCompute {
    fn schema(&self) -> &Schema {
        self.compute.schema()
    }

    fn initial(&self, seed: u64) -> Result<Frame, LearnError> {
        self.compute.initial(seed)
    }

    fn load(&mut self, parameters: &Frame) -> Result<(), LearnError> {
        self.compute.load(parameters)
    }

    fn gradient(&mut self, batch: &Table, seed: u64, into: &mut Frame) -> Result<f64, LearnError> {
        self.compute.gradient(batch, seed, into)
    }

    fn evaluate(&mut self, batch: &Table) -> Result<EvaluationCounts, LearnError> {
        self.compute.evaluate(batch)
    }

    fn infer(&mut self, batch: &Table) -> Result<Vec<f32>, LearnError> {
        let first = {
            let mut rows = self.by.rows.lock().expect("no panic");
            rows.push(batch.rows());
            rows.len() == 1
        };
        if first {
            self.by.go_on.wait();
        }
        let mut begins = batch.columns()[0].bytes.chunks(784).map(|row| row[0]);
        assert!(begins.all(|first| first != 13), "asked to");
        self.compute.infer(batch)
    }

    fn rows_at_once(&self) -> Option<usize> {
        self.compute.rows_at_once()
    }
}

#[tokio::test]
async fn questions_that_wait_are_computed_together_and_answered_each_for_itself() {
    let task = Watched { lenet5: lenet5(), rows: Arc::default(), go_on: Arc::new(Barrier::new(2)) };
    let job = task.defaults();
    let model = Model::new("digits", Arc::new(task.clone()), job, &Assets::new()).expect("is one");
    let settings = ServingSettings { threads: 1, ..ServingSettings::default() };
    let serving = Serving::start(model, fetcher(), settings).expect("starts");
    let loaded = version(&serving, 7);
    let mut alone = lenet5().compute(&lenet5().defaults()).expect("builds");
    alone.load(&loaded.parameters).expect("loads");
    serving.publish(loaded);
    let app = app(serving.clone());
    let image = |seed: usize| -> Vec<u8> { (0..784).map(|at| (at * seed % 251) as u8).collect() };
    let ask = |data: Value| {
        let question = json!({ "inputs": [{ "name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": data }], "outputs": [{ "name": "logits" }] });
        let app = app.clone();
        tokio::spawn(async move { post_json(&app, "/v2/models/digits/infer", &question).await })
    };
    let first = ask(json!(image(1)));
    while task.rows.lock().expect("no panic").is_empty() {
        tokio::task::yield_now().await;
    }
    // The thread is at work: these wait for it.
    let mut waiting = Vec::new();
    for seed in 2..14 {
        waiting.push((image(seed), ask(json!(image(seed)))));
    }
    let broken = ask(json!(["not", "a", "number"]));
    let mut bad = image(3);
    bad[0] = 13;
    let panics = ask(json!(bad));
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    task.go_on.wait();
    waiting.push((image(1), first));
    for (image, answer) in waiting {
        let answer = answer.await.expect("no panic");
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.json());
        let data = answer.json()["outputs"][0]["data"].clone();
        let scores: Vec<f32> = serde_json::from_value(data).expect("numbers");
        let column =
            Column { name: "image".into(), dtype: Dtype::U8, shape: vec![28, 28], bytes: image };
        let batch = Table::new(vec![column]).expect("a table");
        assert_eq!(scores, alone.infer(&batch).expect("infers"), "to the last bit");
    }
    broken.await.expect("no panic").refused(400, "bad_request", "cannot be read");
    panics.await.expect("no panic").refused(500, "internal", "");
    let rows = task.rows.lock().expect("no panic").clone();
    assert_eq!(rows[..2], [1, 13], "one, then all that waited and could be read: {rows:?}");
}
