//! Kill -9, several times a second: who, and when.

use std::time::{Duration, Instant};

use skep_deploy::local::Running;

use super::sight::Seen;
use crate::failure::Failure;

/// Of so many kills, one is the hive's.
const HIVE_EVERY: u64 = 10;

/// One process that was ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Kill {
    /// Seconds since the demonstration began.
    pub(super) seconds: f64,
    /// Samples that were in the run's version when that was last seen.
    pub(super) samples: u64,
    pub(super) victim: Victim,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    Hive,
    /// Which of the workers.
    Worker(usize),
}

/// Chooses victims.
pub(super) struct Fire {
    dice: u64,
    every: Duration,
    due: Instant,
    kills: u64,
    /// The look at the run, and the version, before the last kill.
    last_look: u64,
    last_version: u64,
    /// What was safe before the hive was last killed.
    last_durable: Option<u64>,
}

impl Fire {
    pub(super) fn new(seed: u64, per_second: f64) -> Self {
        let every = Duration::from_secs_f64(1.0 / per_second);
        Self {
            dice: seed,
            every,
            due: Instant::now() + every,
            kills: 0,
            last_look: 0,
            last_version: 0,
            last_durable: None,
        }
    }

    /// Kills somebody if it is time. Between two kills the run has made a version, and between two
    /// of the hive something new was safe, so that a slow machine comes to an end too.
    pub(super) async fn burn(
        &mut self,
        seen: &Seen,
        seconds: f64,
        hive: &mut Running,
        workers: &mut Running,
    ) -> Result<Option<Kill>, Failure> {
        let fresh = seen.looks > self.last_look && seen.version() != self.last_version;
        if Instant::now() < self.due || !fresh || seen.version() == 0 {
            return Ok(None);
        }
        let turn = self.kills % HIVE_EVERY == HIVE_EVERY / 2;
        let safe = self.last_durable.is_none_or(|durable| seen.durable() > durable);
        let victim = match turn {
            true if !safe => return Ok(None),
            true => Victim::Hive,
            false => Victim::Worker(self.below(workers.count() as u64) as usize),
        };
        let hit = match victim {
            Victim::Hive => hive.kill(0).await,
            Victim::Worker(at) => workers.kill(at).await,
        };
        if !hit.map_err(|error| Failure::fault(error.to_string()))? {
            return Ok(None);
        }
        self.kills += 1;
        (self.last_look, self.last_version) = (seen.looks, seen.version());
        if victim == Victim::Hive {
            self.last_durable = Some(seen.durable());
        }
        // Not always at the same point of the work; on average as often as was asked for.
        let share = 0.5 + self.below(1000) as f64 / 1000.0;
        self.due = (self.due + self.every.mul_f64(share)).max(Instant::now());
        Ok(Some(Kill { seconds, samples: seen.samples(), victim }))
    }

    /// A number below `end`; for choosing, not for anything that must be unpredictable.
    fn below(&mut self, end: u64) -> u64 {
        self.dice = self
            .dice
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 33) % end.max(1)
    }
}
