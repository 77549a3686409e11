//! The keeper of a run: one thread that owns its control state and its numbers, and takes one
//! command at a time. Numbers are done here, off the async executor, so heartbeats of other runs
//! and pulls of this one never wait for them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use skep_core::{
    Accepted, Assignment, Contribution, Counts, EvaluationSplit, LeaseDecision, Limit, Measured,
    Millis, Notice, Policy, Readable, Request, Run, RunSnapshot, Status, Takes,
};
use skep_wire::{
    ContributionKind, Envelope, ErrorCode, Evaluated, EvaluationCounts, Event, Frame, LeaseAnswer,
    LeaseId, LeaseKind, LeaseRequest, LeaseView, Outcome, Receipt, RunAction, RunState, RunView,
    Skipped, Split, Version, WorkerView,
};
use tokio::sync::{mpsc, oneshot};

use crate::ApiError;
use crate::budget::Spent;
use crate::checkpointer::{Material, Write};
use crate::events::Events;
use crate::history::{Made, Recorder};
use crate::metrics::Counters;
use crate::model::Model;
use crate::published::Published;
use crate::spool::{SpoolEntry, file_name, version_hash};

type Reply<T> = oneshot::Sender<Result<T, ApiError>>;

/// What a keeper can be asked.
pub(crate) enum Command {
    Lease {
        request: LeaseRequest,
        reply: Reply<LeaseAnswer>,
    },
    Contribute {
        envelope: Envelope,
        frame: Frame,
        spent: Spent,
        reply: Reply<Receipt>,
    },
    Evaluate {
        envelope: Envelope,
        counts: EvaluationCounts,
        reply: Reply<Receipt>,
    },
    Renew {
        lease: LeaseId,
        reply: Reply<f64>,
    },
    GiveBack {
        lease: LeaseId,
        failure: Option<String>,
        reply: Reply<()>,
    },
    Change {
        action: RunAction,
        reply: Reply<()>,
    },
    View {
        reply: oneshot::Sender<RunView>,
    },
    /// A checkpoint is durable, and with it what the run was doing, if that is given.
    Written {
        version: Version,
        status: Option<Status>,
    },
    FinalWritten,
    /// An accepted model is in the store, or could not be written there.
    Spooled {
        lease: LeaseId,
        sequence: u64,
        trouble: Option<String>,
    },
    Trouble(String),
    /// Write a last checkpoint and end.
    Close {
        reply: oneshot::Sender<()>,
    },
    /// End without a checkpoint, and tell when nothing is being written any more: the run is
    /// being deleted.
    Drop {
        reply: oneshot::Sender<()>,
    },
}

/// What a checkpoint keeps beside the numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct KeptState {
    pub(crate) run: RunSnapshot,
    #[serde(default)]
    pub(crate) seconds: f64,
    #[serde(default)]
    pub(crate) loss: Option<f64>,
    #[serde(default)]
    pub(crate) validation: Option<Evaluated>,
    #[serde(default)]
    pub(crate) best: Option<Evaluated>,
    #[serde(default)]
    pub(crate) test: Option<Evaluated>,
}

/// A request for a lease that waits for work.
struct Waiter {
    request: Request,
    deadline: Millis,
    reply: Reply<LeaseAnswer>,
}

/// An accepted contribution whose answer waits for the round to close.
struct Held {
    since: Millis,
    envelope: Envelope,
    reply: Reply<Receipt>,
}

/// What is known of a worker.
struct WorkerRecord {
    engine: String,
    seen: Millis,
    contributions: u64,
    samples: u64,
    staleness: f64,
    waiting: f64,
    recent: Recent,
}

impl WorkerRecord {
    /// Notes that the worker is there, and that it was since it was heard of, unless that is long
    /// ago: then it was away.
    fn heard(&mut self, now: Millis, recorder: &Recorder) {
        let since = now.saturating_sub(self.seen);
        recorder.worked(if since < 60_000 { since } else { 0 });
        self.seen = now;
    }
}

/// Samples over the last seconds.
#[derive(Default)]
struct Recent {
    counts: VecDeque<(Millis, u64)>,
}

/// How far back a rate looks.
const RECENT: Millis = 5_000;

/// How often waiting requests are looked at again even if nothing happened: someone may have
/// become overdue.
const RETRY_WAITERS: Millis = 50;

impl Recent {
    fn add(&mut self, now: Millis, count: u64) {
        self.counts.push_back((now, count));
        while self.counts.front().is_some_and(|(at, _)| now.saturating_sub(*at) > RECENT) {
            self.counts.pop_front();
        }
    }

    fn per_second(&self, now: Millis) -> f64 {
        let young = |(at, _): &&(Millis, u64)| now.saturating_sub(*at) <= RECENT;
        let Some((first, _)) = self.counts.iter().find(|entry| young(entry)) else { return 0.0 };
        let count: u64 = self.counts.iter().filter(young).map(|(_, count)| count).sum();
        let span = now.saturating_sub(*first).max(200);
        count as f64 * 1000.0 / span as f64
    }
}

/// The keeper itself.
pub(crate) struct Keeper {
    pub(crate) name: String,
    pub(crate) run: Run,
    pub(crate) model: Model,
    pub(crate) spec: skep_wire::RunSpec,
    pub(crate) published: Arc<Published>,
    pub(crate) events: Arc<Events>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) writes: mpsc::UnboundedSender<Write>,
    pub(crate) kept: KeptState,
    pub(crate) durable: Version,
    pub(crate) model_path: String,
    pub(crate) final_written: bool,
    started: Instant,
    shard_index: HashMap<String, Vec<(Split, usize)>>,
    waiters: Vec<Waiter>,
    held: Vec<Held>,
    /// Accepted models whose answer waits for the store.
    spooling: Vec<Held>,
    /// What was spooled before the hive started.
    spool: Vec<(SpoolEntry, Frame)>,
    /// Files of models that are in a version, by its number, until a checkpoint has it.
    spooled: Vec<(u64, String)>,
    /// The hash of a version, by its number.
    hash: Option<(u64, String)>,
    workers: BTreeMap<String, WorkerRecord>,
    recent: Recent,
    /// Loss and weight of the contributions of the round under way.
    round_loss: (f64, f64),
    /// What was captured when the version under measurement was made.
    measured_material: Option<Material>,
    /// What a crash would leave: this version, doing this.
    saved: Option<(Version, Status)>,
    trouble: Option<String>,
    writing: bool,
    last_write: Millis,
    last_now: Millis,
    last_step_line: Millis,
    last_retry: Millis,
    /// Something happened that may give a waiter work.
    stirred: bool,
}

/// Everything a keeper starts with.
pub(crate) struct KeeperParts {
    pub(crate) run: Run,
    pub(crate) model: Model,
    pub(crate) spec: skep_wire::RunSpec,
    pub(crate) published: Arc<Published>,
    pub(crate) events: Arc<Events>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) writes: mpsc::UnboundedSender<Write>,
    pub(crate) kept: KeptState,
    pub(crate) durable: Version,
    pub(crate) model_path: String,
    pub(crate) final_written: bool,
    pub(crate) spool: Vec<(SpoolEntry, Frame)>,
}

impl Keeper {
    pub(crate) fn new(parts: KeeperParts) -> Self {
        // Shards of the same bytes have the same hash: each of them is meant.
        let mut shard_index: HashMap<String, Vec<(Split, usize)>> = HashMap::new();
        for split in [Split::Train, Split::Validation, Split::Test] {
            for (at, shard) in parts.spec.manifest.split(split).iter().enumerate() {
                shard_index.entry(shard.id().to_owned()).or_default().push((split, at));
            }
        }
        Self {
            name: parts.spec.name.clone(),
            run: parts.run,
            model: parts.model,
            spec: parts.spec,
            published: parts.published,
            events: parts.events,
            counters: parts.counters,
            recorder: parts.recorder,
            writes: parts.writes,
            kept: parts.kept,
            durable: parts.durable,
            model_path: parts.model_path,
            final_written: parts.final_written,
            started: Instant::now(),
            shard_index,
            waiters: Vec::new(),
            held: Vec::new(),
            spooling: Vec::new(),
            spool: parts.spool,
            spooled: Vec::new(),
            hash: None,
            workers: BTreeMap::new(),
            recent: Recent::default(),
            round_loss: (0.0, 0.0),
            measured_material: None,
            saved: None,
            trouble: None,
            writing: false,
            last_write: 0,
            last_now: 0,
            last_step_line: 0,
            last_retry: 0,
            stirred: false,
        }
    }

    /// Takes commands until it is closed.
    pub(crate) fn keep(mut self, commands: Receiver<Command>) {
        self.replay();
        self.note_progress();
        loop {
            let wait = self.patience();
            match commands.recv_timeout(wait) {
                Err(RecvTimeoutError::Disconnected) => return,
                Ok(Command::Drop { reply }) => {
                    let _ = self.writes.send(Write::Flush(reply));
                    return;
                }
                Ok(Command::Close { reply }) => {
                    self.close(reply);
                    return;
                }
                Ok(command) => {
                    let now = self.now();
                    self.handle(now, command);
                }
                Err(RecvTimeoutError::Timeout) => {
                    let now = self.now();
                    self.run.tick(now);
                }
            }
            self.note_progress();
        }
    }

    fn now(&self) -> Millis {
        self.started.elapsed().as_millis() as Millis
    }

    fn version(&self) -> Version {
        Version::new(self.run.generation(), self.run.number())
    }

    fn patience(&self) -> Duration {
        let now = self.now();
        let deadlines = self.waiters.iter().map(|waiter| waiter.deadline);
        let next = self.run.next_deadline().into_iter().chain(deadlines).min();
        let wait = next.map_or(250, |at| at.saturating_sub(now)).clamp(1, 250);
        // Waiters may be given a backup lease once someone is overdue, which no event announces.
        let quiet = self.waiters.is_empty() && self.held.is_empty();
        let wait = if quiet { wait } else { wait.min(RETRY_WAITERS) };
        Duration::from_millis(wait)
    }

    fn handle(&mut self, now: Millis, command: Command) {
        match command {
            Command::Lease { request, reply } => {
                self.saw(now, &request.worker, &request);
                let deadline = now + (request.wait.clamp(0.0, 60.0) * 1000.0) as Millis;
                let waiter = Waiter { request: self.core_request(request), deadline, reply };
                if let Some(waiter) = self.try_lease(now, waiter) {
                    self.waiters.push(waiter);
                }
            }
            Command::Contribute { envelope, frame, spent, reply } => {
                self.contribute(now, &envelope, frame, spent, reply);
            }
            Command::Evaluate { envelope, counts, reply } => {
                let _ = reply.send(self.evaluate(now, &envelope, counts));
            }
            Command::Renew { lease, reply } => {
                let answer = self.run.renew(now, lease.0).map_err(ApiError::from);
                if let Some(worker) = self.run.holder(lease.0)
                    && let Some(record) = self.workers.get_mut(worker)
                {
                    record.heard(now, &self.recorder);
                }
                let _ = reply.send(answer.map(|millis| millis as f64 / 1000.0));
            }
            Command::GiveBack { lease, failure, reply } => {
                let answer = self.run.give_back(now, lease.0, failure.as_deref());
                self.stirred = true;
                let _ = reply.send(answer.map_err(ApiError::from));
            }
            Command::Change { action, reply } => {
                let answer = match action {
                    RunAction::Pause => self.run.pause(),
                    RunAction::Resume => self.run.resume(),
                    RunAction::Finish => {
                        self.run.complete("finished by request");
                        Ok(())
                    }
                    RunAction::Stop => self.run.stop("stopped by request"),
                };
                self.stirred = true;
                let _ = reply.send(answer.map_err(ApiError::from));
            }
            Command::View { reply } => {
                let _ = reply.send(self.view(now));
            }
            Command::Written { version, status } => {
                self.durable = self.durable.max(version);
                self.unspool_durable();
                if let Some(status) = status {
                    self.saved = Some((version, status));
                }
                self.stirred = true;
                self.trouble = None;
                self.writing = false;
                Counters::add(&self.counters.checkpoints, 1);
                self.events.send(Event::Checkpoint { version });
            }
            Command::Spooled { lease, sequence, trouble } => {
                self.answer_spooled(now, lease, sequence, trouble);
            }
            Command::FinalWritten => {
                self.final_written = true;
                self.stirred = true;
                self.writing = false;
            }
            Command::Trouble(message) => {
                Counters::add(&self.counters.checkpoint_failures, 1);
                self.trouble = Some(message);
                self.writing = false;
                self.last_write = now;
            }
            Command::Close { .. } | Command::Drop { .. } => {}
        }
    }

    fn saw(&mut self, now: Millis, worker: &str, request: &LeaseRequest) {
        let engine: String = request.engine.chars().take(200).collect();
        if !self.workers.contains_key(worker) {
            self.events.send(Event::Joined { worker: worker.to_owned() });
            tracing::info!(run = self.name, worker, engine, "joined");
            if self.workers.len() >= 10_000 {
                self.workers.retain(|_, record| now.saturating_sub(record.seen) < 60_000);
            }
        }
        let record = self.workers.entry(worker.to_owned()).or_insert_with(|| WorkerRecord {
            engine,
            seen: now,
            contributions: 0,
            samples: 0,
            staleness: 0.0,
            waiting: 0.0,
            recent: Recent::default(),
        });
        record.heard(now, &self.recorder);
        record.waiting = request.waiting.clamp(0.0, 1.0);
    }

    /// Answers a request for work; gives it back if it is to wait.
    fn try_lease(&mut self, now: Millis, waiter: Waiter) -> Option<Waiter> {
        if waiter.reply.is_closed() {
            return None;
        }
        let nonce = random_nonce();
        let answer = match self.decide_lease(now, nonce, &waiter.request) {
            LeaseDecision::Granted(grant) => {
                let lease = LeaseAnswer::Lease(self.lease_view(&grant));
                if waiter.reply.send(Ok(lease)).is_err() {
                    // Nobody is there to work on it any more.
                    let _ = self.run.give_back(now, nonce, None);
                }
                return None;
            }
            LeaseDecision::Wait { until, reason } => {
                if now < waiter.deadline {
                    return Some(waiter);
                }
                let seconds = until.saturating_sub(now).clamp(10, 1000) as f64 / 1000.0;
                LeaseAnswer::Wait { seconds, reason: reason.to_owned() }
            }
            LeaseDecision::Done => LeaseAnswer::Done { reason: self.run.status().1.to_owned() },
            LeaseDecision::Stopped => {
                LeaseAnswer::Stopped { reason: self.run.status().1.to_owned() }
            }
        };
        let _ = waiter.reply.send(Ok(answer));
        None
    }

    /// A worker that is told of the end leaves for good. So nobody is told before the end would
    /// survive a crash: a run that came back running would wait for workers that are gone.
    fn decide_lease(&mut self, now: Millis, nonce: u128, request: &Request) -> LeaseDecision {
        let decision = self.run.lease(now, nonce, request);
        let ended = matches!(decision, LeaseDecision::Done | LeaseDecision::Stopped);
        if ended && !(self.is_saved() && self.final_written) {
            let reason = "the end of the run is being written";
            return LeaseDecision::Wait { until: now + 100, reason };
        }
        decision
    }

    /// Whether a crash would lose nothing.
    fn is_saved(&self) -> bool {
        let saved = self.saved.as_ref();
        saved.is_some_and(|(version, status)| {
            *version == self.version() && status == self.run.status().0
        })
    }

    /// What waits is small: of the shards that a request names only those of the run are kept.
    fn core_request(&self, request: LeaseRequest) -> Request {
        let places = |ids: &[String], wanted: Split| -> Vec<usize> {
            let known = ids.iter().filter_map(|id| self.shard_index.get(id)).flatten();
            known.filter(|(split, _)| *split == wanted).map(|(_, at)| *at).collect()
        };
        let readable = |ids: &[String]| Readable {
            train: places(ids, Split::Train),
            validation: places(ids, Split::Validation),
            test: places(ids, Split::Test),
        };
        Request {
            worker: request.worker,
            time_left: request.seconds_left.map(|seconds| (seconds.max(0.0) * 1000.0) as Millis),
            has: places(&request.has, Split::Train),
            only: request.only.as_deref().map(readable),
            takes: takes(&request.kinds),
        }
    }

    fn lease_view(&self, grant: &skep_core::Grant) -> LeaseView {
        let (kind, split, epoch, shard, offset) = match grant.assignment {
            Assignment::Train { epoch, shard, offset } => {
                (LeaseKind::Train, Split::Train, epoch, shard, offset)
            }
            Assignment::Evaluate { split, shard, offset } => {
                (LeaseKind::Evaluate, wire_split(split), 0, shard, offset)
            }
        };
        LeaseView {
            id: LeaseId(grant.id),
            kind,
            base: Version::new(self.run.generation(), grant.base),
            split,
            epoch,
            shard: shard as u64,
            first: grant.range.start,
            count: grant.range.end - grant.range.start,
            offset,
            chunk: grant.chunk,
            renew_seconds: grant.renew as f64 / 1000.0,
        }
    }

    /// Takes a contribution. It is answered as soon as it counts; only one that completes a version
    /// waits for that version, because its answer may carry it.
    fn contribute(
        &mut self,
        now: Millis,
        envelope: &Envelope,
        frame: Frame,
        spent: Spent,
        reply: Reply<Receipt>,
    ) {
        let worker = self.run.holder(envelope.lease.0).map(str::to_owned);
        let (slot, slots, staleness) = match self.run.contribute(now, core_contribution(envelope)) {
            Ok(Accepted::New { slot, slots, staleness }) => (slot, slots, staleness),
            Ok(Accepted::Repeat) => {
                let again = |held: &Held| {
                    (held.envelope.lease, held.envelope.sequence)
                        == (envelope.lease, envelope.sequence)
                };
                if self.spooling.iter().any(again) {
                    self.spooling.push(Held { since: now, envelope: envelope.clone(), reply });
                } else {
                    let _ = reply.send(Ok(self.receipt(envelope)));
                }
                return;
            }
            Err(refusal) => {
                Counters::add(&self.counters.refused, 1);
                let _ = reply.send(Err(refusal.into()));
                return;
            }
        };
        Counters::add(&self.counters.contributions, 1);
        let frame = Arc::new(frame);
        let mut reply = Some(reply);
        if envelope.kind == ContributionKind::Model {
            self.spool(now, envelope, &frame, spent, reply.take());
        } else if self.run.step_due().is_none()
            && let Some(reply) = reply.take()
        {
            self.answer_or_hold(Held { since: now, envelope: envelope.clone(), reply });
        }
        if let Err(message) = self.model.take(slot, slots, envelope.count, frame) {
            tracing::error!(run = self.name, "{message}");
            self.run.fail_run(&message);
        }
        if let Some(loss) = envelope.loss.filter(|loss| can_be_a_loss(*loss)) {
            self.round_loss.0 += loss * envelope.count as f64;
            self.round_loss.1 += envelope.count as f64;
        }
        self.recent.add(now, envelope.count);
        if let Some(record) = worker.as_deref().and_then(|name| self.workers.get_mut(name)) {
            record.heard(now, &self.recorder);
            record.contributions += 1;
            record.samples += envelope.count;
            record.staleness = record.staleness * 0.9 + staleness as f64 * 0.1;
            record.recent.add(now, envelope.count);
        }
        self.step_while_due(now, worker.as_deref());
        if let Some(reply) = reply {
            let _ = reply.send(Ok(self.receipt(envelope)));
        }
    }

    /// The worker that brought something home may have nothing to do but wait for the round: its
    /// answer does, and then brings the version along.
    fn answer_or_hold(&mut self, held: Held) {
        if held.envelope.want.is_some() && self.run.round_is_taken() {
            self.held.push(held);
        } else {
            let _ = held.reply.send(Ok(self.receipt(&held.envelope)));
        }
    }

    /// Writes an accepted model to the store; its answer waits for that.
    fn spool(
        &mut self,
        now: Millis,
        envelope: &Envelope,
        frame: &Arc<Frame>,
        spent: Spent,
        reply: Option<Reply<Receipt>>,
    ) {
        let Envelope { first, count, base, .. } = *envelope;
        let mut entry = SpoolEntry::new(self.run.epoch(), first, count, base.number);
        entry.loss = envelope.loss.filter(|loss| can_be_a_loss(*loss));
        if base.number == self.run.number() {
            entry.base_hash = self.version_hash();
        }
        let (lease, sequence) = (envelope.lease, envelope.sequence);
        let frame = frame.clone();
        let _ = self.writes.send(Write::Spool { entry, frame, spent, lease, sequence });
        let held = reply.map(|reply| Held { since: now, envelope: envelope.clone(), reply });
        self.spooling.extend(held);
    }

    fn answer_spooled(
        &mut self,
        now: Millis,
        lease: LeaseId,
        sequence: u64,
        trouble: Option<String>,
    ) {
        if let Some(message) = trouble {
            // It counts all the same: only a crash before the next checkpoint would cost the work.
            Counters::add(&self.counters.checkpoint_failures, 1);
            self.trouble = Some(message);
        }
        let of_this =
            |held: &Held| (held.envelope.lease, held.envelope.sequence) == (lease, sequence);
        let (answered, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.spooling).into_iter().partition(of_this);
        self.spooling = others;
        for held in answered {
            self.answer_or_hold(Held { since: now, ..held });
        }
    }

    /// The hash of the version now, worked out once.
    fn version_hash(&mut self) -> String {
        let number = self.run.number();
        match &self.hash {
            Some((of, hash)) if *of == number => hash.clone(),
            _ => {
                let hash = version_hash(self.model.current());
                self.hash = Some((number, hash.clone()));
                hash
            }
        }
    }

    /// Takes over what was accepted before a crash, as far as it fits what the checkpoint holds.
    fn replay(&mut self) {
        let mut spool = std::mem::take(&mut self.spool);
        spool.sort_by_key(|(entry, _)| (entry.base, entry.first));
        let (all, mut taken, mut dropped) = (spool.len(), 0, Vec::new());
        for (entry, frame) in spool {
            // Where a run promises bits, only what was made on these very bytes gives them.
            let fits = entry.epoch == self.run.epoch()
                && (!self.run.plan().same_bits() || entry.base_hash == self.version_hash());
            let replayed =
                if fits { self.run.replay(entry.first, entry.count, entry.base) } else { None };
            let Some(Accepted::New { slot, slots, .. }) = replayed else {
                dropped.push(entry.name());
                continue;
            };
            taken += 1;
            if let Err(message) = self.model.take(slot, slots, entry.count, Arc::new(frame)) {
                self.run.fail_run(&message);
            }
            if let Some(loss) = entry.loss {
                self.round_loss.0 += loss * entry.count as f64;
                self.round_loss.1 += entry.count as f64;
            }
            self.step_while_due(0, None);
        }
        if all > 0 {
            tracing::info!(run = self.name, version = %self.version(),
                "{taken} of {all} spooled models are taken over");
        }
        if !dropped.is_empty() {
            let _ = self.writes.send(Write::Unspool(dropped));
        }
    }

    /// Deletes the models that a checkpoint holds.
    fn unspool_durable(&mut self) {
        let durable = self.durable.number;
        let spooled = std::mem::take(&mut self.spooled);
        let (done, others): (Vec<_>, Vec<_>) =
            spooled.into_iter().partition(|(number, _)| *number <= durable);
        self.spooled = others;
        if !done.is_empty() {
            let names = done.into_iter().map(|(_, name)| name).collect();
            let _ = self.writes.send(Write::Unspool(names));
        }
    }

    fn receipt(&self, envelope: &Envelope) -> Receipt {
        let outcome = match self.run.outcome(envelope.lease.0, envelope.sequence) {
            Some(skep_core::Outcome::Stepped) => Outcome::Stepped,
            Some(skep_core::Outcome::Refused) => Outcome::Refused,
            _ => Outcome::Accepted,
        };
        Receipt { outcome, version: self.version(), durable: self.durable }
    }

    fn evaluate(
        &mut self,
        now: Millis,
        envelope: &Envelope,
        counts: EvaluationCounts,
    ) -> Result<Receipt, ApiError> {
        if !can_be_a_loss(counts.loss_sum / envelope.count.max(1) as f64) {
            return Err(ApiError::new(
                ErrorCode::NotFinite,
                "the loss of the evaluation is not finite, or as good as infinite",
                "give the lease back with the failure",
            ));
        }
        let counts = Counts { loss_sum: counts.loss_sum, correct: counts.correct };
        self.run.count(now, core_contribution(envelope), counts)?;
        Counters::add(&self.counters.evaluations, 1);
        self.stirred = true;
        Ok(self.receipt(envelope))
    }

    /// Makes versions as long as one is due.
    fn step_while_due(&mut self, now: Millis, worker: Option<&str>) {
        while let Some(step) = self.run.step_due() {
            let damping = match (self.run.plan().policy, step.members.first()) {
                (Policy::Async { damping, .. }, Some(member)) => {
                    skep_math::damping(member.staleness, damping)
                }
                _ => 1.0,
            };
            let (sum, weight) = std::mem::take(&mut self.round_loss);
            let loss = (weight > 0.0).then(|| sum / weight);
            let epoch = self.run.epoch();
            match self.model.step(step.samples, &step.missing, damping) {
                Ok(report) => {
                    self.run.stepped(Ok(()));
                    if matches!(self.run.plan().policy, Policy::Average { .. }) {
                        let names = step.members.iter().map(|it| file_name(epoch, it.first));
                        self.spooled.extend(names.map(|name| (step.number, name)));
                    }
                    let version = self.version();
                    self.published.publish(version, self.model.current().clone());
                    if let Some(loss) = loss {
                        let known = self.kept.loss.unwrap_or(loss);
                        self.kept.loss = Some(known * 0.95 + loss * 0.05);
                    }
                    self.events.send(Event::Version {
                        version,
                        loss,
                        samples: self.run.samples(),
                        epoch: self.run.epoch(),
                        rate: report.rate,
                        norm: report.norm,
                    });
                    let staleness: u64 = step.members.iter().map(|member| member.staleness).sum();
                    let made = Made {
                        now,
                        seconds: self.kept.seconds,
                        version,
                        samples: self.run.samples(),
                        epoch: self.run.epoch(),
                        loss,
                        learning_rate: report.rate,
                        norm: report.norm,
                        staleness: staleness as f64 / step.members.len().max(1) as f64,
                    };
                    self.recorder.version(&made, || self.records(now).count() as u64);
                    self.step_line(now, worker, version, loss);
                    // A version to be measured is kept before the next one replaces it.
                    self.drain_notices(now);
                }
                Err(reason) => {
                    tracing::warn!(run = self.name, version = %self.version(), "{reason}");
                    self.events.send(Event::Fault {
                        worker: worker.unwrap_or_default().to_owned(),
                        message: reason.clone(),
                    });
                    self.run.stepped(Err(reason));
                }
            }
            self.stirred = true;
        }
    }

    /// Answers the contributions whose round has closed, or has not for too long.
    fn answer_held(&mut self, now: Millis) {
        let running = matches!(self.run.status().0, Status::Running);
        for held in std::mem::take(&mut self.held) {
            let stepped = held.envelope.have.is_none_or(|have| have != self.version());
            if stepped || !running || now.saturating_sub(held.since) >= RETRY_WAITERS {
                let _ = held.reply.send(Ok(self.receipt(&held.envelope)));
            } else {
                self.held.push(held);
            }
        }
    }

    /// The line that people know from older servers of this kind: every step at `debug`, one a
    /// second at `info`.
    fn step_line(
        &mut self,
        now: Millis,
        worker: Option<&str>,
        version: Version,
        loss: Option<f64>,
    ) {
        let Some(worker) = worker else { return };
        let step = self.workers.get(worker).map_or(0, |record| record.contributions);
        let loss = loss.map_or(String::new(), |loss| format!(", loss {loss:.4}"));
        if now.saturating_sub(self.last_step_line) >= 1000 {
            self.last_step_line = now;
            tracing::info!(run = self.name, worker, %version,
                "worker {worker}: step {step} done (version {version}{loss})");
        } else {
            tracing::debug!(run = self.name, worker, %version,
                "worker {worker}: step {step} done (version {version}{loss})");
        }
    }

    /// After each event: versions that are due, notices, waiters, checkpoints, stop conditions.
    fn note_progress(&mut self) {
        let now = self.now();
        if matches!(self.run.status().0, Status::Running) {
            self.kept.seconds += now.saturating_sub(self.last_now) as f64 / 1000.0;
        }
        self.last_now = now;
        self.step_while_due(now, None);
        self.check_stop();
        self.drain_notices(now);
        self.answer_held(now);
        let due = self.waiters.iter().any(|waiter| waiter.deadline <= now)
            || now.saturating_sub(self.last_retry) >= RETRY_WAITERS;
        if std::mem::take(&mut self.stirred) || due {
            self.last_retry = now;
            for waiter in std::mem::take(&mut self.waiters) {
                if let Some(waiter) = self.try_lease(now, waiter) {
                    self.waiters.push(waiter);
                }
            }
        }
        self.checkpoint_if_due(now);
    }

    fn drain_notices(&mut self, now: Millis) {
        loop {
            let notices = self.run.take_notices();
            if notices.is_empty() {
                return;
            }
            for notice in notices {
                self.notice(now, notice);
            }
            self.stirred = true;
        }
    }

    fn check_stop(&mut self) {
        let stop = &self.spec.job.stop;
        if !matches!(self.run.status().0, Status::Running) {
            return;
        }
        if let Some(minutes) = stop.minutes
            && self.kept.seconds >= minutes * 60.0
        {
            self.run.complete(&format!("{minutes} minutes are over"));
        } else if let Some(steps) = stop.steps
            && self.run.number() >= steps
        {
            self.run.complete(&format!("{steps} versions are made"));
        } else if let (Some(wanted), Some(accuracy)) =
            (stop.accuracy, self.kept.validation.and_then(|measured| measured.accuracy))
            && accuracy >= wanted
        {
            self.run.complete(&format!("validation accuracy {accuracy:.4} reaches {wanted}"));
        }
    }

    fn notice(&mut self, now: Millis, notice: Notice) {
        match notice {
            Notice::MeasuringStarted { split, .. } => {
                self.published.pin();
                let training = split == EvaluationSplit::Validation;
                self.measured_material = training.then(|| self.material());
            }
            Notice::Measured(measured) => self.measured(measured),
            Notice::MeasuringFailed { number, split } => {
                self.published.unpin(Version::new(self.run.generation(), number));
                tracing::warn!(run = self.name, number, ?split, "could not be measured");
            }
            Notice::Lapsed { worker, reason } => {
                Counters::add(&self.counters.lapsed, 1);
                tracing::warn!(run = self.name, worker, version = %self.version(), "lease lost: {reason}");
                self.events.send(Event::Fault { worker, message: format!("lease lost: {reason}") });
            }
            Notice::Skipped(gap) => {
                tracing::error!(run = self.name, version = %self.version(), "skipped positions {}..{} of epoch {}: {}",
                    gap.start, gap.end, gap.epoch, gap.reason);
                self.events.send(Event::Fault {
                    worker: String::new(),
                    message: format!(
                        "positions {}..{} of epoch {} are skipped: {}",
                        gap.start, gap.end, gap.epoch, gap.reason
                    ),
                });
            }
            Notice::EpochEnded(epoch) => {
                tracing::info!(run = self.name, version = %self.version(), "epoch {} is complete", epoch + 1);
            }
            Notice::Status(status) => self.status_changed(now, &status),
        }
    }

    fn status_changed(&mut self, now: Millis, status: &Status) {
        let (state, reason) = self.state();
        let doing = if *status == Status::Measuring { "measuring the final version" } else { "" };
        tracing::info!(run = self.name, version = %self.version(), "{state:?} {doing}{reason}");
        if !matches!(status, Status::Running | Status::Paused) {
            self.model.forget();
            self.round_loss = (0.0, 0.0);
        }
        let material = self.material();
        self.writing = self.writes.send(Write::Latest(material)).is_ok();
        self.last_write = now;
        if state.is_final() {
            if matches!(self.run.plan().policy, Policy::Average { .. }) {
                let _ = self.writes.send(Write::ClearSpool);
            }
            self.final_written = false;
            let _ = self.writes.send(Write::Final(self.model.current().clone()));
            let seconds = self.kept.seconds;
            tracing::info!(run = self.name, version = %self.version(),
                "training elapsed time: {seconds:.1} s");
        }
        if *status != Status::Measuring {
            self.events.send(Event::State { state, reason });
        }
    }

    fn measured(&mut self, measured: Measured) {
        let version = Version::new(self.run.generation(), measured.number);
        self.published.unpin(version);
        let evaluated = Evaluated {
            version,
            split: wire_split(measured.split),
            samples: measured.samples,
            loss: measured.loss,
            accuracy: measured.accuracy,
        };
        let mut wish = Write::Measured;
        match measured.split {
            EvaluationSplit::Test => self.kept.test = Some(evaluated),
            EvaluationSplit::Validation => {
                self.kept.validation = Some(evaluated);
                let better =
                    self.kept.best.is_none_or(|best| match (evaluated.accuracy, best.accuracy) {
                        (Some(new), Some(old)) if new != old => new > old,
                        _ => evaluated.loss < best.loss,
                    });
                if better {
                    self.kept.best = Some(evaluated);
                    if let Some(material) = self.measured_material.take() {
                        wish = Write::Best(material);
                    }
                }
            }
        }
        self.measured_material = None;
        self.recorder.measured(&evaluated, self.kept.seconds);
        let _ = self.writes.send(wish);
        let accuracy = measured.accuracy.map_or(String::new(), |a| format!(", accuracy {a:.4}"));
        tracing::info!(run = self.name, %version, "{:?}: loss {:.4}{accuracy}", measured.split, measured.loss);
        self.events.send(Event::Evaluated(evaluated));
        self.stirred = true;
    }

    fn material(&mut self) -> Material {
        self.kept.run = self.run.snapshot();
        Material {
            version: self.version(),
            frame: self.model.current().clone(),
            optimiser: self.model.optimiser_state(),
            status: self.run.status().0.clone(),
            state: serde_json::to_value(&self.kept).unwrap_or_default(),
        }
    }

    fn checkpoint_if_due(&mut self, now: Millis) {
        let pause = (self.spec.job.checkpoint.seconds.max(0.05) * 1000.0) as Millis;
        if self.writing || now.saturating_sub(self.last_write) < pause {
            return;
        }
        if !self.is_saved() {
            let material = self.material();
            self.writing = self.writes.send(Write::Latest(material)).is_ok();
            self.last_write = now;
        } else if self.state().0.is_final() && !self.final_written {
            self.writing = self.writes.send(Write::Final(self.model.current().clone())).is_ok();
            self.last_write = now;
        }
    }

    fn close(&mut self, reply: oneshot::Sender<()>) {
        for waiter in std::mem::take(&mut self.waiters) {
            let _ = waiter.reply.send(Err(ApiError::closing()));
        }
        for held in std::mem::take(&mut self.held) {
            let _ = held.reply.send(Ok(self.receipt(&held.envelope)));
        }
        // Nothing is acknowledged before it is in the store; what gets there is taken over later.
        for held in std::mem::take(&mut self.spooling) {
            let _ = held.reply.send(Err(ApiError::closing()));
        }
        if !self.is_saved() {
            let material = self.material();
            let _ = self.writes.send(Write::Latest(material));
        }
        let _ = self.writes.send(Write::Flush(reply));
    }

    fn state(&self) -> (RunState, String) {
        let (status, reason) = self.run.status();
        let state = match status {
            Status::Running | Status::Measuring => RunState::Running,
            Status::Paused => RunState::Paused,
            Status::Done if self.run.gaps().next().is_some() => RunState::DoneWithGaps,
            Status::Done => RunState::Done,
            Status::Stopped => RunState::Stopped,
            Status::Failed => RunState::Failed,
        };
        (state, reason.to_owned())
    }

    fn view(&self, now: Millis) -> RunView {
        let (state, reason) = self.state();
        let plan = self.run.plan();
        let positions: u64 = plan.shards.iter().sum();
        let (epochs, steps) = match plan.limit {
            Limit::Epochs(epochs) => (Some(epochs), None),
            Limit::Steps(steps) => (None, Some(steps)),
            Limit::Endless => (None, None),
        };
        let rate = self.recent.per_second(now);
        let left = match plan.limit {
            Limit::Epochs(epochs) => Some(
                epochs.saturating_sub(self.run.epoch()) as f64 * positions as f64
                    - self.run.epoch_settled() as f64,
            ),
            Limit::Steps(steps) if self.run.number() > 0 => {
                let each = self.run.samples() as f64 / self.run.number() as f64;
                Some(steps.saturating_sub(self.run.number()) as f64 * each)
            }
            _ => None,
        };
        let skipped = |gap: &skep_core::Gap| Skipped {
            epoch: gap.epoch,
            first: gap.start,
            count: gap.end - gap.start,
            reason: gap.reason.clone(),
        };
        RunView {
            name: self.name.clone(),
            state,
            reason,
            version: self.version(),
            durable: self.durable,
            epoch: self.run.epoch(),
            epoch_applied: self.run.epoch_settled(),
            epoch_positions: positions,
            epochs,
            steps,
            versions: plan.versions(),
            samples: self.run.samples(),
            loss: self.kept.loss,
            rate,
            seconds: self.kept.seconds,
            seconds_left: left.filter(|_| rate > 0.0).map(|left| left / rate),
            workers: self.worker_views(now),
            validation: self.kept.validation,
            best: self.kept.best,
            test: self.kept.test,
            skipped: self.run.gaps().map(skipped).collect(),
            model: self.final_written.then(|| self.model_path.clone()),
            trouble: self.trouble.clone(),
            job: self.spec.job.clone(),
            schema: self.spec.schema.clone(),
            manifest: self.spec.manifest.clone(),
        }
    }

    /// The workers heard of lately.
    fn records(&self, now: Millis) -> impl Iterator<Item = (&String, &WorkerRecord)> {
        let lately = 6 * self.run.plan().lease.silence;
        self.workers.iter().filter(move |(_, record)| now.saturating_sub(record.seen) < lately)
    }

    fn worker_views(&self, now: Millis) -> Vec<WorkerView> {
        self.records(now)
            .map(|(name, record)| WorkerView {
                name: name.clone(),
                engine: record.engine.clone(),
                seen_seconds: now.saturating_sub(record.seen) as f64 / 1000.0,
                contributions: record.contributions,
                samples: record.samples,
                rate: record.recent.per_second(now),
                staleness: record.staleness,
                waiting: record.waiting,
            })
            .collect()
    }
}

fn core_contribution(envelope: &Envelope) -> Contribution {
    Contribution {
        lease: envelope.lease.0,
        sequence: envelope.sequence,
        first: envelope.first,
        count: envelope.count,
        generation: envelope.base.generation,
        base: envelope.base.number,
    }
}

/// Whether a mean loss fits an `f32`, so that no sum or mean of them becomes infinite: JSON has no
/// word for that, and a checkpoint with one could not be read again.
fn can_be_a_loss(mean: f64) -> bool {
    mean.abs() <= f64::from(f32::MAX)
}

/// All kinds where none is named.
fn takes(kinds: &[LeaseKind]) -> Takes {
    let trains = kinds.contains(&LeaseKind::Train);
    let evaluates = kinds.contains(&LeaseKind::Evaluate);
    match (trains, evaluates) {
        (true, false) => Takes::Training,
        (false, true) => Takes::Evaluations,
        _ => Takes::Anything,
    }
}

fn wire_split(split: EvaluationSplit) -> Split {
    match split {
        EvaluationSplit::Validation => Split::Validation,
        EvaluationSplit::Test => Split::Test,
    }
}

fn random_nonce() -> u128 {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the operating system has randomness");
    u128::from_le_bytes(bytes)
}
