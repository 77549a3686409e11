//! Contributions over the wire: what counts, what does not, and what hostile bytes get.

mod support;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use serde_json::{Value, json};
use skep_hive::Deadlines;
use skep_wire::{
    BufferMerge, ContributionKind, Dtype, Encoding, Envelope, ErrorCode, Frame, Layout, LeaseId,
    Outcome, Role, Version,
};
use support::{
    PATIENCE, RunSetup, Settings, TestHive, envelope, eventually, rest, status_of, tensor,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// A hive with one run of one tensor.
async fn bees(settings: Settings, elements: usize) -> (TestHive, RunSetup) {
    let hive = TestHive::start(settings).await;
    let run = RunSetup::new("bees", elements);
    hive.create(&run).await;
    (hive, run)
}

/// The head of a contribution as bytes, up to but without its end.
fn head(envelope: &Envelope) -> String {
    let mut headers = HeaderMap::new();
    envelope.write(&mut headers);
    let mut text = "POST /v1/runs/bees/contributions HTTP/1.1\r\nHost: hive\r\n".to_owned();
    text.push_str("Connection: close\r\n");
    for (name, value) in &headers {
        text.push_str(&format!("{name}: {}\r\n", value.to_str().expect("text")));
    }
    text
}

/// That nothing has counted so far.
async fn nothing_changed(hive: &TestHive) {
    let view = hive.view("bees").await;
    assert_eq!((view.version.number, view.samples, view.epoch_applied), (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_brings_the_next_parameters_back() {
    let (hive, run) = bees(Settings::default(), 3).await;
    let lease = hive.lease("bees", "bee").await;
    let mut first = envelope(&lease);
    first.want = Some(Encoding::F32);
    first.have = Some(lease.base);
    let answer = hive.push("bees", &first, run.gradient(-2.0).as_bytes().to_vec()).ok().await;
    let receipt = answer.receipt();
    assert_eq!((receipt.outcome, receipt.version), (Outcome::Stepped, Version::new(1, 1)));
    let layout = Arc::new(Layout::of_version(&run.schema(), Encoding::F32).expect("a layout"));
    assert_eq!(Frame::read(&layout, &answer.body).expect("a frame").floats(), [2.0; 3]);

    // Who has the newest gets no body; who wants bf16 gets bf16.
    let mut again = first.clone();
    again.have = Some(Version::new(1, 1));
    let body = run.gradient(-2.0).as_bytes().to_vec();
    assert!(hive.push("bees", &again, body.clone()).ok().await.body.is_empty());
    again.have = None;
    again.want = Some(Encoding::Bf16);
    let narrow = hive.push("bees", &again, body).ok().await;
    assert!(narrow.body.len() < answer.body.len());
    assert_eq!(Frame::read(&layout, &narrow.body).expect("a frame").floats(), [2.0; 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_gets_the_first_outcome_and_changes_nothing() {
    let (hive, run) = bees(Settings::default(), 3).await;
    let lease = hive.lease("bees", "bee").await;
    let body = run.gradient(-1.0).as_bytes().to_vec();
    let push = || hive.push("bees", &envelope(&lease), body.clone()).ok();
    let at_once = tokio::join!(push(), push(), push(), push());
    for answer in [at_once.0, at_once.1, at_once.2, at_once.3, push().await] {
        assert_eq!(answer.receipt().outcome, Outcome::Stepped);
    }
    // Even with other numbers, a repeat is a repeat.
    let other = run.gradient(7.0).as_bytes().to_vec();
    hive.push("bees", &envelope(&lease), other).ok().await;
    let view = hive.view("bees").await;
    assert_eq!((view.version.number, view.samples), (1, 4));
    assert_eq!(hive.parameters(&run).await.1.floats(), [1.0; 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_envelope_has_its_code_and_changes_nothing() {
    let (hive, run) = bees(Settings::default(), 3).await;
    let lease = hive.lease("bees", "bee").await;
    let good = envelope(&lease);
    let body = run.gradient(-1.0).as_bytes().to_vec();
    type Change = fn(&mut Envelope);
    let cases: [(&str, Change, ErrorCode); 11] = [
        ("sequence", |e| e.sequence = 1, ErrorCode::WrongRange),
        ("first", |e| e.first += 1, ErrorCode::WrongRange),
        ("far first", |e| e.first = u64::MAX, ErrorCode::WrongRange),
        ("no positions", |e| e.count = 0, ErrorCode::WrongRange),
        ("too many", |e| e.count += 1, ErrorCode::WrongRange),
        ("far too many", |e| e.count = u64::MAX, ErrorCode::WrongRange),
        ("a version to come", |e| e.base.number = 9, ErrorCode::WrongRange),
        ("another generation", |e| e.base.generation = 2, ErrorCode::OtherGeneration),
        ("no generation", |e| e.base.generation = 0, ErrorCode::OtherGeneration),
        ("another lease", |e| e.lease = LeaseId(7), ErrorCode::LeaseGone),
        (
            "everything",
            |e| (e.lease, e.base) = (LeaseId(7), Version::new(9, 9)),
            ErrorCode::OtherGeneration,
        ),
    ];
    for (what, change, code) in cases {
        let mut wrong = good.clone();
        change(&mut wrong);
        let answer = hive.push("bees", &wrong, body.clone()).send().await;
        assert_eq!(answer.error().code, code, "{what}");
        nothing_changed(&hive).await;
    }
    let mut evaluation = good.clone();
    evaluation.kind = ContributionKind::Evaluation;
    let counts = json!({ "loss_sum": 1.0 }).to_string();
    hive.push("bees", &evaluation, counts).refused(ErrorCode::LeaseGone).await;
    for name in
        ["skep-lease", "skep-sequence", "skep-first", "skep-count", "skep-base", "skep-kind"]
    {
        let mut call = hive.push("bees", &good, body.clone());
        call.headers.remove(name);
        let error = call.refused(ErrorCode::BadRequest).await;
        assert!(error.message.contains(name), "{error:?}");
        let twice = hive.push("bees", &good, body.clone()).header(name, "1");
        twice.refused(ErrorCode::BadRequest).await;
    }
    nothing_changed(&hive).await;
    hive.push("bees", &good, body).ok().await;
    assert_eq!(hive.view("bees").await.version.number, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_that_are_too_old_and_runs_that_ended_are_conflicts() {
    let hive = TestHive::open().await;
    let policy = json!({ "kind": "async", "max_staleness": 0 });
    let run = RunSetup::new("bees", 3).with("policy", policy);
    hive.create(&run).await;
    let lease = hive.lease("bees", "bee").await;
    hive.work(&run, &lease, &run.gradient(-1.0)).await;
    let lease = hive.lease("bees", "bee").await;
    let mut stale = envelope(&lease);
    stale.base.number = 0;
    let body = run.gradient(-1.0).as_bytes().to_vec();
    hive.push("bees", &stale, body.clone()).refused(ErrorCode::TooStale).await;
    hive.push("bees", &envelope(&lease), body.clone()).refused(ErrorCode::LeaseGone).await;
    let lease = hive.lease("bees", "bee").await;
    let stop = hive.call(http::Method::PATCH, "/v1/runs/bees").json(&json!({ "action": "stop" }));
    stop.ok().await;
    hive.push("bees", &envelope(&lease), body).refused(ErrorCode::NotRunning).await;
    assert_eq!(hive.view("bees").await.version.number, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_of_another_generation_is_void() {
    let (hive, run) = bees(Settings::default(), 3).await;
    let lease = hive.lease("bees", "bee").await;
    let hive = hive.restart().await;
    let body = run.gradient(-1.0).as_bytes().to_vec();
    hive.push("bees", &envelope(&lease), body.clone()).refused(ErrorCode::OtherGeneration).await;
    // Nor does a claim of the new generation bring it back.
    let mut claimed = envelope(&lease);
    claimed.base = Version::new(2, 0);
    hive.push("bees", &claimed, body).refused(ErrorCode::LeaseGone).await;
    nothing_changed(&hive).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_finite_is_refused_and_its_positions_are_free_again() {
    let hive = TestHive::open().await;
    let optimiser = json!({ "kind": "sgd", "rate": 100.0 });
    let run = RunSetup::new("bees", 3).with("optimiser", optimiser);
    hive.create(&run).await;
    let lease = hive.lease("bees", "bee").await;
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut gradient = run.gradient(-1.0);
        gradient.floats_mut()[1] = poison;
        let body = gradient.as_bytes().to_vec();
        hive.push("bees", &envelope(&lease), body).refused(ErrorCode::NotFinite).await;
    }
    nothing_changed(&hive).await;
    // Finite itself, but not what it leads to.
    let body = run.gradient(f32::MAX).as_bytes().to_vec();
    let receipt = hive.push("bees", &envelope(&lease), body.clone()).ok().await.receipt();
    assert_eq!((receipt.outcome, receipt.version.number), (Outcome::Refused, 0));
    let repeat = hive.push("bees", &envelope(&lease), body).ok().await.receipt();
    assert_eq!(repeat.outcome, Outcome::Refused);
    nothing_changed(&hive).await;
    assert_eq!(hive.parameters(&run).await.1.floats(), [0.0; 3]);
    loop {
        let again = hive.lease("bees", "bee").await;
        hive.work(&run, &again, &run.gradient(-0.01)).await;
        if again.first == lease.first {
            break;
        }
    }
}

/// A safetensors file by hand, as another program may write it.
fn foreign(header: &Value, data: &[u8]) -> Vec<u8> {
    let mut text = serde_json::to_string_pretty(header).expect("JSON").into_bytes();
    text.resize(text.len().next_multiple_of(64), b' ');
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(&text);
    file.extend_from_slice(data);
    file
}

fn two_tensors() -> RunSetup {
    let mut run = RunSetup::new("bees", 1);
    run.tensors = vec![
        tensor("a", Dtype::F32, &[2], Role::trainable()),
        tensor("b", Dtype::F32, &[2, 1], Role::trainable()),
    ];
    run
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_header_is_read_and_a_narrow_one_widened() {
    let hive = TestHive::open().await;
    let run = two_tensors();
    hive.create(&run).await;
    let numbers: Vec<u8> = [3.0f32, 4.0, 1.0, 2.0].iter().flat_map(|n| n.to_le_bytes()).collect();
    let header = json!({
        "__metadata__": { "format": "pt", "written": "by hand" },
        "b": { "shape": [2, 1], "data_offsets": [0, 8], "dtype": "F32" },
        "a": { "data_offsets": [8, 16], "dtype": "F32", "shape": [2] },
    });
    let lease = hive.lease("bees", "bee").await;
    hive.push("bees", &envelope(&lease), foreign(&header, &numbers)).ok().await;
    assert_eq!(hive.parameters(&run).await.1.floats(), [-1.0, -2.0, -3.0, -4.0]);

    // bf16 in the run's own header, in the file only, and as the envelope says.
    let layout = Arc::new(Layout::of_gradient(&run.schema(), Encoding::Bf16).expect("a layout"));
    let narrow = run.gradient(-0.5).convert(&layout).expect("rounds").as_bytes().to_vec();
    for encoding in [Encoding::F32, Encoding::Bf16] {
        let lease = hive.lease("bees", "bee").await;
        let mut envelope = envelope(&lease);
        envelope.encoding = encoding;
        hive.push("bees", &envelope, narrow.clone()).ok().await;
    }
    assert_eq!(hive.parameters(&run).await.1.floats(), [0.0, -1.0, -2.0, -3.0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_tensors_are_refused_with_every_difference() {
    let hive = TestHive::open().await;
    hive.create(&two_tensors()).await;
    let lease = hive.lease("bees", "bee").await;
    let push = |header: Value, length: usize| {
        hive.push("bees", &envelope(&lease), foreign(&header, &vec![0; length]))
    };
    let header = json!({
        "b": { "dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8] },
        "c": { "dtype": "F32", "shape": [1], "data_offsets": [8, 12] },
        "d": { "dtype": "U8", "shape": [4], "data_offsets": [12, 16] },
    });
    let error = push(header, 16).refused(ErrorCode::WrongSchema).await;
    for part in ["`a` is missing", "`b` has shape [1, 2], not [2, 1]", "`c` is not", "`d` is not"] {
        assert!(error.message.contains(part), "{error:?}");
    }
    let header = json!({
        "a": { "dtype": "I32", "shape": [2], "data_offsets": [0, 8] },
        "b": { "dtype": "F32", "shape": [2, 1], "data_offsets": [8, 16] },
    });
    let error = push(header, 16).refused(ErrorCode::WrongSchema).await;
    assert!(error.message.contains("`a` is I32, not F32"), "{error:?}");
    // Tensors that overlap, leave a hole, or lie behind the end.
    for offsets in [([0, 8], [4, 12]), ([0, 8], [12, 20]), ([0, 8], [8, 1u64 << 40])] {
        let header = json!({
            "a": { "dtype": "F32", "shape": [2], "data_offsets": offsets.0 },
            "b": { "dtype": "F32", "shape": [2, 1], "data_offsets": offsets.1 },
        });
        push(header, 16).refused(ErrorCode::BadRequest).await;
    }
    for bytes in [&b""[..], b"{}", &[0xff; 64], &[0; 64], &[8, 0, 0, 0, 0, 0, 0, 0, b'{']] {
        let answer = hive.push("bees", &envelope(&lease), bytes.to_vec()).send().await;
        assert!([400, 413].contains(&answer.status), "{bytes:?}: {answer:?}");
        answer.error();
    }
    nothing_changed(&hive).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn buffers_frozen_and_following_tensors_travel_merge_and_survive() {
    let hive = TestHive::open().await;
    let mut run = RunSetup::new("bees", 1).with("policy", json!({ "kind": "batch", "size": 2 }));
    let buffer = |merge| Role::Buffer { merge };
    run.tensors = vec![
        tensor("w", Dtype::F32, &[2], Role::trainable()),
        tensor("mean", Dtype::F32, &[2], buffer(BufferMerge::Mean)),
        tensor("count", Dtype::I64, &[], buffer(BufferMerge::Max)),
        tensor("last", Dtype::F32, &[1], buffer(BufferMerge::Last)),
        tensor("flags", Dtype::U8, &[3], buffer(BufferMerge::Last)),
        tensor("frozen", Dtype::F32, &[2], Role::Frozen),
        tensor("table", Dtype::I64, &[1], Role::Frozen),
        tensor("slow", Dtype::F32, &[2], Role::Ema { of: "w".to_owned(), tau: 0.5 }),
    ];
    hive.create_from(&run, |version0| {
        version0.floats_of_mut("frozen").expect("there").copy_from_slice(&[7.0, 8.0]);
        version0.tensor_mut("table").expect("there").copy_from_slice(&77i64.to_le_bytes());
    })
    .await;
    for (worker, mean, count, last) in [("one", 1.0, 9i64, 0.25), ("two", 3.0, 5, 0.75)] {
        let lease = hive.lease("bees", worker).await;
        let mut gradient = run.gradient(-1.0);
        gradient.floats_of_mut("mean").expect("there").fill(mean);
        gradient.floats_of_mut("last").expect("there").fill(last);
        gradient.tensor_mut("count").expect("there").copy_from_slice(&count.to_le_bytes());
        gradient.tensor_mut("flags").expect("there").fill(count as u8);
        let body = gradient.as_bytes().to_vec();
        hive.push("bees", &envelope(&lease), body).ok().await;
    }
    let check = |version: Version, frame: &Frame| {
        assert_eq!(version.number, 1);
        let floats = |name| frame.floats_of(name).expect("there").to_vec();
        assert_eq!(floats("w"), [1.0, 1.0]);
        assert_eq!(floats("slow"), [0.5, 0.5]);
        assert_eq!(floats("mean"), [2.0, 2.0]);
        assert_eq!(floats("last"), [0.75]);
        assert_eq!(floats("frozen"), [7.0, 8.0]);
        assert_eq!(frame.tensor("count").expect("there"), 9i64.to_le_bytes());
        assert_eq!(frame.tensor("table").expect("there"), 77i64.to_le_bytes());
        assert_eq!(frame.tensor("flags").expect("there"), [5; 3]);
    };
    let (version, frame) = hive.parameters(&run).await;
    check(version, &frame);
    let hive = hive.restart().await;
    let (version, again) = hive.parameters(&run).await;
    assert_eq!(version.generation, 2);
    check(version, &again);
    assert_eq!(again.as_bytes(), frame.as_bytes(), "the same bits");
}

#[tokio::test(flavor = "multi_thread")]
async fn lengths_that_are_too_large_or_lie_take_nothing() {
    let (hive, run) = bees(Settings::default(), 1000).await;
    let lease = hive.lease("bees", "bee").await;
    let head = head(&envelope(&lease));
    let body = run.gradient(-1.0).as_bytes().to_vec();
    let ask = async |head: String, body: &[u8]| {
        let mut stream = hive.raw(head.as_bytes()).await;
        // A refusal may come before the body is through.
        let _ = stream.write_all(body).await;
        rest(&mut stream).await
    };
    // Refused by its announcement: nothing of the body is ever sent.
    for length in ["100000", "999999999999", "9223372036854775807"] {
        let mut stream =
            hive.raw(format!("{head}Content-Length: {length}\r\n\r\n").as_bytes()).await;
        assert_eq!(status_of(&rest(&mut stream).await), Some(413), "{length}");
    }
    for length in ["99999999999999999999999", "18446744073709551615", "-1", "1e3", "0x10", ""] {
        let answer = ask(format!("{head}Content-Length: {length}\r\n\r\n"), &body).await;
        let status = status_of(&answer);
        assert!(matches!(status, Some(400 | 413 | 431)), "{length}: {status:?}");
    }
    let answer = ask(format!("{head}Content-Length: {}\r\n\r\n", body.len() - 8), &body).await;
    assert_eq!(status_of(&answer), Some(400), "less than it has");
    let more = format!("{head}Content-Length: {}\r\n\r\n", body.len() + 8);
    let mut stream = hive.raw(more.as_bytes()).await;
    stream.write_all(&body).await.expect("is written");
    stream.shutdown().await.expect("says that this was all");
    assert_ne!(status_of(&rest(&mut stream).await), Some(200), "more than it has");
    let two = format!("{head}Content-Length: 5\r\nContent-Length: {}\r\n\r\n", body.len());
    assert_eq!(status_of(&ask(two, &body).await), Some(400), "two lengths");
    // Chunks have no length in front: they are cut off where they become too many.
    let chunked = format!("{head}Transfer-Encoding: chunked\r\n\r\n");
    let mut chunks = Vec::new();
    for _ in 0..100 {
        chunks.extend_from_slice(b"1000\r\n");
        chunks.extend_from_slice(&[0; 4096]);
        chunks.extend_from_slice(b"\r\n");
    }
    assert_eq!(status_of(&ask(chunked.clone(), &chunks).await), Some(413), "too many chunks");
    let broken = ask(chunked.clone(), b"zz\r\n").await;
    assert_ne!(status_of(&broken), Some(200), "a chunk without a length");
    nothing_changed(&hive).await;
    let mut chunks = Vec::new();
    for piece in body.chunks(100) {
        chunks.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
        chunks.extend_from_slice(piece);
        chunks.extend_from_slice(b"\r\n");
    }
    chunks.extend_from_slice(b"0\r\n\r\n");
    assert_eq!(status_of(&ask(chunked, &chunks).await), Some(200), "chunks that are in order");
    assert_eq!(hive.view("bees").await.version.number, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_byte_budget_is_busy_and_passes() {
    let settings = Settings { byte_budget: 64 << 10, ..Settings::default() };
    let (hive, run) = bees(settings, 4096).await;
    let lease = hive.lease("bees", "bee").await;
    let good = envelope(&lease);
    let mut wrong = good.clone();
    wrong.sequence = 7;
    let body = run.gradient(-1.0).as_bytes().to_vec();
    let announced = format!("{}Content-Length: {}\r\n\r\n", head(&good), body.len());
    let mut stalled = Vec::new();
    for _ in 0..3 {
        stalled.push(hive.raw(announced.as_bytes()).await);
    }
    let probe = async || hive.push("bees", &wrong, body.clone()).send().await;
    let busy = eventually("a full budget", async || {
        let answer = probe().await;
        (answer.status == 503).then_some(answer)
    })
    .await;
    assert_eq!(busy.error().code, ErrorCode::Busy);
    assert!(busy.text("retry-after").parse::<u64>().is_ok());
    // Readers take nothing of the budget.
    hive.get("/v1/runs/bees/parameters").ok().await;
    drop(stalled);
    eventually("a free budget", async || (probe().await.status == 400).then_some(())).await;
    nothing_changed(&hive).await;
    hive.push("bees", &good, body).ok().await;
    assert_eq!(hive.view("bees").await.version.number, 1);
}

/// Deadlines that a test can wait for.
fn hasty() -> Settings {
    let soon = Duration::from_secs(1);
    let deadlines = Deadlines { head: soon, body: soon, write: soon, drain: soon };
    Settings { deadlines, ..Settings::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_stall_or_trickle_are_cut_off() {
    let (hive, run) = bees(hasty(), 1 << 20).await;
    let lease = hive.lease("bees", "bee").await;
    let announced = format!("{}Content-Length: 4194304\r\n\r\n", head(&envelope(&lease)));
    let mut stream = hive.raw(announced.as_bytes()).await;
    stream.write_all(&[0; 1000]).await.expect("is written");
    assert_eq!(status_of(&rest(&mut stream).await), Some(408), "stalled");

    // Never silent for long, and yet far too slow.
    let (mut reading, mut writing) = hive.raw(announced.as_bytes()).await.into_split();
    let trickle = async {
        while writing.write_all(&[0; 16]).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let mut answer = [0; 12];
    let cut_off = async {
        tokio::select! {
            () = trickle => panic!("cut off without an answer"),
            read = reading.read_exact(&mut answer) => read.expect("an answer"),
        }
    };
    tokio::time::timeout(PATIENCE, cut_off).await.expect("cut off in time");
    assert_eq!(status_of(&answer), Some(408), "trickled");
    nothing_changed(&hive).await;
    let lease = hive.lease("bees", "bee").await;
    hive.work(&run, &lease, &run.gradient(-1.0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn heads_that_never_end_are_cut_off() {
    let (hive, _) = bees(hasty(), 3).await;
    let mut silent = hive.raw(b"").await;
    let mut stalled = hive.raw(b"GET /v1/runs HTTP/1.1\r\nHost: hi").await;
    assert_ne!(status_of(&rest(&mut silent).await), Some(200));
    assert_ne!(status_of(&rest(&mut stalled).await), Some(200));
    let mut trickling = hive.raw(b"GET /v1/runs HTTP/1.1\r\n").await;
    let trickle = async {
        while trickling.write_all(b"a: b\r\n").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, trickle).await.expect("cut off in time");
    hive.get("/healthz").ok().await;
}

/// Asks for parameters with as little room for them as can be.
async fn slow_reader(hive: &TestHive) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4096).expect("a small buffer");
    let mut stream = socket.connect(hive.address).await.expect("connects");
    let request = b"GET /v1/runs/bees/parameters HTTP/1.1\r\nHost: hive\r\n\r\n";
    stream.write_all(request).await.expect("is written");
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_do_not_take_what_they_asked_for_are_cut_off() {
    let (hive, run) = bees(hasty(), 4 << 20).await;
    let mut stalled = slow_reader(&hive).await;
    let mut trickling = slow_reader(&hive).await;
    // Meanwhile others read, and versions come out.
    let lease = hive.lease("bees", "bee").await;
    hive.work(&run, &lease, &run.gradient(-1.0)).await;
    assert_eq!(hive.parameters(&run).await.1.floats()[..2], [1.0, 1.0]);
    // A connection that is over cannot be written to.
    let over = async |stream: &mut TcpStream| stream.write_all(b" ").await.is_err().then_some(());
    eventually("the stalled reader is cut off", async || over(&mut stalled).await).await;
    let mut taken = [0; 64];
    eventually("the trickling reader is cut off", async || {
        let _ = trickling.try_read(&mut taken);
        over(&mut trickling).await
    })
    .await;
    hive.get("/v1/runs/bees/parameters").ok().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loss_beyond_reason_does_not_spoil_the_run() {
    let (hive, run) = bees(Settings::default(), 3).await;
    for loss in [1e308, f64::MAX, f64::INFINITY, f64::NAN, 0.5] {
        let lease = hive.lease("bees", "bee").await;
        let mut envelope = envelope(&lease);
        envelope.loss = Some(loss);
        let body = run.gradient(-1.0).as_bytes().to_vec();
        hive.push("bees", &envelope, body).ok().await;
    }
    assert_eq!(hive.view("bees").await.loss, Some(0.5));
    let hive = hive.restart().await;
    assert_eq!(hive.view("bees").await.version.number, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_of_any_kind_is_ignored() {
    let (hive, run) = bees(Settings::default(), 2).await;
    let lease = hive.lease("bees", "bee").await;
    let data = [0u8; 8];
    let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![2], &data).expect("a view");
    let metadata = HashMap::from([("skep.run".to_owned(), "{}".to_owned())]);
    let file = safetensors::serialize([("w", view)], Some(metadata)).expect("a file");
    hive.push("bees", &envelope(&lease), file).ok().await;
    assert_eq!(hive.parameters(&run).await.0.number, 1);
}
