//! `skep serve` as people use it: a trained model, photographs of digits, a browser, and a run that
//! is followed while it trains.

mod drawing;
mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use drawing::{PLAIN, SCENES, Scene, draw, encode};
use image::ImageFormat;
use serde_json::{Value, json};
use skep_data::{Column, Table};
use skep_learn::{Compute, ImageForm};
use skep_wire::{Dtype, Frame};
use support::server::{Server, try_page};
use support::{HiveSetup, run_to_end, skep_command, wait_for};

/// A store with a run `mnist`, trained once for all tests here.
fn trained() -> &'static Path {
    static STORE: OnceLock<tempfile::TempDir> = OnceLock::new();
    let store = STORE.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = skep_command("train mnist --epochs 6 --json");
        let ended = run_to_end(command.arg("--store").arg(folder.path()));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        println!("{}", ended.stdout.trim());
        folder
    });
    store.path()
}

#[test]
fn photographs_of_all_ten_digits_are_read_right() {
    let store = trained().join("mnist");
    let server = Server::start(&[&store.to_string_lossy()]);
    let mut connection = server.connect();
    let mut wrong = Vec::new();
    for (name, scene) in SCENES {
        for digit in 0..10 {
            let format = if digit % 2 == 0 { ImageFormat::Png } else { ImageFormat::Jpeg };
            let answer = connection.predict(&encode(draw(digit, &scene), format));
            assert_eq!(answer.status, 200, "{}", answer.json());
            let json = answer.json();
            if json["answer"] != json!(digit.to_string()) {
                wrong.push(format!("{digit} as {} ({name})", json["answer"]));
            }
        }
    }
    println!("{} of {} wrong: {wrong:?}", wrong.len(), SCENES.len() * 10);
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// MNIST's own pictures, sent as PNG files, lose next to nothing on the way into MNIST's form.
#[test]
fn mnist_itself_survives_being_brought_into_its_form() {
    let path = trained().join("runs/mnist/model.safetensors");
    let runtime = tokio::runtime::Runtime::new().expect("starts");
    let source = runtime
        .block_on(skep_serve::open(
            &[path.to_string_lossy().into_owned()],
            None,
            &skep_learn::tasks(),
            &skep_serve::GraphSettings::default(),
        ))
        .unwrap_or_else(|error| panic!("{error}"));
    let mut compute = source.model.compute().expect("builds");
    compute.load(&source.loaded.parameters).expect("loads");
    let test = skep_data::mnist::open("mnist").expect("is built in").test;
    let column = |name: &str| test.column(name).expect("is there").bytes.clone();
    let (images, labels) = (column("image"), column("label"));
    let (mut direct, mut by_way, mut count) = (0, 0, 0);
    for (image, label) in images.chunks_exact(784).zip(labels).step_by(2) {
        let grey = image::GrayImage::from_raw(28, 28, image.to_vec()).expect("784 bytes");
        let mut png = std::io::Cursor::new(Vec::new());
        grey.write_to(&mut png, ImageFormat::Png).expect("encodes");
        let formed = skep_serve::picture_to_bytes(&png.into_inner(), [1, 28, 28], ImageForm::Ink);
        let formed = formed.expect("has a figure");
        count += 1;
        direct += usize::from(best(&mut *compute, image) == usize::from(label));
        by_way += usize::from(best(&mut *compute, &formed) == usize::from(label));
    }
    println!("of {count}: {direct} right as they are, {by_way} right by way of a PNG file");
    assert!(by_way + count / 100 >= direct, "more than a hundredth is lost on the way");
}

fn batch(image: &[u8]) -> Table {
    let column = Column {
        name: "image".into(),
        dtype: Dtype::U8,
        shape: vec![1, 28, 28],
        bytes: image.to_vec(),
    };
    Table::new(vec![column]).expect("a table")
}

fn best(compute: &mut dyn Compute, image: &[u8]) -> usize {
    let scores = compute.infer(&batch(image)).expect("infers");
    (0..10).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).expect("ten of them")
}

#[test]
fn a_model_is_found_wherever_it_lies() {
    let store = trained();
    let run = store.join("runs/mnist");
    let loose = tempfile::tempdir().expect("a folder");
    let loose = loose.path().join("loose.safetensors");
    std::fs::copy(run.join("model.safetensors"), &loose).expect("copies");
    let checkpoint = std::fs::read_dir(run.join("checkpoints"))
        .expect("is there")
        .flatten()
        .map(|entry| entry.path().join("model.safetensors"))
        .max()
        .expect("one of them");
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let (run, loose, checkpoint) = (text(&run), text(&loose), text(&checkpoint));
    let by_store = text(&store.join("mnist"));
    let final_model = format!("{run}/model.safetensors");
    let picture = encode(draw(4, &PLAIN), ImageFormat::Png);
    let mut versions = Vec::new();
    for (arguments, name) in [
        (vec![by_store.as_str()], "mnist"),
        (vec![run.as_str()], "mnist"),
        (vec![final_model.as_str()], "mnist"),
        (vec![checkpoint.as_str()], "mnist"),
        (vec![loose.as_str(), "--model", "lenet5"], "loose"),
    ] {
        let mut server = Server::start(&arguments);
        let mut connection = server.connect();
        let model = connection.send("GET", "/model", "", b"").json();
        assert_eq!((&model["name"], &model["kind"]), (&json!(name), &json!("lenet5")));
        let answer = connection.predict(&picture).json();
        assert_eq!(answer["answer"], "4", "{arguments:?}");
        assert_eq!(answer["version"], model["version"]);
        versions.push(model["version"].as_str().expect("a version").to_owned());
        server.process.signal(libc::SIGTERM);
        drop(connection);
        assert_eq!(server.process.code(), Some(0), "ends in good order");
    }
    assert!(versions[0].starts_with("1."), "{versions:?}");
    assert!(versions[..4].iter().all(|version| *version == versions[0]), "{versions:?}");
    assert!(versions[4].starts_with("sha256-"), "{versions:?}");

    for (arguments, parts) in [
        (vec![loose.as_str()], &["does not say", "--model lenet5"][..]),
        (vec![loose.as_str(), "--model", "resnet"], &["resnet", "lenet5"]),
        (vec!["/nowhere/at-all"], &["/nowhere/at-all", "STORE/RUN"]),
        (vec![by_store.as_str(), "--listen", "0.0.0.0:0"], &["not loopback", "--open"]),
        (vec!["--follow", "http://127.0.0.1:1/UPPER"], &["names no run"]),
        (vec![], &["MODEL"]),
    ] {
        let ended = run_to_end(skep_command("serve").args(&arguments));
        assert_eq!(ended.code, Some(2), "{arguments:?}: {}", ended.stderr);
        for part in parts {
            assert!(ended.stderr.contains(part), "{arguments:?}: {}", ended.stderr);
        }
    }
}

/// Where a run has trained to, as seen by one who follows it too.
struct Witness {
    versions: Arc<Mutex<BTreeMap<String, Frame>>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Witness {
    fn of(url: &str, run: &str) -> Self {
        let (url, run) = (url.to_owned(), run.to_owned());
        let versions: Arc<Mutex<BTreeMap<String, Frame>>> = Arc::default();
        let stop = Arc::new(AtomicBool::new(false));
        let (theirs, halt) = (versions.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let watch = support::Watch::new(&url);
            let task = &skep_learn::tasks()[0];
            let compute = task.compute(&task.defaults()).expect("builds");
            let layout = skep_wire::Layout::of_version(compute.schema(), skep_wire::Encoding::F32);
            let layout = Arc::new(layout.expect("lays out"));
            let mut known = None;
            while !halt.load(Ordering::Relaxed) {
                let wait = Duration::from_millis(500);
                let pulled = watch.ask(watch.client.newer_parameters(&run, known, wait));
                let Some(pulled) = pulled.expect("the hive answers") else { continue };
                known = Some(pulled.version);
                let version = pulled.version.to_string();
                let frame = pulled.frame(&layout).expect("the run's");
                theirs.lock().expect("no panic").insert(version, frame);
            }
        });
        Self { versions, stop, thread: Some(thread) }
    }

    fn count(&self) -> usize {
        self.versions.lock().expect("no panic").len()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// 64 connections ask while versions change: no answer but 200, and each is the named version's to
/// the last bit. `SKEP_LOAD_SECONDS` and `SKEP_LOAD_CHANGES` make it longer.
#[test]
fn a_followed_run_answers_with_each_version_in_turn() {
    let setting = |name: &str, usual: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
    };
    let seconds = Duration::from_secs(setting("SKEP_LOAD_SECONDS", 5));
    let changes = setting("SKEP_LOAD_CHANGES", 20) as usize;
    let folder = tempfile::tempdir().expect("a folder");
    // Versions of many samples: a few of them a second, so that the witness misses none.
    let setup = HiveSetup::new(
        &support::skep(),
        folder.path(),
        "mnist --name live --steps 0 --batch 64 --every 2 --policy batch:1",
    );
    let _hive = setup.start();
    let witness = Witness::of(&setup.url(), "live");
    wait_for("version 0", || (witness.count() > 0).then_some(()));
    let follow = format!("{}/live", setup.url());
    let server = Server::start(&["--follow", &follow]);
    wait_for("the server to be ready", || {
        let answer = server.connect().send("GET", "/v2/health/ready", "", b"");
        (answer.status == 200).then_some(())
    });
    let _worker = setup.worker(&[]);

    let scene = Scene { degrees: 3.0, noise: 0.02, ..PLAIN };
    let pictures: Vec<Vec<u8>> =
        (0..4).map(|digit| encode(draw(digit + 3, &scene), ImageFormat::Png)).collect();
    let formed: Vec<Vec<u8>> = pictures
        .iter()
        .map(|png| {
            skep_serve::picture_to_bytes(png, [1, 28, 28], ImageForm::Ink).expect("a figure")
        })
        .collect();
    let tensor = |image: &[u8]| {
        json!({
            "inputs": [{ "name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": image }],
            "outputs": [{ "name": "logits" }],
        })
        .to_string()
    };
    let start = Instant::now();
    let enough = || start.elapsed() >= seconds && witness.count() > changes;
    let done = AtomicBool::new(false);
    // Per picture and version: every distinct answer that was given, and how often.
    type Seen = BTreeMap<(usize, String, String), u64>;
    let seen: Mutex<Seen> = Mutex::default();
    std::thread::scope(|scope| {
        for asker in 0..64usize {
            let (server, done, seen) = (&server, &done, &seen);
            let at = asker % pictures.len();
            let (picture, tensor) = (&pictures[at], tensor(&formed[at]));
            scope.spawn(move || {
                let mut connection = server.connect();
                let mut own = Seen::new();
                while !done.load(Ordering::Relaxed) {
                    let answer = if asker % 2 == 0 {
                        connection.predict(picture)
                    } else {
                        let path = "/v2/models/live/infer";
                        connection.send("POST", path, "application/json", tensor.as_bytes())
                    };
                    assert_eq!(answer.status, 200, "{}", answer.json());
                    let json = answer.json();
                    let (version, numbers) = if asker % 2 == 0 {
                        (&json["version"], &json["probabilities"])
                    } else {
                        (&json["model_version"], &json["outputs"][0]["data"])
                    };
                    assert_eq!(version.as_str(), answer.version.as_deref());
                    let version = version.as_str().expect("is named").to_owned();
                    *own.entry((at, version, numbers.to_string())).or_default() += 1;
                }
                let mut seen = seen.lock().expect("no panic");
                for (key, count) in own {
                    *seen.entry(key).or_default() += count;
                }
            });
        }
        while !enough() {
            assert!(start.elapsed() < support::PATIENCE + seconds, "versions come too slowly");
            std::thread::sleep(Duration::from_millis(20));
        }
        done.store(true, Ordering::Relaxed);
    });
    let elapsed = start.elapsed().as_secs_f64();
    let seen = seen.into_inner().expect("no panic");
    // The last version may have reached the server first.
    let newest = seen.keys().map(|(_, version, _)| version.clone()).collect::<Vec<_>>();
    wait_for("the witness", || {
        let versions = witness.versions.lock().expect("no panic");
        newest.iter().all(|version| versions.contains_key(version)).then_some(())
    });
    let versions = witness.versions.lock().expect("no panic");
    let task = &skep_learn::tasks()[0];
    let mut compute = task.compute(&task.defaults()).expect("builds");
    let (mut answers, mut named) = (0, std::collections::BTreeSet::new());
    for ((at, version, numbers), count) in &seen {
        compute.load(&versions[version]).expect("loads");
        let scores = compute.infer(&batch(&formed[*at])).expect("infers");
        let numbers: Value = serde_json::from_str(numbers).expect("JSON");
        match &numbers {
            Value::Array(logits) => {
                let logits: Vec<f32> =
                    logits.iter().filter_map(|value| Some(value.as_f64()? as f32)).collect();
                assert_eq!(logits, scores, "version {version}");
            }
            shares => {
                let sum: f64 = scores.iter().map(|&score| f64::from(score).exp()).sum();
                for (digit, &score) in scores.iter().enumerate() {
                    let share = shares[digit.to_string()].as_f64().expect("a number");
                    let expected = f64::from(score).exp() / sum;
                    assert!((share - expected).abs() < 1e-5, "version {version}: {digit}");
                }
            }
        }
        answers += count;
        named.insert(version.clone());
    }
    println!(
        "{answers} answers in {elapsed:.1} s ({:.0} a second) on 64 connections, all 200, each \
         equal to one of the {} versions it named, of {} that came out",
        answers as f64 / elapsed,
        named.len(),
        versions.len()
    );
    assert!(named.len() * 2 > changes, "only {} versions went live", named.len());
}

/// The page in a real browser. Needs chromium, chromium-driver and python3.
#[test]
fn the_page_works_in_a_browser() {
    if !support::browser::is_there() {
        return;
    }
    let store = trained().join("mnist");
    let server = Server::start(&[&store.to_string_lossy(), "--allow-private-urls"]);
    let folder = tempfile::tempdir().expect("a folder");
    let picture = folder.path().join("six.png");
    std::fs::write(&picture, encode(draw(6, &SCENES[3].1), ImageFormat::Png)).expect("writes");
    try_page("draw", &server, &["--picture", &format!("{}:6", picture.display())]);
}
