//! Invariant 1 on real processes: whatever is killed, every sample of every epoch is applied
//! exactly once. `examples/unit_task.rs` says why its parameters prove that.

mod support;

use skep_wire::RunState;
use support::{Fire, HiveSetup, Process, assert_exactly_once, unit_task};

const SAMPLES: u64 = 4096;
const CHUNK: u64 = 16;
const EPOCHS: u64 = 16;
const KILLS: u64 = 210;
const SLOW: &[(&str, &str)] = &[("UNIT_SLEEP_MS", "15")];

/// Trains under fire, and looks at every coordinate.
fn under_fire(policy: &str, samples_per_version: u64) {
    let folder = tempfile::tempdir().expect("a folder");
    let setup = HiveSetup::new(
        &unit_task(),
        folder.path(),
        &format!(
            "unit --name fire --data unit:{SAMPLES} --batch {CHUNK} --epochs {EPOCHS} \
             --policy {policy} --set checkpoint.seconds=0.2 --set lease.seconds=1.5"
        ),
    );
    let mut hive = setup.start();
    let mut workers: Vec<Process> = (0..4).map(|_| setup.worker(SLOW)).collect();
    let samples = SAMPLES * EPOCHS;
    let fire = Fire { kills: KILLS, hive_every: 9, samples, environment: SLOW };
    let hive_kills = fire.rage(&setup, "fire", &mut hive, &mut workers);
    let view = setup.watch().finished("fire");
    println!(
        "{policy}: {hive_kills} kills of the hive, {} of workers; version {}, {:.1} s",
        KILLS - hive_kills,
        view.version,
        view.seconds
    );
    assert!(hive_kills >= 20);
    assert_eq!(view.state, RunState::Done, "{}", view.reason);
    assert!(view.skipped.is_empty(), "{:?}", view.skipped);
    assert_eq!(view.samples, samples);
    assert_eq!(view.version.number, samples / samples_per_version);
    assert_eq!(view.version.generation, hive_kills + 1);
    assert_exactly_once(folder.path(), "fire", -(EPOCHS as f32) / samples_per_version as f32);
    for worker in &mut workers {
        assert_eq!(worker.code(), Some(0), "{}", worker.stderr());
    }
}

#[test]
fn batch_under_fire() {
    under_fire("batch:2", 2 * CHUNK);
}

#[test]
fn async_under_fire() {
    under_fire("async:damping=0", CHUNK);
}

#[test]
fn sync_under_fire() {
    under_fire("sync:2", 2 * CHUNK);
}
