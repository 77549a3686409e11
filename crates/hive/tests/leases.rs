//! Leases and runs over the wire: who gets work, who loses it, and what others can watch.

mod support;

use std::collections::HashMap;
use std::time::Duration;

use http::Method;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use skep_data::shard_hash;
use skep_wire::{
    ContributionKind, Dtype, Encoding, Envelope, ErrorCode, Event, Frame, Layout, LeaseAnswer,
    LeaseKind, LeaseView, LogLine, RUN_METADATA, Role, RunState, RunView, Split, TensorSpec,
    Version,
};
use support::{
    Call, PATIENCE, RunSetup, TestHive, envelope, eventually, rest, shard, status_of, tensor,
};

fn change(hive: &TestHive, action: &str) -> Call {
    hive.call(Method::PATCH, "/v1/runs/bees").json(&json!({ "action": action }))
}

fn lease_path(lease: &LeaseView) -> String {
    format!("/v1/runs/bees/leases/{}", lease.id)
}

/// One shard of one contribution.
fn one_slice() -> RunSetup {
    let mut run = RunSetup::new("bees", 2);
    run.train = vec![4];
    run
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_work_gets_it_when_there_is_some() {
    let hive = TestHive::open().await;
    hive.create(&one_slice()).await;
    let held = hive.lease("bees", "one").await;
    assert_eq!((held.kind, held.first, held.count, held.chunk), (LeaseKind::Train, 0, 4, 4));
    let none = hive.ask("bees", json!({ "worker": "two" })).await;
    assert!(matches!(&none, LeaseAnswer::Wait { seconds, .. } if *seconds > 0.0), "{none:?}");
    let give_back = async {
        hive.call(Method::DELETE, &lease_path(&held)).ok().await;
    };
    let (next, ()) = tokio::join!(hive.lease("bees", "two"), give_back);
    assert_ne!(next.id, held.id);
    assert_eq!((next.first, next.count), (held.first, held.count));
    // One worker holds one lease: asking again gives the former one back.
    let again = hive.lease("bees", "two").await;
    hive.call(Method::PUT, &lease_path(&next)).refused(ErrorCode::LeaseGone).await;
    hive.call(Method::PUT, &lease_path(&again)).ok().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeats_keep_a_lease_and_a_lapsed_one_never_comes_back() {
    let hive = TestHive::open().await;
    let times = json!({ "seconds": 0.5, "progress_seconds": 60.0, "target_seconds": 2.0 });
    let run = one_slice().with("lease", times);
    hive.create(&run).await;
    let lease = hive.lease("bees", "bee").await;
    let renew = || hive.call(Method::PUT, &lease_path(&lease));
    for _ in 0..8 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let renewed: Value = renew().ok().await.json();
        assert!(renewed["renew_seconds"].as_f64().is_some_and(|seconds| seconds < 0.5));
    }
    eventually("the lease lapses", async || {
        (metrics(&hive).await["skep_leases_lapsed_total"] == 1.0).then_some(())
    })
    .await;
    let body = run.gradient(-1.0).as_bytes().to_vec();
    for _ in 0..2 {
        renew().refused(ErrorCode::LeaseGone).await;
        hive.push("bees", &envelope(&lease), body.clone()).refused(ErrorCode::LeaseGone).await;
        hive.call(Method::DELETE, &lease_path(&lease)).refused(ErrorCode::LeaseGone).await;
    }
    assert_eq!(hive.view("bees").await.version.number, 0);
    hive.call(Method::PUT, "/v1/runs/bees/leases/7").refused(ErrorCode::BadRequest).await;
    let next = hive.lease("bees", "bee").await;
    hive.work(&run, &next, &run.gradient(-1.0)).await;
    assert_eq!(hive.state("bees").await, RunState::Done);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slice_that_fails_five_times_is_skipped_and_named() {
    let hive = TestHive::open().await;
    let mut run = RunSetup::new("bees", 2);
    run.train = vec![12];
    hive.create(&run).await;
    let mut failures = 0;
    loop {
        let lease = match hive.ask("bees", json!({ "worker": "bee", "wait": 20.0 })).await {
            LeaseAnswer::Lease(lease) => lease,
            LeaseAnswer::Done { .. } => break,
            other => panic!("{other:?}"),
        };
        if lease.first == 4 {
            let failure = json!({ "failure": "the image\u{1b}[31m is\nbroken" });
            hive.call(Method::DELETE, &lease_path(&lease)).json(&failure).ok().await;
            failures += 1;
        } else {
            hive.work(&run, &lease, &run.gradient(-1.0)).await;
        }
    }
    assert_eq!(failures, 5);
    let view = hive.view("bees").await;
    assert_eq!((view.state, view.samples), (RunState::DoneWithGaps, 8));
    let gap = &view.skipped[0];
    assert_eq!((view.skipped.len(), gap.epoch, gap.first, gap.count), (1, 0, 4, 4));
    assert!(gap.reason.contains("the image[31m isbroken"), "no control characters: {}", gap.reason);
    let hive = hive.restart().await;
    assert_eq!(hive.view("bees").await.skipped, view.skipped);
}

#[tokio::test(flavor = "multi_thread")]
async fn evaluations_are_leased_checked_and_kept() {
    let hive = TestHive::open().await;
    let mut run = one_slice();
    run.validation = vec![100];
    run.test = vec![8];
    hive.create(&run).await;
    let lease = hive.lease("bees", "bee").await;
    hive.work(&run, &lease, &run.gradient(-1.0)).await;
    let mut slices = Vec::new();
    loop {
        let lease = match hive.ask("bees", json!({ "worker": "judge", "wait": 20.0 })).await {
            LeaseAnswer::Lease(lease) => lease,
            LeaseAnswer::Done { .. } => break,
            other => panic!("{other:?}"),
        };
        assert_eq!((lease.kind, lease.base.number), (LeaseKind::Evaluate, 1));
        let mut good = envelope(&lease);
        good.kind = ContributionKind::Evaluation;
        let push = |envelope: &_, loss: f64, correct: u64| {
            let counts = json!({ "loss_sum": loss, "correct": correct });
            hive.push("bees", envelope, counts.to_string())
        };
        let (loss, correct) = (lease.count as f64 * 0.5, lease.count / 2);
        let changes: [fn(&mut Envelope); 4] = [
            |envelope| envelope.count -= 1,
            |envelope| envelope.first += 1,
            |envelope| envelope.sequence = 1,
            |envelope| envelope.base.number = 0,
        ];
        for change in changes {
            let mut wrong = good.clone();
            change(&mut wrong);
            push(&wrong, loss, correct).refused(ErrorCode::WrongRange).await;
        }
        push(&good, loss, lease.count + 1).refused(ErrorCode::WrongRange).await;
        // Two of these would make an infinite mean, which no checkpoint can hold.
        push(&good, 1e308, correct).refused(ErrorCode::NotFinite).await;
        for body in ["", "{}", "[1]", r#"{"loss_sum":"NaN"}"#, r#"{"loss_sum":1,"correct":-1}"#] {
            hive.push("bees", &good, body).refused(ErrorCode::BadRequest).await;
        }
        push(&good, loss, correct).ok().await;
        // A repeat changes nothing.
        push(&good, loss * 2.0, 0).ok().await;
        slices.push((lease.split, lease.count));
    }
    assert_eq!(slices, [(Split::Validation, 64), (Split::Validation, 36), (Split::Test, 8)]);
    let check = |view: &RunView| {
        assert_eq!(view.state, RunState::Done);
        for (measured, samples) in [(view.validation, 100), (view.best, 100), (view.test, 8)] {
            let measured = measured.expect("was measured");
            assert_eq!((measured.samples, measured.loss), (samples, 0.5));
            assert_eq!(measured.accuracy, Some(0.5));
        }
    };
    check(&hive.view("bees").await);
    let hive = hive.restart().await;
    check(&hive.view("bees").await);
}

/// Who only evaluates waits for that, is woken by it, and hears of the end; and so does who only
/// trains.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_gets_the_kinds_of_leases_it_takes() {
    let hive = TestHive::open().await;
    let mut run = one_slice();
    run.test = vec![8];
    hive.create(&run).await;
    let ask = |kinds: Value, wait: f64| {
        hive.ask("bees", json!({ "worker": kinds.to_string(), "kinds": kinds, "wait": wait }))
    };
    let reason = |answer: LeaseAnswer| match answer {
        LeaseAnswer::Wait { reason, .. } => reason,
        other => panic!("{other:?}"),
    };
    assert!(reason(ask(json!(["evaluate"]), 0.0).await).contains("only evaluations"));
    let lease = hive.lease("bees", "bee").await;
    let gradient = run.gradient(-1.0);
    let training = hive.work(&run, &lease, &gradient);
    let (judge, ()) = tokio::join!(ask(json!(["evaluate"]), 20.0), training);
    let LeaseAnswer::Lease(judge) = judge else { panic!("{judge:?}") };
    assert_eq!(judge.kind, LeaseKind::Evaluate);
    assert!(reason(ask(json!(["train"]), 0.0).await).contains("no evaluations"));
    hive.call(Method::DELETE, &lease_path(&judge)).ok().await;
    let LeaseAnswer::Lease(judge) = ask(json!(["train", "evaluate"]), 0.0).await else {
        panic!("no lease")
    };
    let counts = Envelope { kind: ContributionKind::Evaluation, ..envelope(&judge) };
    let body = json!({ "loss_sum": 8.0, "correct": 4 }).to_string();
    let counted = async { drop(hive.push("bees", &counts, body).ok().await) };
    let (end, ()) = tokio::join!(ask(json!(["train"]), 20.0), counted);
    assert!(matches!(end, LeaseAnswer::Done { .. }), "{end:?}");
    assert!(matches!(ask(json!(["evaluate"]), 20.0).await, LeaseAnswer::Done { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_for_work_are_checked() {
    let hive = TestHive::open().await;
    hive.create(&one_slice()).await;
    let ask = |request: Value| hive.post("/v1/runs/bees/leases").json(&request);
    let long = "x".repeat(129);
    for name in ["", "two words", "tab\t", "é", "\u{1b}[2J", long.as_str()] {
        ask(json!({ "worker": name })).refused(ErrorCode::BadRequest).await;
    }
    for request in [
        json!({}),
        json!([]),
        json!({ "worker": "bee", "wait": -1.0 }),
        json!({ "worker": "bee", "seconds_left": -0.5 }),
        json!({ "worker": "bee", "waiting": "long" }),
        json!({ "worker": "bee", "rank": 0 }),
        json!({ "worker": "bee", "has": "everything" }),
        json!({ "worker": "bee", "kinds": ["rest"] }),
    ] {
        ask(request).refused(ErrorCode::BadRequest).await;
    }
    // Refused by what is announced: a body on its way would race with the end of the connection.
    let head =
        "POST /v1/runs/bees/leases HTTP/1.1\r\nhost: hive\r\ncontent-length: 2097152\r\n\r\n";
    let answer = rest(&mut hive.raw(head.as_bytes()).await).await;
    assert_eq!(status_of(&answer), Some(413));
    assert!(String::from_utf8_lossy(&answer).contains("too_large"));
    let unreadable = json!({ "worker": "bee", "only": [shard_hash(b"another")] });
    let answer: LeaseAnswer = ask(unreadable).ok().await.json();
    assert!(matches!(answer, LeaseAnswer::Wait { .. }), "{answer:?}");
    let extreme = json!({
        "worker": "b".repeat(128), "engine": "e".repeat(5000), "seconds_left": 1e300,
        "waiting": 1e300, "wait": 1e300, "has": [shard_hash(&shard(4)), "nonsense"],
    });
    let answer: LeaseAnswer = ask(extreme).ok().await.json();
    assert!(matches!(answer, LeaseAnswer::Lease(_)), "{answer:?}");
    let view = hive.view("bees").await;
    let worker = view.workers.iter().find(|worker| worker.name.len() == 128).expect("was seen");
    assert_eq!((worker.engine.len(), worker.waiting), (200, 1.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_paused_resumed_finished_stopped_and_deleted() {
    let hive = TestHive::open().await;
    let run = RunSetup::new("bees", 2);
    hive.create(&run).await;
    let work = async || {
        let lease = hive.lease("bees", "bee").await;
        hive.work(&run, &lease, &run.gradient(-1.0)).await;
    };
    work().await;
    change(&hive, "pause").ok().await;
    let waits = hive.ask("bees", json!({ "worker": "bee" })).await;
    assert!(matches!(waits, LeaseAnswer::Wait { .. }), "{waits:?}");
    assert_eq!(hive.state("bees").await, RunState::Paused);
    change(&hive, "resume").ok().await;
    work().await;
    change(&hive, "finish").ok().await;
    let done = hive.ask("bees", json!({ "worker": "bee", "wait": 20.0 })).await;
    assert!(matches!(done, LeaseAnswer::Done { .. }), "{done:?}");
    assert_eq!(hive.state("bees").await, RunState::Done);
    for action in ["pause", "resume", "stop"] {
        change(&hive, action).refused(ErrorCode::NotRunning).await;
    }
    change(&hive, "dance").refused(ErrorCode::BadRequest).await;
    let model = eventually("the final model", async || hive.view("bees").await.model).await;
    assert!(std::path::Path::new(&model).is_file(), "{model}");

    // A run of the same name begins anew, whatever was still being written.
    for _ in 0..5 {
        hive.call(Method::DELETE, "/v1/runs/bees").ok().await;
        hive.get("/v1/runs/bees").refused(ErrorCode::NotFound).await;
        hive.create(&run.clone().with("checkpoint", json!({ "seconds": 0.05 }))).await;
        assert_eq!(hive.view("bees").await.version, Version::new(1, 0));
        work().await;
        change(&hive, "stop").ok().await;
        let stopped = hive.ask("bees", json!({ "worker": "bee", "wait": 20.0 })).await;
        assert!(matches!(stopped, LeaseAnswer::Stopped { .. }), "{stopped:?}");
    }
    hive.call(Method::DELETE, "/v1/runs/wasps").refused(ErrorCode::NotFound).await;
}

/// A run as a file: version 0, and the description in its metadata.
fn run_file(run: &RunSetup) -> Vec<u8> {
    let (spec, frame) = run.build();
    file_of(&serde_json::to_value(spec).expect("JSON"), &frame)
}

fn file_of(spec: &Value, frame: &Frame) -> Vec<u8> {
    let tensors = frame.layout().places().iter();
    let tensors = tensors.map(|place| (place.name.clone(), place.dtype, place.shape.clone()));
    let metadata = HashMap::from([(RUN_METADATA.to_owned(), spec.to_string())]);
    let layout = Layout::with_metadata(tensors.collect(), Some(metadata)).expect("a layout");
    [layout.prefix(), frame.data()].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_are_created_over_the_wire_and_hostile_ones_are_not() {
    let hive = TestHive::open().await;
    let run = one_slice();
    let create = |file: Vec<u8>| hive.post("/v1/runs").body(file);
    // Its shard is not there yet.
    create(run_file(&run)).refused(ErrorCode::BadRequest).await;
    let bytes = shard(4);
    let path = format!("/v1/shards/{}", shard_hash(&bytes));
    hive.call(Method::PUT, &path).body("other bytes").refused(ErrorCode::BadRequest).await;
    hive.call(Method::PUT, "/v1/shards/..%2f..%2fescape").refused(ErrorCode::BadRequest).await;
    hive.call(Method::PUT, &path).body(bytes.clone()).ok().await;
    let view: RunView = create(run_file(&run)).ok().await.json();
    assert_eq!((view.name.as_str(), view.state), ("bees", RunState::Running));
    create(run_file(&run)).refused(ErrorCode::Exists).await;

    let shard_path = format!("/v1/runs/bees/shards/{}", shard_hash(&bytes));
    assert_eq!(hive.get(&shard_path).ok().await.body, bytes);
    let part = hive.get(&shard_path).header("range", "bytes=1-2").ok().await;
    assert_eq!((part.status, part.text("content-range")), (206, "bytes 1-2/4"));
    assert_eq!(part.body, bytes[1..3]);
    for range in ["bytes=4-", "bytes=3-2", "bytes=-1", "lines=0-1", "bytes=0-1,2-3"] {
        hive.get(&shard_path).header("range", range).refused(ErrorCode::BadRequest).await;
    }
    let other = format!("/v1/runs/bees/shards/{}", "0".repeat(64));
    hive.get(&other).refused(ErrorCode::NotFound).await;

    let (spec, frame) = run.build();
    let spec = serde_json::to_value(spec).expect("JSON");
    let hostile = |change: &dyn Fn(&mut Value)| {
        let mut spec = spec.clone();
        spec["name"] = json!("wasps");
        change(&mut spec);
        create(file_of(&spec, &frame))
    };
    for name in ["", "..", "../bees", "Bees", "a/b", "-x", "x\u{0}", &"x".repeat(64)] {
        hostile(&|spec| spec["name"] = json!(name)).refused(ErrorCode::BadRequest).await;
    }
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 9] = [
        ("samples", |spec| spec["manifest"]["train"][0]["samples"] = json!(u64::MAX)),
        ("no samples", |spec| spec["manifest"]["train"][0]["samples"] = json!(0)),
        ("bytes", |spec| spec["manifest"]["train"][0]["bytes"] = json!(5)),
        ("hash", |spec| spec["manifest"]["train"][0]["hash"] = json!("../../etc/passwd")),
        ("policy", |spec| spec["job"]["policy"] = json!({ "kind": "anarchy" })),
        ("batch", |spec| spec["job"]["train"]["batch"] = json!(0)),
        ("chunk", |spec| spec["job"]["train"] = json!({ "batch": u64::MAX, "every": u64::MAX })),
        ("lease", |spec| spec["job"]["lease"]["seconds"] = json!(1e300)),
        ("rate", |spec| spec["job"]["optimiser"] = json!({ "kind": "sgd", "rate": -1.0 })),
    ];
    for (what, change) in cases {
        let error = hostile(&change).refused(ErrorCode::BadRequest).await;
        assert!(!error.message.is_empty(), "{what}");
    }
    // Tensors that are claimed but not there take no memory.
    for shape in [
        json!([1u64 << 40]),
        json!([u64::MAX]),
        json!([1u64 << 32, 1u64 << 32]),
        json!([u64::MAX / 4 - 64]),
    ] {
        let answer = hostile(&|spec| spec["schema"][0]["shape"] = shape.clone()).send().await;
        assert_eq!(answer.error().code, ErrorCode::WrongSchema, "{shape}");
    }
    let mut poisoned = frame.clone();
    poisoned.floats_mut()[0] = f32::NAN;
    create(file_of(&spec, &poisoned)).refused(ErrorCode::NotFinite).await;
    create(frame.as_bytes().to_vec()).refused(ErrorCode::BadRequest).await;
    create(b"short".to_vec()).refused(ErrorCode::BadRequest).await;
    create(b"nonsense".to_vec()).refused(ErrorCode::TooLarge).await;

    // As long as can be said, without an overflow.
    hostile(&|spec| spec["job"]["run"]["epochs"] = json!(u64::MAX)).ok().await;
    assert_eq!(hive.view("wasps").await.epochs, Some(u64::MAX));
    hive.lease("wasps", "wasp").await;
    assert_eq!(hive.hive.run_names(), ["bees", "wasps"]);
}

#[test]
fn schemas_that_cannot_be_are_refused() {
    let follower = |of: &str, shape: &[usize], tau| {
        tensor("slow", Dtype::F32, shape, Role::Ema { of: of.to_owned(), tau })
    };
    let w = || tensor("w", Dtype::F32, &[2], Role::trainable());
    let mean = Role::Buffer { merge: skep_wire::BufferMerge::Mean };
    let cases: Vec<Vec<TensorSpec>> = vec![
        vec![],
        vec![tensor("w", Dtype::F32, &[2], Role::Frozen)],
        vec![w(), w()],
        vec![tensor("w", Dtype::F16, &[2], Role::trainable())],
        vec![tensor("__metadata__", Dtype::F32, &[2], Role::trainable())],
        vec![w(), follower("v", &[2], 0.5)],
        vec![w(), follower("w", &[3], 0.5)],
        vec![w(), follower("w", &[2], 1.5)],
        vec![w(), follower("w", &[2], f32::NAN)],
        vec![w(), tensor("count", Dtype::I64, &[], mean)],
        vec![tensor("w", Dtype::F32, &[usize::MAX, 2], Role::trainable())],
    ];
    for tensors in cases {
        let text = format!("{tensors:?}");
        assert!(skep_wire::Schema::new(tensors).is_err(), "{text}");
    }
    let largest = tensor("w", Dtype::F32, &[usize::MAX / 4 - 64], Role::trainable());
    let schema = skep_wire::Schema::new(vec![largest]).expect("can be counted");
    // Either it has no layout, or one whose sizes add up.
    if let Ok(layout) = Layout::of_version(&schema, Encoding::F32) {
        assert!(layout.total_bytes() > layout.data_bytes());
    }
}

/// The events of a stream, until one is what is looked for.
async fn follow<T: serde::de::DeserializeOwned>(call: Call, found: impl Fn(&T) -> bool) -> Vec<T> {
    let answer = call.head().await;
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    let mut body = answer.into_body();
    let mut text = String::new();
    let mut seen = Vec::new();
    let reading = async {
        loop {
            let frame = body.frame().await.expect("goes on").expect("no error");
            text.push_str(std::str::from_utf8(frame.data_ref().expect("data")).expect("text"));
            while let Some((event, rest)) = text.split_once("\n\n") {
                if let Some(data) = event.strip_prefix("data: ") {
                    seen.push(serde_json::from_str(data).expect("an event"));
                }
                text = rest.to_owned();
            }
            if seen.last().is_some_and(&found) {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, reading).await.expect("in time");
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn events_and_logs_are_delivered() {
    let hive = TestHive::open().await;
    let run = RunSetup::new("bees", 2);
    hive.create(&run).await;
    let ended = |event: &Event| matches!(event, Event::State { state: RunState::Done, .. });
    let work = async {
        // Some may pass before the stream is open; the run's state is always the first event.
        loop {
            match hive.ask("bees", json!({ "worker": "bee", "wait": 20.0 })).await {
                LeaseAnswer::Lease(lease) => hive.work(&run, &lease, &run.gradient(-1.0)).await,
                LeaseAnswer::Done { .. } => break,
                other => panic!("{other:?}"),
            }
        }
    };
    let (events, ()) = tokio::join!(follow(hive.get("/v1/runs/bees/events"), ended), work);
    assert!(matches!(events[0], Event::State { .. }), "{events:?}");

    let logs = || hive.post("/v1/runs/bees/logs");
    let line = |message: &str, level: &str| json!({ "time": 0, "worker": "be\u{1b}e", "level": level, "message": message });
    let long = "m".repeat(5000);
    logs().json(&json!([line("one\u{1b}[2J\ntwo", "warn"), line(&long, &long)])).ok().await;
    let kept: Vec<LogLine> = hive.get("/v1/runs/bees/logs").ok().await.json();
    assert_eq!((kept[0].message.as_str(), kept[0].worker.as_str()), ("one[2Jtwo", "bee"));
    assert_eq!(kept[0].level, "warn");
    assert!(kept[0].time > 0, "the hive's own time");
    assert_eq!((kept[1].message.len(), kept[1].level.as_str()), (2000, "info"), "capped");
    let last = |line: &LogLine| line.message == "last";
    let say = async {
        logs().json(&json!([line("last", "error")])).ok().await;
    };
    let followed = hive.get("/v1/runs/bees/logs?follow=true");
    let (lines, ()) = tokio::join!(follow(followed, last), say);
    assert_eq!(lines.len(), 3);
    logs().json(&json!({ "message": "no list" })).refused(ErrorCode::BadRequest).await;
}

/// Metrics in Prometheus' text form, checked line by line; the samples of `bees`.
async fn metrics(hive: &TestHive) -> HashMap<String, f64> {
    let answer = hive.get("/metrics").ok().await;
    assert!(answer.text("content-type").starts_with("text/plain; version=0.0.4"));
    let text = std::str::from_utf8(&answer.body).expect("text");
    let name = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let mut kinds = HashMap::new();
    let mut samples = HashMap::new();
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# TYPE ") {
            let (metric, kind) = comment.split_once(' ').expect("a kind");
            assert!(["counter", "gauge"].contains(&kind), "{line}");
            assert!(kinds.insert(metric.to_owned(), kind).is_none(), "{metric} is there twice");
        } else if !line.starts_with("# HELP ") {
            let (metric, value) = line.rsplit_once(' ').expect("a value");
            let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
            let (metric, labels) = metric.split_once('{').unwrap_or((metric, "}"));
            assert!(name(metric) && labels.ends_with('}'), "{line}");
            assert!(kinds.contains_key(metric), "no type before {line}");
            if labels == "run=\"bees\"}" {
                assert!(samples.insert(metric.to_owned(), value).is_none(), "{line}");
            }
        }
    }
    samples
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_answer_and_metrics_count() {
    let hive = TestHive::open().await;
    assert_eq!(hive.get("/healthz").ok().await.body, "ok\n");
    assert_eq!(hive.get("/readyz").ok().await.body, "ready\n");
    let run = RunSetup::new("bees", 2);
    hive.create(&run).await;
    let lease = hive.lease("bees", "bee").await;
    hive.work(&run, &lease, &run.gradient(-1.0)).await;
    let stale = run.gradient(-1.0).as_bytes().to_vec();
    let mut gone = envelope(&lease);
    gone.sequence = 9;
    hive.push("bees", &gone, stale).refused(ErrorCode::LeaseGone).await;
    let samples = metrics(&hive).await;
    for (name, value) in [
        ("skep_contributions_total", 1.0),
        ("skep_contributions_refused_total", 1.0),
        ("skep_version", 1.0),
        ("skep_samples_total", 4.0),
        ("skep_workers", 1.0),
        ("skep_running", 1.0),
        ("skep_loss", 0.5),
    ] {
        assert_eq!(samples.get(name), Some(&value), "{name}");
    }
    assert!(samples["skep_received_bytes_total"] > 0.0);
    let document: Value = hive.get("/openapi.json").ok().await.json();
    assert!(document["paths"].is_object());
    let list: Value = hive.get("/v1/runs").ok().await.json();
    assert_eq!(list[0]["name"], "bees");
}
