//! The live page in a real browser: the curve grows, keys are asked for, and 500 workers at 100
//! versions a second do not make it stutter.
//!
//! Skipped, with a message, where there is no Chromium; under CI it must be there. With
//! `SKEP_SCREENSHOTS=FOLDER` pictures are kept there.

mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use skep_wire::{
    ContributionKind, Encoding, Envelope, Frame, Layout, LeaseAnswer, LeaseKind, LeaseRequest,
};
use skep_worker::{Client, ClientSettings};
use support::browser::{self, Browser};
use support::{HiveSetup, run_to_end, skep, skep_command, unit_task};

fn screenshot(browser: &Browser, name: &str) {
    let Some(folder) = std::env::var_os("SKEP_SCREENSHOTS").map(PathBuf::from) else { return };
    std::fs::create_dir_all(&folder).expect("a folder");
    browser.screenshot(&folder.join(name));
}

const LOSS_POINTS: &str = "+document.querySelector('#chart-loss').dataset.points";

#[test]
fn the_curve_grows_while_a_run_trains() {
    if !browser::is_there() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let setup = HiveSetup::new(&skep(), folder.path(), "mnist --name mnist --epochs 6");
    let mut hive = setup.start();
    let browser = Browser::start();
    browser.open(&setup.url());
    browser.until("document.querySelector('#run-name').textContent == 'mnist'");
    let mut workers: Vec<_> = (0..2).map(|_| setup.worker(&[])).collect();
    browser.until(&format!("{LOSS_POINTS} >= 10"));
    let early = browser.value(LOSS_POINTS).as_u64().expect("a count");
    browser.until(&format!("{LOSS_POINTS} >= {}", early + 30));
    browser.until("/^\\d+\\.\\d+ %$/.test(document.querySelector('#tile-accuracy').textContent)");
    browser.until("document.querySelectorAll('#workers tbody tr[data-worker]').length == 2");
    browser.until("document.querySelector('#events').textContent.includes('joined')");
    browser.until("+document.querySelector('#chart-accuracy').dataset.points >= 2");
    for scheme in ["light", "dark"] {
        browser.scheme(scheme);
        std::thread::sleep(Duration::from_millis(400));
        screenshot(&browser, &format!("live-{scheme}.png"));
    }
    browser.scheme("light");
    browser.size(390, 844);
    std::thread::sleep(Duration::from_millis(400));
    let fits = browser.value("document.documentElement.scrollWidth <= 390");
    screenshot(&browser, "live-phone.png");
    assert_eq!(fits, true, "the page is wider than a phone");
    // The end is shown without a reload, and a page that is opened late has the whole curve.
    let view = setup.watch().finished("mnist");
    let accuracy = view.test.and_then(|test| test.accuracy).expect("a test accuracy");
    let shown = format!("{:.2} %", accuracy * 100.0);
    browser.until(&format!("document.querySelector('#tile-test').textContent == '{shown}'"));
    browser.until("document.querySelector('#run-state').textContent.includes('done')");
    assert_eq!(browser.complaints(), Vec::<String>::new());
    hive.kill();
    let _hive = setup.start();
    browser.open(&setup.url());
    browser.until(&format!("{LOSS_POINTS} >= {early}"));
    browser.until(&format!("document.querySelector('#tile-test').textContent == '{shown}'"));
    for worker in &mut workers {
        assert_eq!(worker.code(), Some(0), "{}", worker.stderr());
    }
}

#[test]
fn the_page_asks_for_a_key_and_keeps_it_out_of_the_address() {
    if !browser::is_there() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let key_file = folder.path().join("admin.key");
    let arguments = format!("mnist --name mnist --key-file {}", key_file.display());
    let setup = HiveSetup::new(&skep(), &folder.path().join("store"), &arguments);
    let _hive = setup.start();
    let issue = |run: &str| {
        let arguments = format!("key create --role reader {run} --hive {}", setup.url());
        let ended = run_to_end(skep_command(&arguments).arg("--key-file").arg(&key_file));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stdout.trim().to_owned()
    };
    let browser = Browser::start();
    // A key of one run cannot list runs: the page asks for its name.
    for (key, run) in [(issue(""), ""), (issue("--run mnist"), "mnist")] {
        browser.open(&setup.url());
        browser.until("!document.querySelector('#key-form').hidden");
        let fill = |key: &str, run: &str| {
            browser.value(&format!(
                "(document.querySelector('#key').value = '{key}', \
                 document.querySelector('#key-run').value = '{run}', \
                 document.querySelector('#key-form button').click(), true)"
            ));
        };
        fill("skep_0123456789ab_wrong", "");
        browser.until("document.querySelector('#key-error').textContent.includes('not known')");
        fill(&key, run);
        browser.until("document.querySelector('#run-name').textContent == 'mnist'");
        assert_eq!(browser.value("location.href.includes('skep_')"), false);
        assert_eq!(browser.value("JSON.stringify(localStorage).includes('skep_')"), false);
        browser.value("(sessionStorage.clear(), true)");
    }
}

/// One simulated worker: a lease, and a contribution every so often.
async fn simulate(
    client: Arc<Client>,
    at: usize,
    body: Bytes,
    pause: Duration,
    stop: Arc<AtomicBool>,
) {
    tokio::time::sleep(pause.mul_f64(at as f64 / 500.0)).await;
    while !stop.load(Ordering::Relaxed) {
        let request = LeaseRequest {
            worker: format!("bee-{at:03}"),
            engine: "simulated".to_owned(),
            seconds_left: Some(20.0),
            has: vec![],
            only: None,
            kinds: vec![LeaseKind::Train],
            wait: 1.0,
            waiting: 0.1,
        };
        let Ok(LeaseAnswer::Lease(lease)) = client.lease("load", &request).await else { continue };
        let (mut first, mut sequence) = (lease.first, 0);
        while first < lease.first + lease.count && !stop.load(Ordering::Relaxed) {
            let envelope = Envelope {
                lease: lease.id,
                sequence,
                first,
                count: lease.chunk.min(lease.first + lease.count - first),
                base: lease.base,
                kind: ContributionKind::Gradient,
                encoding: Encoding::F32,
                loss: Some(1.0 + ((at + first as usize) % 7) as f64 / 10.0),
                want: None,
                have: None,
                without: None,
            };
            if client.contribute("load", &envelope, body.clone()).await.is_err() {
                break;
            }
            first += envelope.count;
            sequence += 1;
            tokio::time::sleep(pause).await;
        }
    }
}

#[test]
fn five_hundred_workers_at_a_hundred_versions_a_second_are_smooth() {
    if !browser::is_there() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let setup = HiveSetup::new(
        &unit_task(),
        folder.path(),
        "unit --name load --data unit:4096 --batch 1 --epochs 1000 --policy async \
         --set lease.seconds=60",
    );
    let _hive = setup.start();
    let view = setup.watch().run("load");
    let layout = Arc::new(Layout::of_gradient(&view.schema, Encoding::F32).expect("a layout"));
    let body = Bytes::from_owner(Frame::zeros(layout));
    let settings = ClientSettings {
        url: setup.url(),
        patience: Duration::from_secs(10),
        ..ClientSettings::default()
    };
    let client = Arc::new(Client::new(settings).expect("a good address"));
    let stop = Arc::new(AtomicBool::new(false));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("starts");
    for at in 0..500 {
        let pause = Duration::from_secs_f64(4.7);
        runtime.spawn(simulate(client.clone(), at, body.clone(), pause, stop.clone()));
    }
    let browser = Browser::start();
    browser.open(&setup.url());
    browser.until("+document.querySelector('#worker-count').textContent >= 500");
    let counts = || {
        let value =
            browser.value("[+document.body.dataset.bytes, +document.body.dataset.messages]");
        (value[0].as_f64().unwrap_or_default(), value[1].as_f64().unwrap_or_default())
    };
    let (before, began) = (counts(), Instant::now());
    let version = setup.watch().run("load").version.number;
    let frames = browser.promised(
        "const deltas = []; let last = performance.now(); const end = last + 10000; \
         const frame = now => { deltas.push(now - last); last = now; \
         if (now < end) requestAnimationFrame(frame); else done(deltas.slice(1)); }; \
         requestAnimationFrame(frame);",
    );
    let seconds = began.elapsed().as_secs_f64();
    let after = counts();
    let versions = (setup.watch().run("load").version.number - version) as f64 / seconds;
    let mut frames: Vec<f64> =
        frames.as_array().expect("deltas").iter().filter_map(serde_json::Value::as_f64).collect();
    frames.sort_by(f64::total_cmp);
    let at = |share: f64| frames[((frames.len() - 1) as f64 * share) as usize];
    let (bytes, messages) = ((after.0 - before.0) / seconds, (after.1 - before.1) / seconds);
    println!(
        "500 workers, {versions:.0} versions/s: the page receives {:.1} kB/s in {messages:.1} \
         messages/s; {:.1} frames/s, p50 {:.1} ms, p95 {:.1} ms, p99 {:.1} ms, longest {:.0} ms",
        bytes / 1000.0,
        frames.len() as f64 / seconds,
        at(0.5),
        at(0.95),
        at(0.99),
        at(1.0)
    );
    screenshot(&browser, "live-load.png");
    // Of 500 workers only the rows in view are in the document.
    let rows = browser.value("document.querySelectorAll('#workers tbody tr').length");
    assert!(rows.as_u64().expect("a count") < 60, "{rows} rows");
    assert!(messages <= 4.5, "{messages} messages a second");
    assert!(bytes < 300_000.0, "{bytes} bytes a second");
    // The machine may be busy with other tests; a page that draws every version anew, or 500 rows
    // every time, takes hundreds of milliseconds for a frame.
    assert!(at(0.95) < 100.0, "p95 of frames: {} ms", at(0.95));
    stop.store(true, Ordering::Relaxed);
    runtime.shutdown_timeout(Duration::from_secs(2));
}
