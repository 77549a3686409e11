//! What a run leaves in `metrics/`, read by the real TensorBoard and by Python's csv, also after a
//! hive went back to an older checkpoint.
//!
//! `SKEP_TENSORBOARD` names a Python that has TensorBoard, `python3` otherwise. Where there is none
//! the test says so and is skipped; under CI it fails.

mod support;

use std::path::Path;
use std::process::Command;

use support::{HiveSetup, newest_version, run_to_end, skep, unit_task};

fn python() -> Command {
    let program = std::env::var("SKEP_TENSORBOARD").unwrap_or_else(|_| "python3".to_owned());
    Command::new(program)
}

fn is_there() -> bool {
    let check = python().args(["-c", "import tensorboard"]).output();
    let there = check.is_ok_and(|output| output.status.success());
    if !there {
        let what = "no Python with TensorBoard (SKEP_TENSORBOARD, or python3)";
        assert!(std::env::var_os("CI").is_none(), "{what}, and under CI nothing is skipped");
        println!("skipped: {what}");
    }
    there
}

#[test]
fn tensorboard_and_csv_tell_the_same_story() {
    if !is_there() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let arguments = "mnist --name mnist --epochs 4 --set checkpoint.seconds=0.3";
    let setup = HiveSetup::new(&skep(), folder.path(), arguments);
    let mut hive = setup.start();
    let mut workers: Vec<_> = (0..2).map(|_| setup.worker(&[])).collect();
    setup.watch().until("mnist", "two epochs", |view| view.epoch >= 2);
    // The hive writes all it knows and goes; its newest checkpoint is lost, its metrics are not.
    hive.signal(libc::SIGTERM);
    hive.code();
    let checkpoints = folder.path().join("runs/mnist/checkpoints");
    let mut folders: Vec<_> = std::fs::read_dir(&checkpoints)
        .expect("checkpoints")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    folders.sort();
    std::fs::remove_dir_all(folders.pop().expect("a checkpoint")).expect("is removed");
    let mut hive = setup.start();
    setup.watch().finished("mnist");
    for worker in &mut workers {
        worker.code();
    }
    hive.signal(libc::SIGTERM);
    hive.code();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/check_metrics.py");
    let metrics = folder.path().join("runs/mnist/metrics");
    let ended = run_to_end(python().arg(script).arg(metrics));
    println!("{}{}", ended.stdout, ended.stderr);
    assert_eq!(ended.code, Some(0), "TensorBoard or the CSV do not agree");
}

/// Whatever version a hive goes on from after kill -9, the history tells of all versions before it.
#[test]
fn a_killed_hive_leaves_no_hole_in_the_history() {
    let folder = tempfile::tempdir().expect("a folder");
    let arguments = "unit --name unit --steps 0 --set checkpoint.seconds=0.2";
    let setup = HiveSetup::new(&unit_task(), folder.path(), arguments);
    let mut hive = setup.start();
    let _worker = setup.worker(&[("UNIT_SLEEP_MS", "5")]);
    let watch = setup.watch();
    for round in 1..=3 {
        let before = watch.run("unit").durable.number;
        watch.until("unit", "checkpoints", |view| view.durable.number > before + 20);
        hive.kill();
        let kept = newest_version(folder.path(), "unit").expect("a checkpoint").number;
        hive = setup.start();
        watch.until("unit", "new versions", |view| view.version.number > kept + 3);
        let history = watch.ask(watch.client.history("unit", 1000)).expect("a history");
        let told: u64 = history.points.iter().map(|point| point.versions).sum();
        let last = history.points.last().expect("a point").version.number;
        assert_eq!(told, last, "versions are missing after kill {round}");
    }
}
