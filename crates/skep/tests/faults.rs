//! What may go wrong, made to go wrong, on real processes.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use skep_wire::{RunAction, RunState};
use support::{
    Fire, HiveSetup, Process, assert_exactly_once, manifests, newest_version, run_to_end, skep,
    skep_command, unit_task, wait_for,
};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// `skep train mnist` with these flags; gives the result and the model's bytes.
fn train_mnist(flags: &str) -> (serde_json::Value, Vec<u8>) {
    let store = folder();
    let mut command = skep_command(&format!("train mnist --json {flags}"));
    let ended = run_to_end(command.arg("--store").arg(store.path()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let result: serde_json::Value =
        serde_json::from_str(ended.stdout.lines().last().expect("a result")).expect("JSON");
    let model = std::fs::read(result["model"].as_str().expect("a path")).expect("a model");
    (result, model)
}

/// MNIST learns under fire what it learns in peace.
///
/// The band: the standard error of an accuracy of 98 % on 2,000 test images is 0.3 %, and runs of
/// different seeds differ by about as much again, so that the difference to the mean of two has a
/// standard error of about 0.5 %; 1.5 % is three of that. As many workers as in peace, and a low
/// rate: on a busy machine gradients are stale, and at the usual rate that alone moves a run in
/// peace by 2 %, which would hide what is looked for here.
#[test]
fn mnist_under_fire_is_as_accurate_as_in_peace() {
    const EPOCHS: u64 = 6;
    let peace: Vec<f64> = (1..=2)
        .map(|seed| {
            let flags = format!("--epochs {EPOCHS} --rate 0.01 --seed {seed} --workers 2");
            let (result, _) = train_mnist(&flags);
            result["accuracy"].as_f64().expect("an accuracy")
        })
        .collect();
    let store = folder();
    let setup = HiveSetup::new(
        &skep(),
        store.path(),
        &format!(
            "mnist --name fire --epochs {EPOCHS} --rate 0.01 --seed 3 --set checkpoint.seconds=0.2 \
             --set lease.seconds=2"
        ),
    );
    let mut hive = setup.start();
    let mut workers: Vec<Process> = (0..2).map(|_| setup.worker(&[])).collect();
    let samples = setup.watch().run("fire").epoch_positions * EPOCHS;
    let fire = Fire { kills: 45, hive_every: 8, samples, environment: &[] };
    let hive_kills = fire.rage(&setup, "fire", &mut hive, &mut workers);
    let view = setup.watch().finished("fire");
    let accuracy = view.test.and_then(|test| test.accuracy).expect("an accuracy");
    println!("in peace {peace:?}; after 45 kills, {hive_kills} of the hive: {accuracy}");
    assert_eq!((view.state, view.samples), (RunState::Done, samples));
    assert!(view.skipped.is_empty(), "{:?}", view.skipped);
    let mean = peace.iter().sum::<f64>() / peace.len() as f64;
    assert!((accuracy - mean).abs() < 0.015, "{accuracy} is not near {peace:?}");
    assert!(accuracy >= 0.965, "{accuracy}");
}

/// Without backup leases a slot that was not given back could only come free by lapsing, which
/// takes longer here than the test waits.
#[test]
fn a_worker_that_is_called_off_gives_its_lease_back_at_once() {
    let store = folder();
    let setup = HiveSetup::new(
        &unit_task(),
        store.path(),
        "unit --name off --data unit:128 --epochs 1 --policy sync:1,backup=0,deadline=3000 \
         --set lease.seconds=3000",
    );
    let hive = setup.start();
    let watch = setup.watch();
    let mut first = setup.worker(&[("UNIT_SLEEP_MS", "300")]);
    watch.until("off", "work under way", |view| view.samples > 0);
    first.signal(libc::SIGTERM);
    assert_eq!(first.code(), Some(143), "{}", first.stderr());
    let mut second = setup.worker(&[]);
    let view = watch.finished("off");
    assert_eq!(view.state, RunState::Done);
    assert_exactly_once(store.path(), "off", -1.0 / 16.0);
    assert!(!hive.stderr().contains("lease lost"), "{}", hive.stderr());
    assert_eq!(second.code(), Some(0), "{}", second.stderr());
}

#[test]
fn a_hive_that_is_called_off_keeps_exactly_the_last_version() {
    let store = folder();
    let mut setup = HiveSetup::new(
        &unit_task(),
        store.path(),
        "unit --name off --epochs 2 --policy async:damping=0",
    );
    setup.arguments.extend(["--log".into(), "debug".into()]);
    let mut hive = setup.start();
    let watch = setup.watch();
    let mut workers = [(); 2].map(|()| setup.worker(&[("UNIT_SLEEP_MS", "10")]));
    watch.until("off", "versions", |view| view.version.number > 20);
    hive.signal(libc::SIGTERM);
    assert_eq!(hive.code(), Some(0), "{}", hive.stderr());
    let words = hive.last_words();
    let last = words.lines().rev().find_map(|line| line.split_once("done (version "));
    let last = last.and_then(|(_, rest)| rest.split([',', ')']).next()).expect("a version");
    let kept = newest_version(store.path(), "off").expect("a checkpoint");
    assert_eq!(kept.to_string(), last);
    let again = setup.start();
    let view = watch.run("off");
    assert!(again.stderr().contains("generation 2"), "{}", again.stderr());
    assert_eq!(view.version.generation, kept.generation + 1);
    assert!(view.version.number >= kept.number);
    let view = watch.finished("off");
    assert_eq!((view.state, view.samples), (RunState::Done, 2 * 4096));
    assert_exactly_once(store.path(), "off", -2.0 / 16.0);
    for worker in &mut workers {
        assert_eq!(worker.code(), Some(0), "{}", worker.stderr());
    }
}

/// The end of a run is as safe as its versions: a hive that comes back knows of it, whether the
/// run was done, stopped or paused, and no worker leaves before that is so.
#[test]
fn what_a_run_has_become_survives_a_kill() {
    let store = folder();
    let setup = HiveSetup::new(
        &unit_task(),
        store.path(),
        "unit --name ends --data unit:256 --epochs 1 --set checkpoint.seconds=1000",
    );
    let mut hive = setup.start();
    let watch = setup.watch();
    let mut worker = setup.worker(&[]);
    assert_eq!(worker.code(), Some(0), "{}", worker.stderr());
    hive.kill();
    let mut hive = setup.start();
    let view = watch.run("ends");
    assert_eq!((view.state, view.samples), (RunState::Done, 256), "{}", view.reason);
    assert!(view.test.is_some(), "what was measured is kept");
    assert!(view.model.is_some());
    for (name, action, state) in [
        ("halted", RunAction::Pause, RunState::Paused),
        ("ended", RunAction::Stop, RunState::Stopped),
    ] {
        let mut create = Command::new(unit_task());
        create.args(["run", "--hive", &setup.url(), "create", "unit", "--name", name]);
        let ended = run_to_end(create.args(["--set", "checkpoint.seconds=0.05"]));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        // At a version that is in the store already.
        watch.until(name, "a checkpoint", |view| view.durable == view.version);
        watch.ask(watch.client.change_run(name, action)).expect("changes");
        watch.until(name, "the change", |view| view.state == state);
        let path = store.path().join(format!("runs/{name}/state.json"));
        wait_for("the change to be durable", || path.exists().then_some(()));
        hive.kill();
        hive = setup.start();
        assert_eq!(watch.run(name).state, state, "{name}");
    }
}

/// The files of models that were accepted and that no checkpoint holds.
fn spooled(store: &Path, run: &str) -> usize {
    let Ok(files) = std::fs::read_dir(store.join(format!("runs/{run}/spool"))) else { return 0 };
    let is_whole = |name: &String| name.ends_with(".safetensors");
    files.flatten().filter_map(|it| it.file_name().into_string().ok()).filter(is_whole).count()
}

/// A model is minutes of work: what was accepted survives a kill of the hive in mid-round, and only
/// the slot that was missing is trained again.
#[test]
fn a_killed_hive_loses_no_model_that_it_accepted() {
    let store = folder();
    let setup = HiveSetup::new(
        &unit_task(),
        store.path(),
        "unit --name kept --data unit:128 --set data.shards=4 --every 2 --epochs 1 \
         --policy average:4,backup=0 --set checkpoint.seconds=1000",
    );
    let mut hive = setup.start();
    let watch = setup.watch();
    let mut worker = setup.worker(&[("UNIT_SLEEP_MS", "400")]);
    wait_for("three of four models", || (spooled(store.path(), "kept") == 3).then_some(()));
    hive.kill();
    let hive = setup.start();
    assert_eq!(watch.run("kept").version.number, 0, "the round is not complete");
    let view = watch.finished("kept");
    assert!(hive.stderr().contains("3 of 3 spooled models are taken over"), "{}", hive.stderr());
    let trained: u64 = view.workers.iter().map(|worker| worker.contributions).sum();
    assert_eq!((trained, view.version.number, view.samples), (1, 1, 128));
    assert_exactly_once(store.path(), "kept", -1.0 / 64.0);
    assert_eq!(worker.code(), Some(0), "{}", worker.stderr());
    wait_for("the spool to be cleared", || (spooled(store.path(), "kept") == 0).then_some(()));
}

/// What a checkpoint holds is not kept twice.
#[test]
fn spooled_models_go_with_their_checkpoint() {
    let store = folder();
    let setup = HiveSetup::new(
        &unit_task(),
        store.path(),
        "unit --name tidy --steps 0 --every 2 --policy average:2 --set checkpoint.seconds=0.1",
    );
    let _hive = setup.start();
    let watch = setup.watch();
    let _worker = setup.worker(&[("UNIT_SLEEP_MS", "5")]);
    watch.until("tidy", "versions", |view| view.durable.number > 10);
    watch.ask(watch.client.change_run("tidy", RunAction::Pause)).expect("pauses");
    wait_for("the spool to be cleared", || (spooled(store.path(), "tidy") <= 2).then_some(()));
}

/// Where a round waits for all of its models, it does not matter who made them.
#[test]
fn models_give_the_same_bits_whoever_works() {
    let flags = "--epochs 1 --policy average:3 --every 8 --outer nesterov --seed 5";
    let (one, model) = train_mnist(&format!("{flags} --workers 1"));
    let (three, other) = train_mnist(&format!("{flags} --workers 3"));
    assert_eq!(one["version"], three["version"]);
    assert_eq!(one["loss"], three["loss"]);
    assert!(model == other, "the models differ");
}

/// Averaging every round learns what one process learns, within a point.
#[test]
fn averaged_models_are_as_accurate_as_one_process() {
    let accuracy = |flags: &str| {
        let of = |seed: u64| {
            let (result, _) = train_mnist(&format!("--epochs 5 --seed {seed} {flags}"));
            result["accuracy"].as_f64().expect("an accuracy")
        };
        (of(1) + of(2)) / 2.0
    };
    let one = accuracy("--policy sync:1 --workers 1");
    let averaged = accuracy("--policy average:2 --workers 2");
    println!("one process {one:.4}, averaged {averaged:.4}");
    assert!(averaged >= one - 0.01, "one process {one:.4}, averaged {averaged:.4}");
}

/// With default settings a kill costs less than ten seconds of work.
#[test]
fn a_killed_hive_loses_seconds_of_work_at_most() {
    let store = folder();
    let setup = HiveSetup::new(&unit_task(), store.path(), "unit --name young --steps 0");
    let mut hive = setup.start();
    let watch = setup.watch();
    let _workers = [(); 2].map(|()| setup.worker(&[("UNIT_SLEEP_MS", "20")]));
    let start = Instant::now();
    wait_for("20 seconds of updates", || (start.elapsed() > Duration::from_secs(20)).then_some(()));
    let former = watch.run("young").version.number;
    hive.kill();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis() as u64;
    let newest = manifests(store.path(), "young").pop().expect("a checkpoint");
    let age = now.saturating_sub(newest["created"].as_u64().expect("a time"));
    let kept = newest_version(store.path(), "young").expect("a checkpoint").number;
    println!("version {former} was out; {kept} is kept, {age} ms old");
    assert!(age < 10_000, "the newest checkpoint is {age} ms old");
    assert!(kept > 0 && kept <= former);
    let _hive = setup.start();
    assert!(watch.run("young").version.number >= kept);
}

#[test]
fn the_older_of_two_hives_on_a_store_gives_way() {
    let store = folder();
    let flags = "unit --name two --epochs 6 --set checkpoint.seconds=0.2";
    let older = HiveSetup::new(&unit_task(), store.path(), flags);
    let newer = HiveSetup::new(&unit_task(), store.path(), flags);
    let mut first = older.start();
    let slow = [("UNIT_SLEEP_MS", "10")];
    // These go on asking the older one, and are not missed.
    let _left_behind = [(); 2].map(|()| older.worker(&slow));
    older.watch().until("two", "progress", |view| view.samples > 1000);
    let _second = newer.start();
    let mut workers = [(); 2].map(|()| newer.worker(&slow));
    assert_eq!(first.code(), Some(1));
    let words = first.last_words();
    assert!(words.contains("error: ") && words.contains("generation 2"), "{words}");
    let view = newer.watch().finished("two");
    assert_eq!((view.state, view.samples), (RunState::Done, 6 * 4096));
    assert_eq!(view.version.generation, 2);
    assert_exactly_once(store.path(), "two", -6.0 / 32.0);
    for worker in &mut workers {
        assert_eq!(worker.code(), Some(0), "{}", worker.stderr());
    }
}

#[test]
fn a_kill_in_the_middle_of_a_checkpoint_harms_no_checkpoint() {
    let store = folder();
    let setup = HiveSetup::new(
        &unit_task(),
        store.path(),
        "unit --name torn --data unit:262144 --batch 1024 --epochs 3 \
         --set checkpoint.seconds=0.05 --set lease.seconds=2",
    );
    let mut dice = support::Dice::new();
    let watch = setup.watch();
    let mut workers = [(); 2].map(|()| setup.worker(&[("UNIT_SLEEP_MS", "20")]));
    let mut kept = 0;
    for _ in 0..25 {
        let mut hive = setup.start();
        let words = hive.stderr();
        assert!(!words.contains("passed over") && !words.contains("cannot go on"), "{words}");
        let view = watch.run("torn");
        assert!(view.version.number >= kept, "{} after {kept}", view.version);
        std::thread::sleep(Duration::from_millis(dice.below(300)));
        hive.kill();
        kept = newest_version(store.path(), "torn").map_or(0, |version| version.number);
    }
    println!("25 kills of the hive; version {kept} was kept");
    let _hive = setup.start();
    let view = watch.finished("torn");
    assert_eq!((view.state, view.samples), (RunState::Done, 3 * 262_144));
    assert_exactly_once(store.path(), "torn", -3.0 / 2048.0);
    for worker in &mut workers {
        assert_eq!(worker.code(), Some(0), "{}", worker.stderr());
    }
}

/// A small disk that goes with the test.
struct Disk(PathBuf);

impl Disk {
    fn mount(path: &Path, size: &str) -> Option<Self> {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(path);
        let mounted = command.output().is_ok_and(|output| output.status.success());
        mounted.then(|| Self(path.to_owned()))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_stops_checkpoints_and_nothing_else() {
    let place = folder();
    let Some(_disk) = Disk::mount(place.path(), "6m") else {
        println!("skipped: mounting a small disk is not permitted here");
        return;
    };
    let setup = HiveSetup::new(
        &unit_task(),
        place.path(),
        "unit --name full --data unit:65536 --batch 64 --steps 0 --set checkpoint.seconds=0.1",
    );
    let mut hive = setup.start();
    let watch = setup.watch();
    let _worker = setup.worker(&[("UNIT_SLEEP_MS", "10")]);
    watch.until("full", "a checkpoint", |view| view.durable.number > 0);
    let filler = place.path().join("filler");
    let fill = || {
        use std::io::Write;
        let mut file = std::fs::File::options().create(true).append(true).open(&filler)?;
        loop {
            file.write_all(&[0; 4096])?;
        }
    };
    let trouble = wait_for("trouble", || {
        let full: std::io::Result<()> = fill();
        assert!(full.is_err());
        watch.run("full").trouble
    });
    assert!(trouble.contains("no space left"), "{trouble}");
    let mut status = Command::new(unit_task());
    let ended = run_to_end(status.args(["status", "--hive", &setup.url()]));
    assert!(ended.stdout.contains("no space left"), "{}", ended.stdout);
    let view = watch.run("full");
    let kept = newest_version(place.path(), "full").expect("the former checkpoint");
    assert!(kept >= view.durable, "{kept} {}", view.durable);
    watch.until("full", "more versions", |later| later.version.number > view.version.number + 20);
    // What is there is whole: a hive that had to start now would go on from it.
    let files = skep_data::RunFiles::new(
        skep_data::Store::open(&place.path().to_string_lossy()).expect("opens"),
        "full",
    );
    let runtime = tokio::runtime::Runtime::new().expect("starts");
    let newest = runtime.block_on(files.expect("a name").newest_checkpoint()).expect("reads");
    assert!(newest.warnings.is_empty(), "{:?}", newest.warnings);
    assert!(newest.checkpoint.is_some_and(|checkpoint| checkpoint.version >= kept));
    std::fs::remove_file(&filler).expect("frees space");
    watch.until("full", "checkpoints again", |later| {
        later.trouble.is_none() && later.durable.number > view.version.number
    });
    assert!(hive.is_running());
}

#[test]
fn training_that_is_interrupted_goes_on_where_it_was() {
    let store = folder();
    let train = |arguments: &[&str]| {
        let mut command = Command::new(unit_task());
        command.arg("train").args(arguments).arg("--store").arg(store.path());
        command.env("UNIT_SLEEP_MS", "10");
        command
    };
    let mut first =
        Process::start(&mut train(&["unit", "--name", "t", "--epochs", "4", "--workers", "2"]));
    let url = wait_for("the hive's address", || {
        let words = first.stderr();
        let (_, rest) = words.split_once("hive at ")?;
        Some(rest.lines().next()?.to_owned())
    });
    support::Watch::new(&url).until("t", "progress", |view| view.samples > 1000);
    first.signal(libc::SIGINT);
    assert_eq!(first.code(), Some(130), "{}", first.stderr());
    let words = first.last_words();
    assert!(words.contains("skep train --resume t"), "{words}");
    let kept = newest_version(store.path(), "t").expect("a checkpoint").number;
    assert!(kept > 0);
    let ended = run_to_end(&mut train(&["--resume", "t", "--json", "--workers", "2"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let result: serde_json::Value = serde_json::from_str(ended.stdout.trim()).expect("JSON");
    assert_eq!((result["samples"].as_u64(), &result["state"]), (Some(4 * 4096), &"done".into()));
    assert_exactly_once(store.path(), "t", -4.0 / 32.0);
}

#[test]
fn workers_may_come_before_the_hive_and_in_the_middle() {
    let store = folder();
    let setup = HiveSetup::new(&unit_task(), store.path(), "unit --name late --epochs 4");
    let slow = [("UNIT_SLEEP_MS", "15")];
    let mut workers = vec![setup.worker(&slow), setup.worker(&slow)];
    let _hive = setup.start();
    let watch = setup.watch();
    watch.until("late", "both at work", |view| view.workers.len() == 2 && view.samples > 1000);
    workers.push(setup.worker(&slow));
    watch.until("late", "the third at work", |view| {
        view.workers.iter().filter(|worker| worker.contributions > 0).count() == 3
    });
    let view = watch.finished("late");
    assert_eq!((view.state, view.samples), (RunState::Done, 4 * 4096));
    assert_exactly_once(store.path(), "late", -4.0 / 32.0);
    for worker in &mut workers {
        assert_eq!(worker.code(), Some(0), "{}", worker.stderr());
    }
}

#[test]
fn with_sync_the_same_seed_gives_the_same_bits() {
    let flags = "--policy sync:4 --epochs 1 --seed 7";
    let (_, model) = train_mnist(&format!("{flags} --workers 1"));
    for workers in [2, 3] {
        let (_, other) = train_mnist(&format!("{flags} --workers {workers}"));
        assert!(model == other, "{workers} workers gave other bits than one");
    }
    let (_, other) = train_mnist("--policy sync:4 --epochs 1 --seed 8 --workers 2");
    assert!(model != other, "another seed gave the same bits");
    let store = folder();
    let setup = HiveSetup::new(
        &skep(),
        store.path(),
        &format!("mnist --name bits {flags} --set checkpoint.seconds=0.2 --set lease.seconds=2"),
    );
    let mut hive = setup.start();
    let mut workers: Vec<Process> = (0..3).map(|_| setup.worker(&[])).collect();
    let samples = setup.watch().run("bits").epoch_positions;
    let fire = Fire { kills: 20, hive_every: 5, samples, environment: &[] };
    let hive_kills = fire.rage(&setup, "bits", &mut hive, &mut workers);
    setup.watch().finished("bits");
    println!("20 kills, {hive_kills} of the hive");
    let killed = std::fs::read(store.path().join("runs/bits/model.safetensors")).expect("a model");
    assert!(model == killed, "kills changed the bits");
}

#[test]
fn slots_are_parts_of_one_larger_batch() {
    let step = |flags: &str| {
        let (_, model) = train_mnist(&format!("--steps 1 --workers 2 --seed 5 {flags}"));
        let path = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(path.path(), model).expect("writes");
        ["conv1.weight", "conv2.bias", "fc1.weight", "fc3.weight", "fc3.bias"]
            .map(|name| support::tensor(path.path(), name))
    };
    let slots = step("--policy sync:4 --batch 8");
    let whole = step("--policy sync:1 --batch 32");
    for (slots, whole) in slots.iter().zip(&whole) {
        let largest = whole.iter().fold(0f32, |most, value| most.max(value.abs()));
        let apart = slots.iter().zip(whole).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(apart <= 1e-5 * largest, "{apart} apart at {largest}");
    }
}
