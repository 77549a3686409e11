//! Who gets which work: the decision on a request for a lease.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::evaluation::Evaluation;
use crate::lease::{Assignment, Ending, Grant, Lease, Request, Takes};
use crate::ledger::{Taken, Wish};
use crate::run::{Run, Status};
use crate::{Millis, Policy};

/// The answer to a request for a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseDecision {
    /// Work.
    Granted(Grant),
    /// None now.
    Wait {
        /// When it is worth asking again, even if nothing else happens.
        until: Millis,
        /// What is waited for.
        reason: &'static str,
    },
    /// None any more: the run is complete.
    Done,
    /// None any more: the run was stopped or failed.
    Stopped,
}

/// The most contributions a lease holds.
const MOST_CHUNKS: u64 = 64;

impl Run {
    /// Decides on a request for work. `nonce` becomes the lease's id.
    pub fn lease(&mut self, now: Millis, nonce: u128, request: &Request) -> LeaseDecision {
        self.tick(now);
        self.saw(&request.worker, now);
        self.release_former(now, &request.worker);
        let wait = |until, reason| LeaseDecision::Wait { until, reason };
        match self.status {
            Status::Done => return LeaseDecision::Done,
            Status::Stopped | Status::Failed => return LeaseDecision::Stopped,
            Status::Paused => return wait(now + 1000, "the run is paused"),
            Status::Running | Status::Measuring => {}
        }
        if request.takes != Takes::Training
            && let Some(grant) = self.grant_evaluation(now, nonce, request)
        {
            return LeaseDecision::Granted(grant);
        }
        if self.status == Status::Measuring {
            let reason = if request.takes == Takes::Training {
                "training is over, and this worker takes no evaluations"
            } else if self.evaluation.as_ref().is_some_and(Evaluation::is_open) {
                "what is left to measure lies in shards this worker cannot read"
            } else {
                "others are measuring the final version"
            };
            return wait(self.recheck(now), reason);
        }
        if request.takes == Takes::Evaluations {
            let reason = "there is nothing to measure now, and this worker takes only evaluations";
            return wait(self.recheck(now), reason);
        }
        if self.takes_too_long(request) {
            return wait(now + 1000, "the time left is too short for one contribution");
        }
        if !self.fresh_enough_with_one_more() {
            return wait(
                self.recheck(now),
                "a slower worker's contribution would become too stale",
            );
        }
        let wish_most = self.lease_size(request);
        let busy = self.busy_shards();
        let has = request.has.iter().copied().collect();
        let only = request.readable();
        let wish = Wish {
            window: self.round.as_ref().map_or((0, u64::MAX), |round| round.reach),
            most: wish_most,
            only: only.as_ref(),
            has: &has,
            busy: &busy,
        };
        let anything_free = self.ledger.window_unclaimed(wish.window);
        if let Some(taken) = self.ledger.take(wish) {
            return LeaseDecision::Granted(self.grant_training(now, nonce, request, taken));
        }
        match self.backup(now, only.as_ref()) {
            Ok(taken) => LeaseDecision::Granted(self.grant_training(now, nonce, request, taken)),
            Err(_) if anything_free => {
                wait(now + 1000, "what is free lies in shards this worker cannot read")
            }
            Err(until) => wait(until, "others have all that is left of the round or epoch"),
        }
    }

    /// One worker holds one lease. Where it asks again long after it should have sent a heartbeat
    /// or a contribution, it was most likely killed by its slice and started again: that counts as
    /// a failure, or such a slice would be given out for ever.
    fn release_former(&mut self, now: Millis, worker: &str) {
        let heartbeat = self.plan.lease.silence / 3;
        let former: Vec<_> = self
            .leases
            .iter()
            .filter(|(_, lease)| lease.worker == worker)
            .map(|(&id, lease)| (id, now > lease.last_progress + heartbeat))
            .collect();
        for (id, lost) in former {
            let lapsed = Ending::Lapsed("the worker began anew");
            self.release(id, if lost { lapsed } else { Ending::Returned });
        }
        self.settle();
    }

    fn grant_evaluation(&mut self, now: Millis, nonce: u128, request: &Request) -> Option<Grant> {
        let evaluation = self.evaluation.as_mut()?;
        let (split, base) = (evaluation.split, evaluation.number);
        let only = request.measurable(split);
        let taken = evaluation.take(only.as_ref());
        let (shard, offset, range) = taken.or_else(|| self.overdue_slice(now, only.as_ref()))?;
        let assignment = Assignment::Evaluate { split, shard, offset };
        let count = range.end - range.start;
        Some(self.grant(
            nonce,
            Lease {
                worker: request.worker.clone(),
                assignment,
                cursor: range.start,
                end: range.end,
                failures: 0,
                base,
                next_sequence: 0,
                silence_deadline: now + self.plan.lease.silence,
                progress_deadline: now + self.plan.lease.progress,
                last_progress: now,
            },
            count,
        ))
    }

    /// A slice of the evaluation that someone else has but is slow to count, as with
    /// [`Self::backup`]: the first of the two wins.
    fn overdue_slice(
        &self,
        now: Millis,
        only: Option<&BTreeSet<usize>>,
    ) -> Option<(usize, u64, Range<u64>)> {
        let evaluations = self.leases.values().filter(|lease| !lease.trains());
        let holders = |cursor: u64| evaluations.clone().filter(|it| it.cursor == cursor).count();
        let overdue = evaluations.clone().filter_map(|lease| {
            let Assignment::Evaluate { shard, offset, .. } = lease.assignment else { return None };
            let readable = only.is_none_or(|only| only.contains(&shard));
            (readable && self.evaluation_overdue(lease) <= now && holders(lease.cursor) == 1)
                .then(|| (lease.last_progress, (shard, offset, lease.range())))
        });
        overdue.min_by_key(|(since, (.., range))| (*since, range.start)).map(|(_, slice)| slice)
    }

    /// When others may count an evaluation's slice, too.
    fn evaluation_overdue(&self, lease: &Lease) -> Millis {
        let patience = self.patience(lease.end - lease.cursor);
        lease.last_progress + patience.clamp(200, self.plan.lease.silence.max(200))
    }

    /// Four times what the fastest worker needs for so many positions.
    fn patience(&self, positions: u64) -> Millis {
        let fastest = self.paces.values().filter_map(|pace| pace.rate).fold(0.0f64, f64::max);
        if fastest > 0.0 {
            (4.0 * positions as f64 / fastest) as Millis
        } else {
            self.plan.lease.silence / 2
        }
    }

    fn grant_training(
        &mut self,
        now: Millis,
        nonce: u128,
        request: &Request,
        taken: Taken,
    ) -> Grant {
        let assignment = Assignment::Train {
            epoch: self.ledger.epoch(),
            shard: taken.place.shard,
            offset: taken.place.offset + (taken.range.start - taken.place.start),
        };
        self.grant(
            nonce,
            Lease {
                worker: request.worker.clone(),
                assignment,
                cursor: taken.range.start,
                end: taken.range.end,
                failures: taken.failures,
                base: self.number,
                next_sequence: 0,
                silence_deadline: now + self.plan.lease.silence,
                progress_deadline: now + self.progress_time(),
                last_progress: now,
            },
            self.plan.chunk,
        )
    }

    fn grant(&mut self, nonce: u128, lease: Lease, chunk: u64) -> Grant {
        let grant = Grant {
            id: nonce,
            assignment: lease.assignment,
            range: lease.range(),
            chunk,
            base: lease.base,
            renew: self.plan.lease.silence / 3,
        };
        self.earliest_lapse = self.earliest_lapse.min(lease.deadline());
        self.leases.insert(nonce, lease);
        grant
    }

    fn takes_too_long(&self, request: &Request) -> bool {
        let rate = self.paces.get(&request.worker).and_then(|pace| pace.rate);
        rate.zip(request.time_left)
            .is_some_and(|(rate, left)| self.plan.chunk as f64 / rate > left as f64)
    }

    /// How many positions a worker should get: what fits its time and pace, less towards the end
    /// of the epoch, so that nobody is left waiting for one long slice.
    fn lease_size(&self, request: &Request) -> u64 {
        let chunk = self.plan.chunk;
        if self.plan.one_chunk_leases() {
            return chunk;
        }
        let rate = self.paces.get(&request.worker).and_then(|pace| pace.rate);
        let time = match request.time_left {
            Some(left) => self.plan.lease.target.min(left.saturating_mul(4) / 5),
            None => self.plan.lease.target,
        };
        let by_pace = rate.map_or(1, |rate| (rate * time as f64) as u64 / chunk);
        let fair = self.ledger.unclaimed() / (2 * self.paces.len() as u64).max(2) / chunk;
        by_pace.min(fair).clamp(1, MOST_CHUNKS).saturating_mul(chunk)
    }

    fn busy_shards(&self) -> BTreeSet<usize> {
        self.leases
            .values()
            .filter_map(|lease| match lease.assignment {
                Assignment::Train { shard, .. } => Some(shard),
                Assignment::Evaluate { .. } => None,
            })
            .collect()
    }

    /// With a hard bound on staleness: whether the slowest contribution under way would still be
    /// fresh enough if it came last and one more were under way.
    fn fresh_enough_with_one_more(&self) -> bool {
        let Policy::Async { max_staleness: Some(allowed), .. } = self.plan.policy else {
            return true;
        };
        let training = self.leases.values().filter(|lease| lease.trains());
        let (others, oldest) = training.fold((0u64, self.number), |(count, oldest), lease| {
            (count + 1, oldest.min(lease.base))
        });
        self.number + others - oldest <= allowed
    }

    /// Work that someone else has but is slow to bring home: the first of the two wins. Or when it
    /// is worth asking again.
    fn backup(&self, now: Millis, only: Option<&BTreeSet<usize>>) -> Result<Taken, Millis> {
        let limit = self.plan.policy.rounds().map_or(u64::MAX, |rounds| rounds.backup);
        // Two leases on the same positions stand at the same cursor: what one of them brings home
        // voids the other.
        let mut holders: BTreeMap<u64, u64> = BTreeMap::new();
        for lease in self.leases.values().filter(|lease| lease.trains()) {
            *holders.entry(lease.cursor).or_default() += 1;
        }
        if holders.values().filter(|&&count| count > 1).count() as u64 >= limit {
            return Err(self.recheck(now));
        }
        let patience = self.patience(self.plan.chunk);
        // Local training takes minutes: that alone makes nobody overdue.
        let most = match self.plan.policy {
            Policy::Average { .. } => self.progress_time(),
            _ => self.plan.lease.silence,
        };
        let patience = patience.clamp(200, most.max(200));
        let mut again = self.recheck(now);
        let mut slowest: Option<(Millis, Taken)> = None;
        for lease in self.leases.values() {
            let Assignment::Train { shard, .. } = lease.assignment else { continue };
            let repeated = holders.get(&lease.cursor).is_some_and(|&count| count > 1);
            let unreadable = only.is_some_and(|only| !only.contains(&shard));
            if repeated || unreadable {
                continue;
            }
            let overdue = lease.last_progress + patience;
            if overdue > now {
                again = again.min(overdue);
                continue;
            }
            let Some(place) = self.ledger.order().place_of(lease.cursor) else { continue };
            if slowest.as_ref().is_none_or(|(known, _)| overdue < *known) {
                // One contribution is enough: it voids the slow lease, and the rest is free again.
                let end = lease.end.min(lease.cursor.saturating_add(self.plan.chunk));
                let taken = Taken { range: lease.cursor..end, failures: lease.failures, place };
                slowest = Some((overdue, taken));
            }
        }
        slowest.map(|(_, taken)| taken).ok_or(again)
    }

    /// When a deadline may change the answer.
    fn recheck(&self, now: Millis) -> Millis {
        let evaluations = self.leases.values().filter(|lease| !lease.trains());
        let overdue = evaluations.map(|lease| self.evaluation_overdue(lease));
        let next = overdue.filter(|at| *at > now).chain(self.next_deadline()).min();
        next.unwrap_or(now + 1000).clamp(now + 1, now + 1000)
    }
}
