//! What the result itself says: whether a sample was lost or counted twice, and whether the models
//! of both runs are the same to the last bit.

use std::path::Path;
use std::process::ExitCode;

use serde_json::json;
use sha2::{Digest, Sha256};
use skep_core::position::{Order, Turns};
use skep_core::{LedgerSnapshot, RunSnapshot};
use skep_data::{RunFiles, Store};
use skep_wire::{Measurement, RunView, Split};

use super::fire::Victim;
use super::probe::Tally;
use super::screen::Scene;
use super::{CALM, CHAOS};
use crate::failure::Failure;
use crate::progress::thousands;

/// Which samples are in which version, worked out from the job alone: with `sync` that does not
/// depend on who works, when, or on who is killed.
#[derive(Clone, Debug)]
pub(super) struct Timetable {
    seed: u64,
    shards: Vec<u64>,
    chunk: u64,
    slots: u64,
}

impl Timetable {
    pub(super) fn new(view: &RunView, slots: u64) -> Result<Self, Failure> {
        let shards: Vec<u64> = view.manifest.train.iter().map(|shard| shard.samples).collect();
        let chunk = view.job.train.batch * view.job.train.every;
        if shards.iter().all(|samples| *samples == 0) || chunk == 0 || slots == 0 {
            return Err(Failure::fault("the run has no samples"));
        }
        Ok(Self { seed: view.job.run.seed, shards, chunk, slots })
    }

    /// How many samples of an epoch each of its versions adds.
    fn sizes(&self, epoch: u64) -> Vec<u64> {
        let turns = Turns { shards: 1, chunk: self.chunk };
        let order = Order::new(self.seed, epoch, &self.shards, turns);
        let places = (0..).map_while(|slot| order.place_of_slot(slot));
        let chunks: Vec<u64> = places.map(|place| place.end - place.start).collect();
        chunks.chunks(self.slots as usize).map(|round| round.iter().sum()).collect()
    }

    /// The epoch in which a version lies, and how many of its positions the version holds.
    pub(super) fn place(&self, version: u64) -> (u64, u64) {
        // Every epoch has the same chunks, in another order.
        let each = self.sizes(0).len() as u64;
        let (epoch, rest) = (version / each, (version % each) as usize);
        (epoch, self.sizes(epoch)[..rest].iter().sum())
    }

    /// How many samples a version holds, counted from version 0.
    pub(super) fn samples(&self, version: u64) -> u64 {
        let (epoch, applied) = self.place(version);
        epoch * self.shards.iter().sum::<u64>() + applied
    }

    /// How many samples too few and too many a version holds that should hold what it says.
    pub(super) fn compare(&self, version: u64, samples: u64) -> Balance {
        let due = self.samples(version);
        Balance { lost: due.saturating_sub(samples), doubled: samples.saturating_sub(due) }
    }

    /// The same for the positions of the epoch under way, one by one, and for what was given up.
    fn audit(&self, version: u64, ledger: &LedgerSnapshot) -> Balance {
        let (epoch, due) = self.place(version);
        let mut balance =
            Balance { lost: ledger.gaps.iter().map(|gap| gap.end - gap.start).sum(), doubled: 0 };
        let mut applied = ledger.applied.clone();
        if ledger.epoch != epoch {
            applied.clear();
        }
        applied.sort_unstable_by_key(|interval| (interval.start, interval.end));
        let mut next = 0;
        for interval in &applied {
            balance.lost += interval.start.saturating_sub(next);
            balance.doubled += next.min(interval.end).saturating_sub(interval.start);
            next = next.max(interval.end);
        }
        balance.lost += due.saturating_sub(next);
        balance.doubled += next.saturating_sub(due);
        balance
    }
}

/// Samples that are missing, and samples that are there too often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Balance {
    pub(super) lost: u64,
    pub(super) doubled: u64,
}

impl Balance {
    /// The worse of two.
    pub(super) fn worst(self, other: Self) -> Self {
        Self { lost: self.lost.max(other.lost), doubled: self.doubled.max(other.doubled) }
    }
}

/// How many versions both runs measured, and how many of those differ.
pub(super) fn measurements(calm: &[Measurement], chaos: &[Measurement]) -> (usize, usize) {
    let same = |a: &Measurement, b: &Measurement| {
        (a.split, a.version.number, a.samples) == (b.split, b.version.number, b.samples)
    };
    let pairs = chaos.iter().filter_map(|it| Some((it, calm.iter().find(|calm| same(it, calm))?)));
    pairs.fold((0, 0), |(all, other), (a, b)| {
        (all + 1, other + usize::from(a.accuracy != b.accuracy))
    })
}

/// What is examined.
pub(super) struct Proof<'demo> {
    pub(super) scene: &'demo Scene,
    pub(super) calm: &'demo RunView,
    pub(super) chaos: &'demo RunView,
    pub(super) probe: &'demo Tally,
    pub(super) seconds: f64,
}

impl Proof<'_> {
    /// Reads what the store has in the end.
    pub(super) async fn examine(&self, store: &Path) -> Result<Findings, Failure> {
        let hash = |run: &str| {
            let path = store.join("runs").join(run).join("model.safetensors");
            let bytes = std::fs::read(&path)
                .map_err(|error| Failure::fault(format!("{}: {error}", path.display())))?;
            let digest = Sha256::digest(&bytes);
            Ok::<_, Failure>(digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
        };
        let mut balance = self.scene.balance;
        let opened = Store::open(&store.to_string_lossy())?;
        for (run, view) in [(CALM, self.calm), (CHAOS, self.chaos)] {
            let newest = RunFiles::new(opened.clone(), run)?.newest_checkpoint().await?;
            let checkpoint = newest
                .checkpoint
                .ok_or_else(|| Failure::fault(format!("run {run} has left no checkpoint")))?;
            let kept: RunSnapshot = serde_json::from_value(checkpoint.state["run"].clone())
                .map_err(|error| Failure::fault(format!("the ledger of {run}: {error}")))?;
            let timetable = self.scene.timetable.as_ref();
            let timetable = timetable.ok_or_else(|| Failure::fault("nothing was trained"))?;
            balance = balance
                .worst(timetable.compare(view.version.number, view.samples))
                .worst(timetable.compare(kept.number, kept.samples))
                .worst(timetable.audit(kept.number, &kept.ledger));
            if kept.number != view.version.number {
                return Err(Failure::fault(format!("the last version of {run} is not kept")));
            }
        }
        let (compared, differing) = measurements(&self.scene.calm, &self.scene.chaos);
        let accuracy = |view: &RunView| view.test.and_then(|test| test.accuracy);
        let hive_kills = self.scene.kills.iter().filter(|kill| kill.victim == Victim::Hive).count();
        Ok(Findings {
            kills: self.scene.kills.len(),
            hive_kills,
            balance,
            calm_hash: hash(CALM)?,
            chaos_hash: hash(CHAOS)?,
            compared,
            differing,
            test_samples: self.chaos.manifest.samples(Split::Test),
            calm_accuracy: accuracy(self.calm),
            chaos_accuracy: accuracy(self.chaos),
            version: self.chaos.version,
            samples: self.chaos.samples,
            probe: self.probe.clone(),
            workers: self.scene.worker_count,
            memory_limit: self.scene.memory_limit,
            memory_peak: self.scene.memory_peak,
            seconds: self.seconds,
            chaos_seconds: self.seconds - self.scene.calm_seconds,
        })
    }
}

/// What was found.
pub(super) struct Findings {
    pub(super) kills: usize,
    pub(super) hive_kills: usize,
    pub(super) balance: Balance,
    pub(super) calm_hash: String,
    pub(super) chaos_hash: String,
    pub(super) compared: usize,
    pub(super) differing: usize,
    pub(super) test_samples: u64,
    pub(super) calm_accuracy: Option<f64>,
    pub(super) chaos_accuracy: Option<f64>,
    pub(super) version: skep_wire::Version,
    pub(super) samples: u64,
    pub(super) probe: Tally,
    pub(super) workers: usize,
    pub(super) memory_limit: u64,
    pub(super) memory_peak: Option<u64>,
    pub(super) seconds: f64,
    pub(super) chaos_seconds: f64,
}

impl Findings {
    pub(super) fn bits_equal(&self) -> bool {
        self.calm_hash == self.chaos_hash && self.differing == 0
    }

    /// Says everything; `picture` is where there is one.
    pub(super) fn report(&self, json: bool, picture: Option<&Path>) {
        if json {
            println!("{}", self.json());
            return;
        }
        let workers = self.kills - self.hive_kills;
        println!(
            "kills          {} ({workers} of workers, {} of the hive) in {:.0} s",
            self.kills, self.hive_kills, self.chaos_seconds
        );
        println!("lost           {} of {} samples", self.balance.lost, thousands(self.samples));
        println!("doubled        {}", self.balance.doubled);
        let (calm, chaos) = (&self.calm_hash[..16], &self.chaos_hash[..16]);
        if self.bits_equal() {
            println!("bits equal     yes: sha256 {chaos}… with and without kills");
        } else {
            println!("bits equal     no: sha256 {calm}… without kills, {chaos}… with");
        }
        println!(
            "curves         {} of {} points measured in both runs are the same",
            self.compared - self.differing,
            self.compared
        );
        if let Some(accuracy) = self.chaos_accuracy {
            println!(
                "test accuracy  {:.2} % on {} samples, version {}",
                accuracy * 100.0,
                thousands(self.test_samples),
                self.version
            );
        }
        println!(
            "page           {} requests answered by {} versions, {} dropped; slowest {} ms",
            thousands(self.probe.answered),
            self.probe.versions.len(),
            self.probe.dropped,
            self.probe.slowest.as_millis()
        );
        let peak = self.memory_peak.map_or(String::new(), |peak| {
            format!("; the largest took {:.1} MiB", peak as f64 / f64::from(1 << 20))
        });
        println!(
            "memory         {} workers of at most {} MiB (RLIMIT_DATA){peak}",
            self.workers,
            self.memory_limit >> 20
        );
        if let Some(picture) = picture {
            println!("picture        {}", picture.display());
        }
        println!("elapsed time   {:.0} s", self.seconds);
    }

    fn json(&self) -> serde_json::Value {
        json!({
            "kills": self.kills,
            "hive_kills": self.hive_kills,
            "worker_kills": self.kills - self.hive_kills,
            "lost": self.balance.lost,
            "doubled": self.balance.doubled,
            "bits_equal": self.bits_equal(),
            "model_sha256": self.chaos_hash,
            "calm_model_sha256": self.calm_hash,
            "measurements": self.compared,
            "measurements_differing": self.differing,
            "accuracy": self.chaos_accuracy,
            "calm_accuracy": self.calm_accuracy,
            "version": self.version,
            "samples": self.samples,
            "requests": self.probe.answered,
            "dropped": self.probe.dropped,
            "page_versions": self.probe.versions.len(),
            "workers": self.workers,
            "memory_limit": self.memory_limit,
            "memory_peak": self.memory_peak,
            "seconds": self.seconds,
            "chaos_seconds": self.chaos_seconds,
        })
    }

    /// Everything as it should be, or what is not.
    pub(super) fn verdict(&self) -> Result<ExitCode, Failure> {
        let mut wrong = Vec::new();
        let Balance { lost, doubled } = self.balance;
        if lost > 0 || doubled > 0 {
            wrong.push(format!("{lost} samples were lost and {doubled} doubled"));
        }
        if !self.bits_equal() || self.calm_accuracy != self.chaos_accuracy {
            wrong.push("the run under fire came to another model than the one in peace".to_owned());
        }
        if self.probe.dropped > 0 {
            let first = self.probe.first_dropped.as_deref().unwrap_or_default();
            wrong.push(format!("{} requests were dropped, the first: {first}", self.probe.dropped));
        }
        if wrong.is_empty() { Ok(ExitCode::SUCCESS) } else { Err(Failure::fault(wrong.join("; "))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_core::{Gap, Interval};

    fn timetable() -> Timetable {
        Timetable { seed: 3, shards: vec![70, 40, 70], chunk: 32, slots: 2 }
    }

    #[test]
    fn a_timetable_counts_every_sample_of_an_epoch_once() {
        let table = timetable();
        for epoch in 0..4 {
            // 3 + 2 + 3 chunks, two to a version.
            assert_eq!(table.sizes(epoch).len(), 4);
            assert_eq!(table.sizes(epoch).iter().sum::<u64>(), 180);
        }
        assert_eq!(table.place(0), (0, 0));
        assert_eq!(table.place(5).0, 1);
        assert_eq!(table.samples(8), 360);
    }

    #[test]
    fn whatever_is_wrong_fails_the_demonstration() {
        let good = || Findings {
            kills: 20,
            hive_kills: 2,
            balance: Balance::default(),
            calm_hash: "a".repeat(64),
            chaos_hash: "a".repeat(64),
            compared: 9,
            differing: 0,
            test_samples: 100,
            calm_accuracy: Some(0.9),
            chaos_accuracy: Some(0.9),
            version: skep_wire::Version::new(3, 40),
            samples: 5120,
            probe: Tally::default(),
            workers: 8,
            memory_limit: 1 << 25,
            memory_peak: None,
            seconds: 60.0,
            chaos_seconds: 40.0,
        };
        assert!(good().verdict().is_ok());
        let mut dropped = Tally::default();
        dropped.dropped += 1;
        for (findings, part) in [
            (
                Findings { balance: Balance { lost: 3, doubled: 0 }, ..good() },
                "3 samples were lost",
            ),
            (Findings { balance: Balance { lost: 0, doubled: 2 }, ..good() }, "2 doubled"),
            (Findings { chaos_hash: "b".repeat(64), ..good() }, "another model"),
            (Findings { differing: 1, ..good() }, "another model"),
            (Findings { chaos_accuracy: Some(0.91), ..good() }, "another model"),
            (Findings { probe: dropped, ..good() }, "1 requests were dropped"),
        ] {
            let failure = findings.verdict().expect_err(part);
            assert!(failure.code == 1 && failure.message.contains(part), "{failure}");
        }
    }

    #[test]
    fn what_is_missing_or_twice_in_a_ledger_is_counted() {
        let table = timetable();
        let (epoch, due) = table.place(6);
        let interval = |start, end| Interval { start, end, version: 6 };
        let audit = |applied: Vec<Interval>, gaps: Vec<Gap>| {
            table.audit(6, &LedgerSnapshot { epoch, applied, gaps })
        };
        let balance = |lost, doubled| Balance { lost, doubled };
        assert_eq!(audit(vec![interval(0, due)], vec![]), balance(0, 0));
        assert_eq!(audit(vec![interval(20, due), interval(0, 20)], vec![]), balance(0, 0));
        assert_eq!(audit(vec![interval(0, 20), interval(32, due)], vec![]), balance(12, 0));
        assert_eq!(audit(vec![interval(0, 20), interval(12, due)], vec![]), balance(0, 8));
        assert_eq!(audit(vec![interval(0, due + 4)], vec![]), balance(0, 4));
        let gap = Gap { epoch: 0, start: 5, end: 9, reason: String::new() };
        assert_eq!(audit(vec![interval(0, due)], vec![gap]), balance(4, 0));
        assert_eq!(table.compare(8, 358), balance(2, 0));
        assert_eq!(table.compare(8, 365), balance(0, 5));
    }
}
