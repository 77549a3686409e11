//! How leases go on and end: heartbeats, deadlines, what was given back, and what failed.

use std::ops::Range;

use crate::Millis;
use crate::lease::{Assignment, Ending, Lease};
use crate::run::{Notice, Pace, Refusal, Run, Status};
use crate::streak::TOO_MANY;

/// How long a slot of local training may take as long as nobody has finished one.
const UNMEASURED: Millis = 3_600_000;

impl Run {
    /// When something will have to be decided even if nobody calls: the next deadline.
    pub fn next_deadline(&self) -> Option<Millis> {
        let lapse = self.leases.values().map(|lease| lease.deadline() + 1).min();
        lapse.into_iter().chain(self.grace_over()).min()
    }

    /// A heartbeat: keeps a lease alive. A lapsed lease is never revived.
    pub fn renew(&mut self, now: Millis, lease: u128) -> Result<Millis, Refusal> {
        self.expire(now);
        let times = self.plan.lease;
        let lease = self.leases.get_mut(&lease).ok_or(Refusal::Gone("the lease lapsed"))?;
        lease.renew(now, &times);
        let worker = lease.worker.clone();
        self.saw(&worker, now);
        Ok(times.silence / 3)
    }

    /// A worker gives its lease back; with a reason where the slice could not be worked on.
    pub fn give_back(
        &mut self,
        now: Millis,
        lease: u128,
        failure: Option<&str>,
    ) -> Result<(), Refusal> {
        self.expire(now);
        if !self.leases.contains_key(&lease) {
            return Err(Refusal::Gone("the lease lapsed"));
        }
        self.release(lease, failure.map_or(Ending::Returned, Ending::Failed));
        self.settle();
        Ok(())
    }

    /// Lets leases lapse.
    pub fn tick(&mut self, now: Millis) {
        self.expire(now);
        self.settle();
    }

    pub(crate) fn drop_work(&mut self) {
        self.leases.clear();
        self.pending.clear();
        self.pending_samples = 0;
        self.quorum_at = None;
        self.give_up_measuring();
        self.evaluation_queue.clear();
    }

    pub(crate) fn saw(&mut self, worker: &str, now: Millis) {
        match self.paces.get_mut(worker) {
            Some(pace) => pace.seen = now,
            None => {
                self.paces.insert(worker.to_owned(), Pace { seen: now, rate: None });
            }
        }
        let silence = self.plan.lease.silence;
        if now.saturating_sub(self.paces_pruned) > silence {
            self.paces_pruned = now;
            self.paces.retain(|_, pace| now.saturating_sub(pace.seen) < 6 * silence);
        }
    }

    pub(crate) fn note_pace(&mut self, worker: &str, now: Millis, rate: f64) {
        self.saw(worker, now);
        if let Some(pace) = self.paces.get_mut(worker) {
            pace.rate = Some(pace.rate.map_or(rate, |known| known * 0.7 + rate * 0.3));
        }
    }

    pub(crate) fn progress_time(&self) -> Millis {
        let Some(rounds) = self.plan.policy.rounds() else { return self.plan.lease.progress };
        let slowest = self.paces.values().filter_map(|pace| pace.rate).reduce(f64::min);
        let by_pace = |rate: f64| (10.0 * self.plan.chunk as f64 / rate) as Millis;
        // Nothing is known of how long local training takes until somebody has done it: a deadline
        // that is too short would never let anybody finish.
        rounds
            .deadline
            .unwrap_or_else(|| slowest.map_or(UNMEASURED, by_pace).max(self.plan.lease.progress))
    }

    pub(crate) fn expire(&mut self, now: Millis) {
        self.clock = self.clock.max(now);
        if now <= self.earliest_lapse {
            return;
        }
        let lapsed: Vec<_> =
            self.leases.iter().filter_map(|(&id, lease)| Some((id, lease.lapsed(now)?))).collect();
        for (id, reason) in lapsed {
            self.release(id, Ending::Lapsed(reason));
        }
        let deadlines = self.leases.values().map(Lease::deadline);
        self.earliest_lapse = deadlines.min().unwrap_or(Millis::MAX);
        // What lapsed may have been skipped, and that may have been the last of the epoch.
        self.settle();
    }

    /// Ends a lease and frees what it holds and nobody else does.
    pub(crate) fn release(&mut self, id: u128, ending: Ending<'_>) {
        let Some(lease) = self.leases.remove(&id) else { return };
        let failure = match ending {
            Ending::Returned => None,
            Ending::Lapsed(reason) | Ending::Failed(reason) => Some(reason),
        };
        let failure: Option<String> = failure.map(|reason| reason.chars().take(300).collect());
        if let Some(reason) = failure.clone() {
            self.notices.push(Notice::Lapsed { worker: lease.worker.clone(), reason });
        }
        match lease.assignment {
            Assignment::Evaluate { .. } => {
                let mut others = self.leases.values().filter(|other| !other.trains());
                if others.any(|other| other.cursor == lease.cursor) {
                    return;
                }
                let attempts = self.plan.attempts;
                let Some(evaluation) = &mut self.evaluation else { return };
                if evaluation.release(lease.cursor, failure.is_some(), attempts) {
                    self.give_up_measuring();
                    if self.status == Status::Measuring {
                        self.reason = "the final version could not be measured".to_owned();
                    }
                    self.next_measurement();
                }
            }
            Assignment::Train { .. } => {
                let others = self.leases.values().filter(|other| other.trains());
                let repeats = others.filter(|other| other.cursor == lease.cursor);
                let held = repeats.map(|other| other.end).max().unwrap_or(lease.cursor);
                let mut free = held..lease.end;
                // It failed at its cursor; if someone else still works there, they will tell.
                if let Some(reason) = failure.filter(|_| held == lease.cursor) {
                    let failed = held..lease.end.min(held.saturating_add(self.plan.chunk));
                    free.start = failed.end;
                    let reason = format!("{reason} ({})", lease.worker);
                    self.fail(failed, lease.failures, &reason);
                    self.ledger.release(free, lease.failures);
                    // Workers that are killed say nothing about the run.
                    if lease.failures == 0 && matches!(ending, Ending::Failed(_)) {
                        self.streak.failed();
                        self.give_up_if_diverged(&reason);
                    }
                    return;
                }
                self.ledger.release(free, lease.failures);
            }
        }
    }

    /// Positions failed: they are free again, or skipped after too many times.
    pub(crate) fn fail(&mut self, range: Range<u64>, failures: u32, reason: &str) {
        if range.is_empty() {
            return;
        }
        if failures + 1 >= self.plan.attempts {
            let gap = self.ledger.skip(range, reason);
            self.notices.push(Notice::Skipped(gap));
        } else {
            self.ledger.release(range, failures + 1);
        }
    }

    /// A run of which nothing comes any more ends, before each of its slices has failed five times.
    pub(crate) fn give_up_if_diverged(&mut self, reason: &str) {
        if self.streak.is_too_long() && self.takes_work().is_ok() {
            self.fail_run(&format!(
                "{TOO_MANY} slices in a row failed, the last with: {reason}; the run has probably \
                 diverged: lower the rate"
            ));
        }
    }
}
