//! A hive and its workers without numbers: the parameters are a count per sample.
//!
//! Workers find their samples as real ones do, from what their lease says. The hive keeps one
//! buffer per place of the round and adds the buffers of a version to the parameters. So whether
//! every sample counted once is read from the parameters, never from the ledger. Beside it runs a
//! second, simpler notion of which leases are alive; every answer is compared with it.

use std::collections::{BTreeMap, BTreeSet};

use skep_core::position::{key, permute, sample};
use skep_core::{
    Accepted, Assignment, Contribution, Counts, EvaluationSplit, Grant, LeaseDecision, LeaseTimes,
    Limit, Millis, Notice, Plan, Policy, Refusal, Request, Run, RunSnapshot, Status, Step, Takes,
};

/// A sample: shard and index.
pub(crate) type Sample = (usize, u64);

/// Slot, first position and count.
pub(crate) type Slot = (u64, u64, u64);

/// What is at stake when a hive dies: the parameters, and which positions are in them.
#[derive(Clone, Default)]
pub(crate) struct Lineage {
    pub(crate) parameters: BTreeMap<Sample, u64>,
    applied: BTreeSet<(u64, u64)>,
    /// For each version: the epoch and its members.
    pub(crate) versions: Vec<(u64, Vec<Slot>)>,
}

/// What a worker knows of its lease.
#[derive(Clone)]
pub(crate) struct Held {
    pub(crate) grant: Grant,
    generation: u64,
    cursor: u64,
    sequence: u64,
}

/// Something on its way to the hive.
#[derive(Clone)]
pub(crate) struct Message {
    pub(crate) contribution: Contribution,
    samples: Vec<Sample>,
    epoch: u64,
    evaluates: bool,
    /// Whether it was made as the lease says.
    honest: bool,
}

/// What the world knows of a lease that is alive.
#[derive(Clone, Debug)]
struct Known {
    worker: String,
    trains: bool,
    cursor: u64,
    end: u64,
    base: u64,
    sequence: u64,
    silent_after: Millis,
    stuck_after: Millis,
}

pub(crate) struct World {
    pub(crate) run: Run,
    pub(crate) now: Millis,
    pub(crate) lineage: Lineage,
    pub(crate) held: BTreeMap<String, Held>,
    /// Everything that was ever sent, for those who send it again.
    pub(crate) sent: Vec<Message>,
    pub(crate) next_version_is_bad: bool,
    /// Events that count as a failure of a slice.
    pub(crate) failures: u64,
    /// Samples that no version can be made of.
    pub(crate) poison: BTreeSet<Sample>,
    /// With `average`: everything that was ever accepted, as if nothing were ever cleaned up.
    spool: Vec<Message>,
    /// How many came back after a crash.
    pub(crate) replayed: u64,
    saved: (RunSnapshot, Lineage),
    pending: BTreeMap<u64, Message>,
    known: BTreeMap<u128, Known>,
    ever: Vec<u128>,
    accepted: BTreeSet<(u128, u64)>,
    next_nonce: u128,
}

pub(crate) const TIMES: LeaseTimes =
    LeaseTimes { silence: 10_000, progress: 30_000, target: 2_000 };

pub(crate) fn plan(shards: &[u64], chunk: u64, policy: Policy, limit: Limit) -> Plan {
    Plan {
        seed: 5,
        shards: shards.to_vec(),
        validation: vec![],
        test: vec![],
        chunk,
        policy,
        limit,
        lease: TIMES,
        evaluate_every: None,
        attempts: 5,
        turns: true,
    }
}

fn loss(shard: usize, index: u64) -> u64 {
    1 + shard as u64 * 7 + index
}

impl World {
    pub(crate) fn new(plan: Plan) -> Self {
        let mut run = Run::new(plan, 1).expect("a valid plan");
        run.take_notices();
        Self {
            saved: (run.snapshot(), Lineage::default()),
            run,
            now: 1_000_000,
            lineage: Lineage::default(),
            held: BTreeMap::new(),
            sent: Vec::new(),
            next_version_is_bad: false,
            failures: 0,
            poison: BTreeSet::new(),
            spool: Vec::new(),
            replayed: 0,
            pending: BTreeMap::new(),
            known: BTreeMap::new(),
            ever: Vec::new(),
            accepted: BTreeSet::new(),
            next_nonce: 0,
        }
    }

    pub(crate) fn status(&self) -> &Status {
        self.run.status().0
    }

    fn trains(&self) -> bool {
        matches!(self.status(), Status::Running | Status::Paused)
    }

    /// What every event ends with: versions are made while they are due, notices are read, and
    /// everything that must always hold is checked.
    fn after_event(&mut self) {
        self.read_notices();
        while let Some(step) = self.run.step_due() {
            self.make_version(&step);
        }
        self.run.audit().expect("the run's books agree");
        for id in &self.ever {
            let alive = self.known.get(id).map(|known| known.worker.as_str());
            assert_eq!(self.run.holder(*id), alive, "lease {id} at {}", self.now);
        }
        if self.trains() {
            let applied = self.lineage.applied.iter();
            let applied = applied.filter(|(epoch, _)| *epoch == self.run.epoch()).count() as u64;
            let gaps = self.run.gaps().filter(|gap| gap.epoch == self.run.epoch());
            let skipped: u64 = gaps.map(|gap| gap.end - gap.start).sum();
            assert_eq!(self.run.epoch_settled(), applied + skipped);
            assert_eq!(self.run.samples(), self.lineage.applied.len() as u64);
        }
        assert_eq!(self.run.number(), self.lineage.versions.len() as u64);
    }

    fn lapse(&mut self) {
        let now = self.now;
        self.known.retain(|_, it| now <= it.silent_after && now <= it.stuck_after);
        // An evaluation that failed too often by that ends with all its leases.
        let mut run = self.run.clone();
        run.tick(now);
        self.known.retain(|&id, it| it.trains || run.holder(id).is_some());
    }

    fn read_notices(&mut self) {
        for notice in self.run.take_notices() {
            match notice {
                Notice::EpochEnded(epoch) => self.check_epoch(epoch),
                Notice::Measured(measured) => {
                    let shards = match measured.split {
                        EvaluationSplit::Validation => &self.run.plan().validation,
                        EvaluationSplit::Test => &self.run.plan().test,
                    };
                    let samples: u64 = shards.iter().sum();
                    let of_shard = |(shard, &n): (usize, &u64)| (0..n).map(move |i| loss(shard, i));
                    let sum: u64 = shards.iter().enumerate().flat_map(of_shard).sum();
                    assert_eq!(measured.samples, samples);
                    let expected = ((measured.number + 1) * sum) as f64 / samples as f64;
                    assert_eq!(measured.loss, expected, "every sample once, on one version");
                }
                Notice::MeasuringFailed { .. } => self.known.retain(|_, known| known.trains),
                Notice::Lapsed { .. } => self.failures += 1,
                Notice::Status(Status::Running | Status::Paused) => {}
                Notice::Status(_) => self.known.clear(),
                Notice::Skipped(gap) => {
                    assert!(gap.start < gap.end && !gap.reason.is_empty());
                    let attempts = u64::from(self.run.plan().attempts);
                    assert!(self.failures >= attempts, "{gap:?} after {} failures", self.failures);
                }
                Notice::MeasuringStarted { number, .. } => assert_eq!(number, self.run.number()),
            }
        }
    }

    /// Every sample is in the parameters once per epoch, but for the listings that name it.
    fn check_epoch(&self, epoch: u64) {
        let plan = self.run.plan();
        let mut skipped: BTreeMap<Sample, u64> = BTreeMap::new();
        for gap in self.run.gaps() {
            let order = plan.order(gap.epoch);
            for position in gap.start..gap.end {
                let place = order.place_of(position).expect("a gap lies in its epoch");
                let offset = place.offset + (position - place.start);
                let samples = plan.shards[place.shard];
                let index = sample(plan.seed, gap.epoch, place.shard as u64, samples, offset);
                *skipped.entry((place.shard, index)).or_default() += 1;
            }
        }
        for (shard, &samples) in plan.shards.iter().enumerate() {
            for index in 0..samples {
                let count = |map: &BTreeMap<_, u64>| map.get(&(shard, index)).copied().unwrap_or(0);
                assert_eq!(
                    count(&self.lineage.parameters) + count(&skipped),
                    epoch + 1,
                    "sample {index} of shard {shard} after epoch {epoch}"
                );
            }
        }
    }

    /// A run fails only where slices failed in a row, or an epoch brought nothing.
    pub(crate) fn check_failed(&self) {
        let reason = self.run.status().1;
        let nothing = self.lineage.applied.iter().all(|(epoch, _)| *epoch != self.run.epoch());
        assert!(reason.contains("in a row") || nothing, "{reason}");
        assert!(!reason.contains("in a row") || self.failures >= 20, "{reason}");
    }

    fn make_version(&mut self, step: &Step) {
        let epoch = self.run.epoch();
        assert_eq!(step.number, self.run.number() + 1);
        assert_eq!(step.samples, step.members.iter().map(|it| it.count).sum::<u64>());
        match self.run.plan().policy {
            Policy::Sync { slots, .. } => self.check_round(step, slots),
            Policy::Average { slots, quorum, .. } if slots == quorum => {
                self.check_round(step, slots);
            }
            Policy::Average { slots, quorum, .. } => self.check_quorum(step, slots, quorum),
            _ => assert!(step.missing.is_empty()),
        }
        if let Policy::Batch { size } = self.run.plan().policy {
            assert!(step.members.len() as u64 <= size);
        }
        let buffers = std::mem::take(&mut self.pending);
        assert_eq!(buffers.len(), step.members.len(), "each member has its own buffer");
        let poisoned =
            buffers.values().flat_map(|it| &it.samples).any(|it| self.poison.contains(it));
        if poisoned || std::mem::take(&mut self.next_version_is_bad) {
            self.failures += 1;
            self.run.stepped(Err("not finite".to_owned()));
            self.read_notices();
            return;
        }
        for member in &step.members {
            let message = buffers.get(&member.slot).expect("a member's slot is its buffer's");
            assert_eq!(message.epoch, epoch, "a round never spans epochs");
            assert_eq!(
                (message.contribution.first, message.contribution.count),
                (member.first, member.count)
            );
            for position in member.first..member.first + member.count {
                assert!(self.lineage.applied.insert((epoch, position)), "{position} twice");
            }
            for sample in &message.samples {
                *self.lineage.parameters.entry(*sample).or_default() += 1;
            }
        }
        let members = step.members.iter().map(|it| (it.slot, it.first, it.count)).collect();
        self.lineage.versions.push((epoch, members));
        self.run.stepped(Ok(()));
        self.read_notices();
    }

    /// A round of `sync` has exactly the slots that (seed, epoch, round) say.
    fn check_round(&self, step: &Step, size: u64) {
        let rounds = rounds(self.run.plan(), self.run.epoch(), size);
        let first = step.members[0].first;
        let round = rounds.iter().find(|it| it.iter().any(|slot| slot.1 == first));
        let mut expected = round.expect("a member starts where a slot does").clone();
        let skipped: BTreeSet<_> = self
            .run
            .gaps()
            .filter(|gap| gap.epoch == self.run.epoch())
            .flat_map(|gap| gap.start..gap.end)
            .collect();
        let given_up: Vec<_> =
            expected.iter().filter(|it| skipped.contains(&it.1)).map(|it| it.0).collect();
        assert_eq!(step.missing, given_up);
        expected.retain(|slot| !step.missing.contains(&slot.0));
        let members: Vec<_> = step.members.iter().map(|it| (it.slot, it.first, it.count)).collect();
        assert_eq!(members, expected);
        assert!(step.members.iter().all(|it| it.staleness == 0));
    }

    /// Where a round may miss some: it misses no more than that, and none at the epoch's end.
    fn check_quorum(&self, step: &Step, size: u64, quorum: u64) {
        let epoch = self.run.epoch();
        let rounds = rounds(self.run.plan(), epoch, size);
        let made = self.lineage.versions.iter().filter(|(of, _)| *of == epoch).count();
        let gaps: Vec<_> = self.run.gaps().filter(|gap| gap.epoch == epoch).collect();
        let skipped = |first| gaps.iter().any(|gap| (gap.start..gap.end).contains(&first));
        let in_step = |first| step.members.iter().any(|it| it.first == first);
        for member in &step.members {
            let slots = rounds.iter().flatten();
            assert_eq!(slots.filter(|it| it.1 == member.first && it.2 == member.count).count(), 1);
        }
        // Rounds that were skipped whole made no version.
        if !gaps.is_empty() {
            return;
        }
        let due = rounds.iter().take(made + 1).flatten().map(|it| it.1);
        let missing = due
            .filter(|&first| !self.lineage.applied.contains(&(epoch, first)))
            .filter(|&first| !skipped(first) && !in_step(first))
            .count() as u64;
        assert!(missing <= size - quorum, "{missing} of {size} are missing");
        assert!(missing == 0 || made + 1 < rounds.len(), "nothing is left for the next epoch");
        let begun = rounds[made].last().map_or(0, |it| it.1 + it.2);
        assert!(step.members.iter().all(|it| it.first < begun), "a slot of a round to come");
    }

    pub(crate) fn ask(&mut self, request: &Request) -> LeaseDecision {
        self.lapse();
        self.known.retain(|_, known| known.worker != request.worker);
        self.held.remove(&request.worker);
        self.next_nonce += 1;
        // Ids are random: their order says nothing.
        let nonce = self.next_nonce.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        let decision = self.run.lease(self.now, nonce, request);
        self.read_notices();
        if let LeaseDecision::Granted(grant) = &decision {
            self.check_grant(grant, nonce, request);
            let trains = matches!(grant.assignment, Assignment::Train { .. });
            let progress = match self.run.plan().policy {
                Policy::Sync { deadline, .. }
                | Policy::Average { deadline: Some(deadline), .. }
                    if trains =>
                {
                    deadline
                }
                _ => self.run.plan().lease.progress,
            };
            self.ever.push(nonce);
            self.known.insert(
                nonce,
                Known {
                    worker: request.worker.clone(),
                    trains,
                    cursor: grant.range.start,
                    end: grant.range.end,
                    base: grant.base,
                    sequence: 0,
                    silent_after: self.now + self.run.plan().lease.silence,
                    stuck_after: self.now + progress,
                },
            );
            self.held.insert(
                request.worker.clone(),
                Held {
                    grant: grant.clone(),
                    generation: self.run.generation(),
                    cursor: grant.range.start,
                    sequence: 0,
                },
            );
        }
        self.after_event();
        decision
    }

    fn check_grant(&self, grant: &Grant, nonce: u128, request: &Request) {
        assert_eq!(grant.id, nonce);
        assert!(!grant.range.is_empty());
        let other = match grant.assignment {
            Assignment::Train { .. } => Takes::Evaluations,
            Assignment::Evaluate { .. } => Takes::Training,
        };
        assert_ne!(request.takes, other, "not what the worker takes");
        let (epoch, shard, offset) = match grant.assignment {
            Assignment::Train { epoch, shard, offset } => (epoch, shard, offset),
            Assignment::Evaluate { split, shard, .. } => {
                let readable = request.only.as_ref().map(|only| match split {
                    EvaluationSplit::Validation => &only.validation,
                    EvaluationSplit::Test => &only.test,
                });
                assert!(readable.is_none_or(|readable| readable.contains(&shard)));
                let others = self.known.values().filter(|it| !it.trains);
                let holders = others.filter(|it| it.cursor == grant.range.start);
                assert!(holders.count() <= 1, "at most two count the same slice");
                return;
            }
        };
        let plan = self.run.plan();
        assert_eq!((epoch, grant.base), (self.run.epoch(), self.run.number()));
        assert!(request.only.as_ref().is_none_or(|only| only.train.contains(&shard)));
        let place = plan.order(epoch).place_of(grant.range.start).expect("a place");
        assert_eq!(place.shard, shard);
        assert_eq!(grant.range.start - place.start, offset - place.offset);
        assert!(grant.range.end <= place.end, "a slice lies in one shard");
        for position in grant.range.clone() {
            assert!(!self.lineage.applied.contains(&(epoch, position)));
            assert!(!self.is_pending(position));
        }
        let others = self.known.values().filter(|it| it.trains);
        let holders = others.filter(|it| it.cursor < grant.range.end && grant.range.start < it.end);
        assert!(holders.count() <= 1, "at most two work on the same positions");
    }

    fn is_pending(&self, position: u64) -> bool {
        self.pending.values().any(|message| {
            let Contribution { first, count, .. } = message.contribution;
            (first..first + count).contains(&position)
        })
    }

    /// What a worker would send next, at most `most` positions.
    pub(crate) fn compute(&self, worker: &str, most: u64) -> Option<Message> {
        let held = self.held.get(worker)?;
        let plan = self.run.plan();
        let Grant { assignment, range, chunk, id, base, .. } = &held.grant;
        let whole = (*chunk).min(range.end.checked_sub(held.cursor)?);
        let count = whole.min(most);
        if count == 0 {
            return None;
        }
        let from = held.cursor - range.start;
        let (samples, epoch) = match *assignment {
            Assignment::Train { epoch, shard, offset } => {
                let total = plan.shards[shard];
                let index = |at| sample(plan.seed, epoch, shard as u64, total, offset + from + at);
                ((0..count).map(|at| (shard, index(at))).collect(), epoch)
            }
            Assignment::Evaluate { shard, offset, .. } => {
                ((0..count).map(|at| (shard, offset + from + at)).collect(), 0)
            }
        };
        let contribution = Contribution {
            lease: *id,
            sequence: held.sequence,
            first: held.cursor,
            count,
            generation: held.generation,
            base: *base,
        };
        let evaluates = matches!(assignment, Assignment::Evaluate { .. });
        Some(Message { contribution, samples, epoch, evaluates, honest: count == whole })
    }

    /// The worker believes that the message will arrive.
    pub(crate) fn move_on(&mut self, worker: &str, message: &Message) {
        if let Some(held) = self.held.get_mut(worker) {
            held.cursor += message.contribution.count;
            held.sequence += 1;
        }
    }

    pub(crate) fn push(&mut self, worker: &str, most: u64) -> Option<Result<Accepted, Refusal>> {
        let message = self.compute(worker, most)?;
        let answer = self.deliver(&message);
        match &answer {
            Ok(_) => self.move_on(worker, &message),
            Err(_) => {
                self.held.remove(worker);
            }
        }
        Some(answer)
    }

    /// Sends something that is wrong in one way.
    pub(crate) fn push_wrong(&mut self, worker: &str, way: u8) {
        let Some(mut message) = self.compute(worker, u64::MAX) else { return };
        let it = &mut message.contribution;
        message.honest = false;
        match way % 7 {
            0 => it.sequence += 1,
            1 => it.first += 1,
            2 => it.count += 1,
            3 => it.count = 0,
            4 => it.generation += 1,
            5 => it.base = self.run.number() + 1,
            _ => it.base = it.base.saturating_sub(1),
        }
        self.deliver(&message).ok();
    }

    /// What the hive should answer, by the world's own notion of what is alive; `run` is the run
    /// in which what is late has lapsed.
    fn expected(&self, message: &Message, run: &Run) -> &'static str {
        let it = &message.contribution;
        if it.generation != self.run.generation() {
            return "other generation";
        }
        if self.accepted.contains(&(it.lease, it.sequence)) {
            return "repeat";
        }
        let trains = matches!(run.status().0, Status::Running | Status::Paused);
        if !trains && !message.evaluates {
            return "not running";
        }
        let alive = self.known.get(&it.lease).filter(|known| known.trains != message.evaluates);
        let Some(known) = alive else { return "gone" };
        let plan = self.run.plan();
        let most = match message.evaluates {
            true => known.end - known.cursor,
            false => plan.chunk.min(known.end - known.cursor),
        };
        let (whole, staleness) = match plan.policy {
            Policy::Batch { .. } => (false, None),
            Policy::Async { max_staleness, .. } => (max_staleness.is_some(), max_staleness),
            Policy::Sync { .. } => (true, Some(0)),
            Policy::Average { slots, quorum, .. } => (true, (slots == quorum).then_some(0)),
        };
        let whole = whole || message.evaluates;
        if (it.sequence, it.first) != (known.sequence, known.cursor)
            || it.count == 0
            || it.count > most
            || (whole && it.count != most)
            || it.base > self.run.number()
            || (message.evaluates && it.base != known.base)
        {
            return "wrong range";
        }
        if staleness.is_some_and(|it_may| self.run.number() - it.base > it_may)
            && !message.evaluates
        {
            return "too stale";
        }
        "new"
    }

    pub(crate) fn deliver(&mut self, message: &Message) -> Result<Accepted, Refusal> {
        self.lapse();
        self.sent.push(message.clone());
        let contribution = message.contribution;
        let mut undisturbed = self.run.clone();
        undisturbed.tick(self.now);
        let expected = self.expected(message, &undisturbed);
        let answer = if message.evaluates {
            let losses = message.samples.iter().map(|&(shard, index)| loss(shard, index));
            let loss_sum = (losses.sum::<u64>() * (contribution.base + 1)) as f64;
            let counts = Counts { loss_sum, correct: None };
            self.run.count(self.now, contribution, counts)
        } else {
            self.run.contribute(self.now, contribution)
        };
        let got = match &answer {
            Ok(Accepted::New { .. }) => "new",
            Ok(Accepted::Repeat) => "repeat",
            Err(Refusal::OtherGeneration) => "other generation",
            Err(Refusal::NotRunning(_)) => "not running",
            Err(Refusal::Gone(_)) => "gone",
            Err(Refusal::WrongRange(_)) => "wrong range",
            Err(Refusal::TooStale { .. }) => "too stale",
        };
        assert_eq!(got, expected, "{answer:?} to {contribution:?}");
        if got == "repeat" {
            assert!(self.run.outcome(contribution.lease, contribution.sequence).is_some());
        }
        match &answer {
            Ok(Accepted::New { slot, staleness, .. }) => {
                self.accept(message, *slot, *staleness);
            }
            Err(Refusal::TooStale { .. }) => {
                assert!(!message.honest, "work was given out that became too stale");
                self.known.remove(&contribution.lease);
            }
            _ => {
                self.run.tick(self.now);
                assert_eq!(format!("{:?}", self.run), format!("{undisturbed:?}"), "{got}");
            }
        }
        self.after_event();
        answer
    }

    fn accept(&mut self, message: &Message, slot: u64, staleness: u64) {
        let it = message.contribution;
        assert!(self.accepted.insert((it.lease, it.sequence)));
        let progress = match self.run.plan().policy {
            Policy::Sync { deadline, .. } | Policy::Average { deadline: Some(deadline), .. } => {
                deadline
            }
            _ => self.run.plan().lease.progress,
        };
        let (now, silence) = (self.now, self.run.plan().lease.silence);
        let known = self.known.get_mut(&it.lease).expect("only a lease that is alive counts");
        known.cursor += it.count;
        known.sequence += 1;
        known.silent_after = now + silence;
        known.stuck_after = now + progress;
        if known.cursor == known.end {
            self.known.remove(&it.lease);
        }
        if message.evaluates {
            self.known.retain(|_, other| other.trains || other.cursor != it.first);
            return;
        }
        assert_eq!(message.epoch, self.run.epoch());
        assert_eq!(staleness, self.run.number() - it.base);
        let range = it.first..it.first + it.count;
        for position in range.clone() {
            assert!(!self.lineage.applied.contains(&(message.epoch, position)));
            assert!(!self.is_pending(position));
        }
        self.known.retain(|&id, other| {
            !other.trains || id == it.lease || other.end <= range.start || other.cursor >= range.end
        });
        assert!(self.pending.insert(slot, message.clone()).is_none(), "slot {slot} is taken");
        if matches!(self.run.plan().policy, Policy::Average { .. }) {
            self.spool.push(message.clone());
        }
    }

    pub(crate) fn give_back(&mut self, worker: &str, failure: Option<&str>) {
        let Some(held) = self.held.remove(worker) else { return };
        self.lapse();
        let alive = self.known.remove(&held.grant.id).is_some();
        let answer = self.run.give_back(self.now, held.grant.id, failure);
        assert_eq!(answer.is_ok(), alive);
        self.after_event();
    }

    pub(crate) fn renew(&mut self, lease: u128) {
        self.lapse();
        let answer = self.run.renew(self.now, lease);
        let until = self.now + self.run.plan().lease.silence;
        match self.known.get_mut(&lease) {
            Some(known) => {
                assert!(answer.is_ok());
                known.silent_after = until;
            }
            None => assert!(matches!(answer, Err(Refusal::Gone(_))), "a lapsed lease was revived"),
        }
        self.after_event();
    }

    pub(crate) fn pause(&mut self) {
        self.run.pause().ok();
        self.after_event_without_time();
    }

    pub(crate) fn resume(&mut self) {
        self.run.resume().ok();
        self.after_event_without_time();
    }

    fn after_event_without_time(&mut self) {
        self.read_notices();
        self.run.audit().expect("the run's books agree");
    }

    pub(crate) fn save(&mut self) {
        self.saved = (self.run.snapshot(), self.lineage.clone());
    }

    /// The hive dies and starts again from the last checkpoint.
    pub(crate) fn crash(&mut self) {
        let text = serde_json::to_string(&self.saved.0).expect("a snapshot is plain data");
        let snapshot: RunSnapshot = serde_json::from_str(&text).expect("what was written");
        let generation = self.run.generation() + 1;
        self.run =
            Run::restore(self.run.plan().clone(), generation, &snapshot).expect("its own snapshot");
        assert_eq!(self.run.snapshot().ledger, snapshot.ledger);
        self.lineage = self.saved.1.clone();
        self.pending.clear();
        self.known.clear();
        self.accepted.clear();
        self.replay();
        self.after_event();
    }

    /// What was spooled comes back, as far as it fits.
    fn replay(&mut self) {
        let mut spool = self.spool.clone();
        spool.sort_by_key(|it| (it.contribution.base, it.contribution.first));
        for message in spool {
            let it = message.contribution;
            if message.epoch != self.run.epoch() {
                continue;
            }
            if let Some(answer) = self.run.replay(it.first, it.count, it.base) {
                let Accepted::New { slot, .. } = answer else { panic!("{answer:?}") };
                assert!(self.pending.insert(slot, message).is_none(), "slot {slot} is taken");
                self.replayed += 1;
            }
            while let Some(step) = self.run.step_due() {
                self.make_version(&step);
            }
            self.run.audit().expect("the run's books agree");
        }
    }

    /// Reliable workers bring the run home: each asks, then each pushes all it has. Of several, one
    /// only trains and one only evaluates. Ends when the run does or `until` says so.
    pub(crate) fn finish(&mut self, workers: usize, until: impl Fn(&Run) -> bool) {
        self.resume();
        let names: Vec<_> = (0..workers).map(|it| format!("reliable-{it}")).collect();
        let samples: u64 = self.run.plan().shards.iter().sum();
        // Every round of this loop brings home a contribution, or time goes by until a lease lapses.
        let bound = 1000 + 40 * samples;
        for turn in 0..bound {
            if until(&self.run) || !(self.trains() || *self.status() == Status::Measuring) {
                return;
            }
            let mut again = Millis::MAX;
            for (at, name) in names.iter().enumerate() {
                let takes = match at {
                    0 if workers > 1 => Takes::Training,
                    1 => Takes::Evaluations,
                    _ => Takes::Anything,
                };
                match self.ask(&Request { worker: name.clone(), takes, ..Request::default() }) {
                    LeaseDecision::Granted(_) => again = 0,
                    LeaseDecision::Wait { until, .. } => {
                        assert!(until > self.now, "waiting for the past");
                        again = again.min(until);
                    }
                    LeaseDecision::Done | LeaseDecision::Stopped => {}
                }
            }
            self.now = self.now.max(again.min(self.now + 10_000)) + 1;
            for at in 0..names.len() {
                let name = &names[(at + turn as usize) % names.len()];
                while self.held.contains_key(name) {
                    if self.push(name, u64::MAX).is_none() {
                        self.held.remove(name);
                    }
                }
            }
        }
        panic!("not done after {bound} turns: {:?}", self.run);
    }
}

/// The slots of every round of an epoch, written down once more: one shard after the other, or, where
/// they take turns, as many at a time as a round has slots.
pub(crate) fn rounds(plan: &Plan, epoch: u64, size: u64) -> Vec<Vec<Slot>> {
    let count = plan.shards.len() as u64;
    let shard_at = |at| permute(at, count, key(plan.seed, epoch, 0)) as usize;
    let mut left: Vec<_> = (0..count).map(|at| plan.shards[shard_at(at)]).collect();
    let mut slots = Vec::new();
    let mut first = 0;
    for group in left.chunks_mut(if plan.turns { size.min(count) } else { 1 } as usize) {
        while group.iter().any(|&left| left > 0) {
            for left in group.iter_mut().filter(|left| **left > 0) {
                let count = plan.chunk.min(*left);
                slots.push((first, count));
                (first, *left) = (first + count, *left - count);
            }
        }
    }
    let number = |round: &[(u64, u64)]| {
        (0..).zip(round).map(|(slot, &(first, count))| (slot, first, count)).collect()
    };
    slots.chunks(size as usize).map(number).collect()
}
