//! Parameters over the wire: one version, whole, with the right name on it.

mod support;

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use serde_json::json;
use skep_wire::{
    Dtype, Encoding, ErrorCode, Frame, FrameView, Layout, LeaseAnswer, LeaseKind, Role, Without,
};
use support::{RunSetup, TestHive, envelope, tensor};

#[tokio::test(flavor = "multi_thread")]
async fn a_version_has_a_tag_and_is_sent_once() {
    let hive = TestHive::open().await;
    let run = RunSetup::new("bees", 5);
    hive.create(&run).await;
    let lease = hive.lease("bees", "bee").await;
    hive.work(&run, &lease, &run.gradient(-1.0 / 3.0)).await;

    let wide = hive.get("/v1/runs/bees/parameters").ok().await;
    assert_eq!(wide.text("etag"), "\"1.1.f32\"");
    assert_eq!(wide.text("content-type"), "application/vnd.safetensors");
    assert_eq!(wide.version().to_string(), "1.1");
    let file = FrameView::parse(&wide.body).expect("a safetensors file");
    let w = file.tensors.tensor("w").expect("the tensor");
    assert_eq!((w.dtype(), w.shape()), (Dtype::F32, &[5][..]));

    let narrow = hive.get("/v1/runs/bees/parameters?encoding=bf16").ok().await;
    assert_eq!(narrow.text("etag"), "\"1.1.bf16\"");
    let file = FrameView::parse(&narrow.body).expect("a safetensors file");
    let narrow = file.tensors.tensor("w").expect("the tensor");
    assert_eq!(narrow.dtype(), Dtype::BF16);
    let numbers: Vec<f32> = bytemuck::pod_collect_to_vec(w.data());
    let rounded: Vec<u8> =
        numbers.iter().flat_map(|number| bf16::from_f32(*number).to_le_bytes()).collect();
    assert_eq!(narrow.data(), rounded, "bf16 is f32, rounded");

    let same = hive.get("/v1/runs/bees/parameters").header("if-none-match", "\"1.1.f32\"");
    let same = same.send().await;
    assert_eq!((same.status, same.body.len()), (304, 0));
    assert_eq!(same.version().to_string(), "1.1");
    // The tag of another encoding or version is another's.
    for tag in ["\"1.1.bf16\"", "\"1.0.f32\"", "1.1.f32"] {
        hive.get("/v1/runs/bees/parameters").header("if-none-match", tag).ok().await;
    }
    hive.call(http::Method::HEAD, "/v1/runs/bees/parameters").ok().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_ends_with_a_version_or_with_the_time() {
    let hive = TestHive::open().await;
    let run = RunSetup::new("bees", 5);
    hive.create(&run).await;
    let wait = |time: &str| {
        let call = hive.get(&format!("/v1/runs/bees/parameters?wait={time}"));
        call.header("if-none-match", "\"1.0.f32\"")
    };
    assert_eq!(wait("0.05s").send().await.status, 304);
    let lease = hive.lease("bees", "bee").await;
    let gradient = run.gradient(-1.0);
    let (waited, ()) = tokio::join!(wait("25s").ok(), hive.work(&run, &lease, &gradient));
    assert_eq!(waited.text("etag"), "\"1.1.f32\"");
    // Who does not say what they have gets what there is.
    assert_eq!(hive.get("/v1/runs/bees/parameters?wait=25s").ok().await.version().number, 1);
    for time in ["soon", "NaN", "", "s", "1e"] {
        wait(time).refused(ErrorCode::BadRequest).await;
    }
    for time in ["-1", "-inf"] {
        assert!(wait(time).send().await.status < 400, "{time} is no time at all");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_in_the_address_are_named() {
    let hive = TestHive::open().await;
    hive.create(&RunSetup::new("bees", 5)).await;
    for query in [
        "vresion=1.0",
        "encoding=f16",
        "without=trainable",
        "without=",
        "version=1",
        "version=1.0&version=1.0",
        "version=-1.0",
    ] {
        let path = format!("/v1/runs/bees/parameters?{query}");
        hive.get(&path).refused(ErrorCode::BadRequest).await;
    }
    hive.get("/v1/runs/bees/parameters?version=1.7").refused(ErrorCode::NotFound).await;
    hive.get("/v1/runs/bees/parameters?version=2.0").refused(ErrorCode::NotFound).await;
    hive.get("/v1/runs/wasps/parameters").refused(ErrorCode::NotFound).await;
    hive.get("/v1/runs/bees/logs?follow=perhaps").refused(ErrorCode::BadRequest).await;
    hive.get("/v1/runs/bees/parameters?version=1.0").ok().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_under_measurement_is_kept_and_the_best_beyond_it() {
    let hive = TestHive::open().await;
    let mut run = RunSetup::new("bees", 5).with("evaluation", json!({ "versions": 1 }));
    run.validation = vec![8];
    hive.create(&run).await;
    let step = async || {
        let lease = hive.lease("bees", "bee").await;
        assert_eq!(lease.kind, LeaseKind::Train);
        hive.work(&run, &lease, &run.gradient(-1.0)).await;
    };
    let pinned = || hive.get("/v1/runs/bees/parameters?version=1.1");
    step().await;
    let evaluation = hive.lease("bees", "judge").await;
    assert_eq!((evaluation.kind, evaluation.base.number), (LeaseKind::Evaluate, 1));
    step().await;
    let kept = pinned().ok().await;
    assert_eq!(kept.text("etag"), "\"1.1.f32\"");
    assert!(hive.get("/v1/runs/bees/parameters").ok().await.version().number > 1);
    hive.get("/v1/runs/bees/parameters?version=best").refused(ErrorCode::NotFound).await;
    measure(&hive, &evaluation, 4).await;
    // The best so far, so its checkpoint is written and can be had for as long as it is the best.
    let best = loop {
        let answer = hive.get("/v1/runs/bees/parameters?version=best").send().await;
        if answer.status == 200 {
            break answer;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert_eq!(best.text("etag"), "\"1.1.f32\"");
    assert_eq!(best.body, kept.body, "the version that was measured, to the bit");
    assert_eq!(pinned().ok().await.body, kept.body);
    let narrow = hive.get("/v1/runs/bees/parameters?version=best&encoding=bf16").ok().await;
    assert_eq!(narrow.text("etag"), "\"1.1.bf16\"");

    // One that does worse is gone when it has been measured.
    step().await;
    let evaluation = hive.lease("bees", "judge").await;
    assert_eq!(evaluation.kind, LeaseKind::Evaluate);
    let worse = format!("/v1/runs/bees/parameters?version={}", evaluation.base);
    step().await;
    hive.get(&worse).ok().await;
    measure(&hive, &evaluation, 3).await;
    hive.get(&worse).refused(ErrorCode::NotFound).await;
    let best = hive.get("/v1/runs/bees/parameters?version=best").ok().await;
    assert_eq!(best.version().to_string(), "1.1");

    // The next hive on the store knows it too.
    let hive = hive.restart().await;
    let best = hive.get("/v1/runs/bees/parameters?version=best").ok().await;
    assert_eq!((best.version().to_string().as_str(), best.body), ("1.1", kept.body));
}

/// Brings home how many of eight were right.
async fn measure(hive: &TestHive, evaluation: &skep_wire::LeaseView, correct: u64) {
    let mut counts = envelope(evaluation);
    counts.kind = skep_wire::ContributionKind::Evaluation;
    let body = json!({ "loss_sum": 8.0, "correct": correct }).to_string();
    hive.push("bees", &counts, body).ok().await;
}

/// What never changes need not be sent again: to who pulls, and to who pushes.
#[tokio::test(flavor = "multi_thread")]
async fn a_version_can_be_had_without_its_frozen_tensors() {
    let hive = TestHive::open().await;
    let mut run = RunSetup::new("bees", 5);
    run.tensors.push(tensor("a", Dtype::F32, &[1000], Role::Frozen));
    run.tensors.push(tensor("z", Dtype::F32, &[3], Role::Frozen));
    run.tensors.push(tensor("steps", Dtype::I64, &[], Role::Frozen));
    let slow = Role::Ema { of: "w".to_owned(), tau: 0.5 };
    run.tensors.push(tensor("x", Dtype::F32, &[5], slow));
    let last = skep_wire::BufferMerge::Last;
    run.tensors.push(tensor("count", Dtype::I64, &[2], Role::Buffer { merge: last }));
    let start = |frame: &mut Frame| {
        let numbers = frame.floats_mut().iter_mut().enumerate();
        numbers.for_each(|(at, number)| *number = at as f32 / 7.0);
    };
    hive.create_from(&run, start).await;
    let sent = async || -> u64 {
        let text = hive.get("/metrics").ok().await;
        let text = String::from_utf8(text.body.to_vec()).expect("text");
        let line =
            text.lines().find(|line| line.starts_with("skep_sent_bytes_total{")).expect(&text);
        line.rsplit(' ').next().expect("a number").parse().expect("a number")
    };
    let path = "/v1/runs/bees/parameters";
    for encoding in ["f32", "bf16"] {
        let whole = hive.get(&format!("{path}?encoding={encoding}")).ok().await;
        let before = sent().await;
        let query = format!("{path}?encoding={encoding}&without=frozen");
        let part = hive.get(&query).ok().await;
        let tag = format!("\"1.0.{encoding}.without-frozen\"");
        assert_eq!((part.text("etag"), part.version().to_string().as_str()), (&*tag, "1.0"));
        assert_eq!(part.text("content-length"), part.body.len().to_string());
        assert_eq!(sent().await - before, part.body.len() as u64, "what was sent was counted");
        assert_changing(&whole.body, &part.body);
        assert!(part.body.len() + 1000 * 2 < whole.body.len());
        let parsed: Encoding = encoding.parse().expect("an encoding");
        let layout = Layout::of_changing(&run.schema(), parsed).expect("a layout");
        assert!(part.body.starts_with(layout.prefix()), "the canonical header");
        let same = hive.get(&query).header("if-none-match", &tag).send().await;
        assert_eq!((same.status, same.body.len()), (304, 0));
        // The whole version is something else, and the other way round.
        let full = format!("\"1.0.{encoding}\"");
        hive.get(&query).header("if-none-match", &full).ok().await;
        hive.get(path).header("if-none-match", &tag).ok().await;
    }

    let wait = format!("{path}?without=frozen&wait=25s");
    let wait = hive.get(&wait).header("if-none-match", "\"1.0.f32.without-frozen\"");
    let lease = hive.lease("bees", "bee").await;
    let mut push = envelope(&lease);
    push.want = Some(Encoding::F32);
    push.have = Some(lease.base);
    push.without = Some(Without::Frozen);
    let push = hive.push("bees", &push, run.gradient(-1.0).as_bytes().to_vec());
    let (waited, pushed) = tokio::join!(wait.ok(), push.ok());
    assert_eq!(waited.text("etag"), "\"1.1.f32.without-frozen\"");
    assert_eq!(pushed.receipt().version.to_string(), "1.1");
    assert_eq!(pushed.body, waited.body);
    let whole = hive.get(path).ok().await;
    assert_changing(&whole.body, &pushed.body);
    hive.push("bees", &envelope(&hive.lease("bees", "bee").await), "")
        .header("skep-without", "everything")
        .refused(ErrorCode::BadRequest)
        .await;
}

/// Checks that a file has all tensors of another one but the frozen ones.
#[track_caller]
fn assert_changing(whole: &[u8], part: &[u8]) {
    let (whole, part) = (FrameView::parse(whole), FrameView::parse(part));
    let (whole, part) = (whole.expect("a file").tensors, part.expect("a file").tensors);
    let mut names: Vec<_> = part.names();
    names.sort_unstable();
    assert_eq!(names, ["count", "w", "x"]);
    for name in names {
        let (all, some) = (whole.tensor(name), part.tensor(name));
        assert_eq!(all.expect("is there"), some.expect("is there"), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_frozen_tensors_there_is_nothing_to_leave_out() {
    let hive = TestHive::open().await;
    hive.create(&RunSetup::new("bees", 5)).await;
    let whole = hive.get("/v1/runs/bees/parameters").ok().await;
    let part = hive.get("/v1/runs/bees/parameters?without=frozen").ok().await;
    assert_eq!(whole.body, part.body);
    assert_ne!(whole.text("etag"), part.text("etag"));
}

/// Every element of version v is v: a mixture of two versions would show.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_readers_never_see_a_torn_version() {
    const VERSIONS: u64 = 120;
    let mut run = RunSetup::new("bees", 200_000);
    run.train = vec![4 * VERSIONS];
    let hive = Arc::new(TestHive::open().await);
    hive.create(&run).await;
    let schema = run.schema();
    let layout = Arc::new(Layout::of_version(&schema, Encoding::F32).expect("a layout"));
    let mut readers = Vec::new();
    for reader in 0..6 {
        let (hive, layout) = (hive.clone(), layout.clone());
        let encoding = if reader % 2 == 0 { "f32" } else { "bf16" };
        readers.push(tokio::spawn(async move {
            let mut seen = 0;
            let mut tag = String::new();
            loop {
                let path = format!("/v1/runs/bees/parameters?wait=20s&encoding={encoding}");
                let answer = hive.get(&path).header("if-none-match", &tag).send().await;
                assert_eq!(answer.status, 200, "{answer:?}");
                answer.text("etag").clone_into(&mut tag);
                let number = answer.version().number;
                let frame = Frame::read(&layout, &answer.body).expect("a frame");
                let torn = frame.floats().iter().find(|value| **value != number as f32);
                assert_eq!(torn, None, "in version {number}");
                seen += 1;
                if number == VERSIONS {
                    return seen;
                }
            }
        }));
    }
    let gradient = run.gradient(-1.0);
    loop {
        match hive.ask("bees", json!({ "worker": "bee", "wait": 20.0 })).await {
            LeaseAnswer::Lease(lease) => hive.work(&run, &lease, &gradient).await,
            LeaseAnswer::Done { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    for reader in readers {
        let seen = tokio::time::timeout(Duration::from_secs(60), reader).await;
        assert!(seen.expect("sees the last version").expect("no torn version") >= 2);
    }
}
