//! How a run went and goes: the history, the stream, the page, and what is kept of them.

mod support;

use serde_json::{Value, json};
use skep_wire::{Event, History, LeaseAnswer, Progress};
use support::{RunSetup, Settings, TestHive, files, rest};

/// Works until the run is over.
async fn train(hive: &TestHive, run: &RunSetup) {
    let gradient = run.gradient(0.5);
    loop {
        match hive.ask(&run.name, json!({ "worker": "bee", "wait": 5.0 })).await {
            LeaseAnswer::Lease(lease) => hive.work(run, &lease, &gradient).await,
            LeaseAnswer::Wait { .. } => {}
            LeaseAnswer::Done { .. } => return,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_history_is_whole_and_outlives_the_hive() {
    let hive = TestHive::start(Settings::default()).await;
    let run = RunSetup::new("bees", 4);
    hive.create(&run).await;
    train(&hive, &run).await;
    let history: History = hive.get("/v1/runs/bees/history").ok().await.json();
    let numbers: Vec<_> = history.points.iter().map(|point| point.version.number).collect();
    assert_eq!(numbers, (1..=10).collect::<Vec<_>>());
    let last = history.points.last().expect("a point");
    assert_eq!((last.samples, last.loss, last.workers), (40, Some(0.5), 1));
    assert!(last.usage.received_bytes > 0);
    let few: History = hive.get("/v1/runs/bees/history?points=3").ok().await.json();
    assert_eq!(few.points.iter().map(|point| point.versions).sum::<u64>(), 10);
    assert!(few.points.len() <= 3);

    let progress: Progress = hive.get("/v1/runs/bees/progress").ok().await.json();
    assert_eq!((progress.samples, progress.worker_count), (40, 1));
    assert_eq!(progress.workers.expect("workers").first().expect("one").name, "bee");
    let joined = |event: &Event| matches!(event, Event::Joined { worker } if worker == "bee");
    assert!(progress.events.iter().any(|event| joined(&event.event)), "{:?}", progress.events);

    let hive = hive.restart().await;
    let again: History = hive.get("/v1/runs/bees/history").ok().await.json();
    assert_eq!(again, history);
    let usage = hive.get("/v1/runs/bees/progress").ok().await.json::<Progress>().usage;
    assert!(usage.received_bytes >= last.usage.received_bytes, "what was used is not forgotten");

    let found = files(&hive.folder.path().join("store/runs/bees/metrics"));
    let text = |name: &str| {
        let path = found.iter().find(|path| path.ends_with(name)).expect("a file");
        std::fs::read_to_string(path).expect("text")
    };
    let csv = text("metrics.csv");
    assert_eq!(csv.lines().count(), 11, "{csv}");
    let columns = csv.lines().next().expect("a head").split(',').count();
    assert!(csv.lines().all(|line| line.split(',').count() == columns), "{csv}");
    assert!(csv.lines().last().expect("a line").contains(",1.10,40,"), "{csv}");
    assert!(found.iter().any(|path| path.to_string_lossy().contains("tfevents")), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_slow_however_fast_the_run_is() {
    let hive = TestHive::start(Settings::default()).await;
    let mut run = RunSetup::new("bees", 4);
    run.train = vec![4000];
    hive.create(&run).await;
    let request = b"GET /v1/runs/bees/progress?follow=true&every=0.2&after=0 HTTP/1.1\r\n\
                    Host: hive\r\nConnection: close\r\n\r\n";
    let mut stream = hive.raw(request).await;
    let reading = tokio::spawn(async move { rest(&mut stream).await });
    let start = std::time::Instant::now();
    train(&hive, &run).await;
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    let seconds = start.elapsed().as_secs_f64();
    // The stream ends with the run.
    hive.call(http::Method::DELETE, "/v1/runs/bees").ok().await;
    let text = String::from_utf8(reading.await.expect("no panic")).expect("text");
    let messages: Vec<Progress> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|json| serde_json::from_str(json).expect("progress"))
        .collect();
    assert!(messages.len() as f64 <= seconds / 0.2 + 3.0, "{} in {seconds} s", messages.len());
    assert!(messages.iter().all(|message| message.points.len() <= 16));
    let points: Vec<_> = messages.iter().flat_map(|message| &message.points).collect();
    assert!(points.windows(2).all(|pair| pair[0].version < pair[1].version));
    assert_eq!(points.last().expect("points").version.number, 1000);
    assert!(messages.last().expect("messages").state.is_final());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_is_one_document_under_a_strict_policy() {
    let hive = TestHive::start(Settings { keys: true, ..Settings::default() }).await;
    let answer = hive.get("/").ok().await;
    assert_eq!(answer.text("content-type"), "text/html; charset=utf-8");
    let policy = answer.text("content-security-policy");
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
    let page = std::str::from_utf8(&answer.body).expect("text");
    for outside in ["src=", "href=\"http", "@import", "url(http", "innerHTML", "{{", "eval("] {
        assert!(!page.contains(outside), "the page has `{outside}`");
    }
    assert!(page.len() < 100_000, "{} bytes", page.len());
    let error: Value = hive.get("/v1/runs").send().await.json();
    assert_eq!(error["code"], "unauthorised", "what it shows needs a key");
}
