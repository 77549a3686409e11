//! Invariant 1 on real processes: whatever is killed, every sample of every epoch is applied
//! exactly once. `examples/unit_task.rs` says why its parameters prove that.

mod support;

use std::time::Duration;

use skep_wire::RunState;
use support::{Dice, HiveSetup, Process, assert_exactly_once, unit_task, wait_for};

const SAMPLES: u64 = 4096;
const CHUNK: u64 = 16;
const EPOCHS: u64 = 16;
const WORKERS: usize = 4;
const KILLS: u64 = 210;
/// Every so manieth kill is of the hive.
const HIVE_EVERY: u64 = 9;
const SLOW: [(&str, &str); 1] = [("UNIT_SLEEP_MS", "15")];

/// Trains under fire, and looks at every coordinate. Kills are spread evenly over the run's
/// progress, so that it is under fire from the first samples to the last however fast it goes.
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
    let mut dice = Dice::new();
    let mut hive = setup.start();
    let watch = setup.watch();
    let mut workers: Vec<Process> = (0..WORKERS).map(|_| setup.worker(&SLOW)).collect();
    let (mut hive_kills, mut worker_kills) = (0, 0);
    for kill in 0..KILLS {
        let due = SAMPLES * EPOCHS * kill / (KILLS + 5);
        wait_for("progress", || {
            for worker in &mut workers {
                if let Some(status) = worker.ended() {
                    panic!("a worker left a run that is not done: {status}\n{}", worker.stderr());
                }
            }
            let view = watch.run("fire");
            assert!(!view.state.is_final(), "{:?} {}", view.state, view.reason);
            (view.samples >= due).then_some(())
        });
        std::thread::sleep(Duration::from_millis(dice.below(40)));
        if kill % HIVE_EVERY == HIVE_EVERY - 1 {
            hive.kill();
            hive = setup.start();
            hive_kills += 1;
        } else {
            let victim = dice.below(WORKERS as u64) as usize;
            workers[victim].kill();
            workers[victim] = setup.worker(&SLOW);
            worker_kills += 1;
        }
    }
    let view = watch.finished("fire");
    println!(
        "{policy}: {hive_kills} kills of the hive, {worker_kills} of workers; version {}, {:.1} s",
        view.version, view.seconds
    );
    assert_eq!(view.state, RunState::Done, "{}", view.reason);
    assert!(view.skipped.is_empty(), "{:?}", view.skipped);
    assert_eq!(view.samples, SAMPLES * EPOCHS);
    let versions = SAMPLES * EPOCHS / samples_per_version;
    assert_eq!((view.version.number, view.version.generation), (versions, hive_kills + 1));
    assert_exactly_once(folder.path(), "fire", -(EPOCHS as f32) / samples_per_version as f32);
    for worker in &mut workers {
        assert_eq!(worker.code(), Some(0), "{}", worker.stderr());
    }
}

#[test]
fn each_sample_counts_exactly_once_whatever_is_killed() {
    under_fire("batch:2", 2 * CHUNK);
    under_fire("async:damping=0", CHUNK);
    under_fire("sync:2", 2 * CHUNK);
}
