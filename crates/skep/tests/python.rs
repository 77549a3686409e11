//! The Python client against a real hive: its own tests, PyTorch and Rust workers in one run, and
//! exactly once under kill -9.
//!
//! `SKEP_PYTHON` names the interpreter, `python3` otherwise. Where it lacks a package that a test
//! needs the test says so and is skipped; under CI it fails.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use skep_wire::RunState;
use support::{Fire, HiveSetup, Process, assert_exactly_once, run_to_end, skep, unit_task};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The interpreter, where the client is found.
fn python(arguments: &[&str]) -> Command {
    let program = std::env::var("SKEP_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let mut command = Command::new(program);
    command.args(arguments).current_dir(repository().join("python"));
    command.env("PYTHONDONTWRITEBYTECODE", "1").env("SKEP_BINARY", skep());
    command
}

/// Whether Python is there with what the client needs.
fn is_there() -> bool {
    let check = python(&["-c", "import numpy, safetensors, urllib3"]).output();
    let there = check.is_ok_and(|output| output.status.success());
    if !there {
        let what = "no Python with numpy, safetensors and urllib3 (SKEP_PYTHON, or python3)";
        assert!(std::env::var_os("CI").is_none(), "{what}, and under CI nothing is skipped");
        println!("skipped: {what}");
    }
    there
}

#[test]
fn its_own_tests_pass() {
    if !is_there() {
        return;
    }
    let ended = run_to_end(&mut python(&["-m", "unittest", "-v"]));
    println!("{}{}", ended.stdout, ended.stderr);
    assert_eq!(ended.code, Some(0), "the tests of the Python client failed");
}

/// The unit-vector test, with workers that are Python processes.
fn under_fire(policy: &str, samples_per_version: u64) {
    const SAMPLES: u64 = 4096;
    const EPOCHS: u64 = 8;
    if !is_there() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut setup = HiveSetup::new(
        &unit_task(),
        folder.path(),
        &format!(
            "unit --name fire --data unit:{SAMPLES} --batch 16 --epochs {EPOCHS} \
             --policy {policy} --set checkpoint.seconds=0.2 --set lease.seconds=1.5"
        ),
    );
    let url = setup.url();
    setup.other_worker = Some(Box::new(move || {
        python(&["-m", "tests.workers", "unit", &url, &format!("fire:{SAMPLES}"), "10"])
    }));
    let mut hive = setup.start();
    let mut workers: Vec<Process> = (0..4).map(|_| setup.worker(&[])).collect();
    let samples = SAMPLES * EPOCHS;
    let fire = Fire { kills: 70, hive_every: 9, samples, environment: &[] };
    let hive_kills = fire.rage(&setup, "fire", &mut hive, &mut workers);
    let view = setup.watch().finished("fire");
    println!(
        "{policy}: {hive_kills} kills of the hive, {} of Python workers; version {}, {:.1} s",
        70 - hive_kills,
        view.version,
        view.seconds
    );
    assert_eq!(view.state, RunState::Done, "{}", view.reason);
    assert!(view.skipped.is_empty(), "{:?}", view.skipped);
    assert_eq!(view.samples, samples);
    assert_exactly_once(folder.path(), "fire", -(EPOCHS as f32) / samples_per_version as f32);
    for worker in &mut workers {
        assert_eq!(worker.code(), Some(0), "{}", worker.stderr());
    }
}

#[test]
fn batch_under_fire() {
    under_fire("batch:2", 32);
}

#[test]
fn async_under_fire() {
    under_fire("async:damping=0", 16);
}

#[test]
fn sync_under_fire() {
    under_fire("sync:2", 32);
}
