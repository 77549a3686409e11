//! Whatever is dropped, repeated, reordered, late or killed: every sample counts once.
//!
//! The world these tests play in is described in `world/mod.rs`; it checks after every event that
//! nothing was counted twice, torn out of its round or brought back from the dead.

#![allow(clippy::unwrap_used, reason = "a test may stop where its assumption fails")]

mod world;

use std::collections::BTreeSet;

use proptest::prelude::*;
use skep_core::{
    Accepted, Assignment, Contribution, EvaluationSplit, Grant, LeaseDecision, Limit, Millis,
    Notice, Plan, Policy, Readable, Refusal, Request, Run, Status, Takes,
};
use world::{TIMES, World, plan, rounds};

#[derive(Clone, Debug)]
enum Event {
    /// Asks for a lease, whatever it still holds.
    Ask {
        worker: usize,
        only: Option<u8>,
        has: Option<usize>,
        time_left: Option<Millis>,
        takes: Takes,
    },
    /// Sends the next contribution, perhaps a short one.
    Push {
        worker: usize,
        most: u64,
    },
    /// Sends the next contribution and never hears the answer.
    PushUnheard {
        worker: usize,
    },
    /// Sends the next contribution on a slow way.
    Delay {
        worker: usize,
    },
    /// What was sent on a slow way arrives, in any order.
    Arrive {
        which: usize,
    },
    /// Something that was sent before arrives once more.
    Again {
        which: usize,
    },
    /// The last one arrives once more, at once.
    AgainAtOnce,
    PushWrong {
        worker: usize,
        way: u8,
    },
    GiveBack {
        worker: usize,
        failed: bool,
    },
    Renew {
        worker: usize,
    },
    /// A heartbeat for a lease that may be long gone.
    RenewAny {
        which: usize,
    },
    Pass {
        time: Millis,
    },
    BadVersion,
    Pause,
    Resume,
    Save,
    Crash,
}

fn events(gentle: bool) -> impl Strategy<Value = Vec<Event>> {
    let worker = 0..5usize;
    let ask = (
        worker.clone(),
        prop::option::weighted(0.2, any::<u8>()),
        prop::option::weighted(0.3, 0..4usize),
        prop::option::weighted(0.2, prop_oneof![0..5000u64, Just(u64::MAX)]),
        prop_oneof![3 => Just(Takes::Anything), 1 => Just(Takes::Training), 1 => Just(Takes::Evaluations)],
    );
    let long = if gentle { 1..2 } else { 100..20_000u64 };
    let bad = if gentle { Event::AgainAtOnce } else { Event::BadVersion };
    let event = prop_oneof![
        20 => ask.prop_map(|(worker, only, has, time_left, takes)| {
            Event::Ask { worker, only, has, time_left, takes }
        }),
        30 => (worker.clone(), prop_oneof![4 => Just(u64::MAX), 1 => 1..4u64])
            .prop_map(|(worker, most)| Event::Push { worker, most }),
        4 => worker.clone().prop_map(|worker| Event::PushUnheard { worker }),
        8 => worker.clone().prop_map(|worker| Event::Delay { worker }),
        8 => any::<usize>().prop_map(|which| Event::Arrive { which }),
        5 => any::<usize>().prop_map(|which| Event::Again { which }),
        3 => Just(Event::AgainAtOnce),
        4 => (worker.clone(), any::<u8>())
            .prop_map(|(worker, way)| Event::PushWrong { worker, way }),
        4 => (worker.clone(), any::<bool>()).prop_map(move |(worker, failed)| {
            Event::GiveBack { worker, failed: failed && !gentle }
        }),
        4 => worker.prop_map(|worker| Event::Renew { worker }),
        2 => any::<usize>().prop_map(|which| Event::RenewAny { which }),
        10 => (1..40u64).prop_map(|time| Event::Pass { time }),
        5 => long.prop_map(|time| Event::Pass { time }),
        2 => Just(bad),
        2 => Just(Event::Pause),
        4 => Just(Event::Resume),
        3 => Just(Event::Save),
        2 => Just(Event::Crash),
    ];
    prop::collection::vec(event, 0..150)
}

fn policies() -> impl Strategy<Value = Policy> {
    prop_oneof![
        (1..=4u64).prop_map(|size| Policy::Batch { size }),
        prop::option::of(0..4u64)
            .prop_map(|max_staleness| Policy::Async { damping: 0.5, max_staleness }),
        (1..=4u64, 0..=2u64).prop_map(|(slots, backup)| Policy::Sync {
            slots,
            backup,
            deadline: 15_000
        }),
        averages(),
    ]
}

fn averages() -> impl Strategy<Value = Policy> {
    (1..=4u64, 0..=3u64, 0..=2u64, prop_oneof![Just(0), 1..3_000u64]).prop_map(
        |(slots, fewer, backup, grace)| Policy::Average {
            slots,
            quorum: slots.saturating_sub(fewer).max(1),
            grace,
            backup,
            deadline: Some(15_000),
        },
    )
}

fn plans() -> impl Strategy<Value = Plan> {
    let limit = prop_oneof![
        6 => (1..=3u64).prop_map(Limit::Epochs),
        1 => (1..=20u64).prop_map(Limit::Steps),
        1 => Just(Limit::Endless),
    ];
    let held_out = || prop::collection::vec(1..100u64, 0..3);
    let numbers = (any::<u64>(), 1..7u64, prop::option::of(1..5u64), any::<bool>());
    (prop::collection::vec(1..20u64, 1..5), policies(), limit, held_out(), held_out(), numbers)
        .prop_map(
            |(shards, policy, limit, validation, test, (seed, chunk, evaluate_every, turns))| {
                Plan {
                    seed,
                    validation,
                    test,
                    evaluate_every,
                    turns,
                    ..plan(&shards, chunk, policy, limit)
                }
            },
        )
}

fn happen(world: &mut World, workers: usize, events: &[Event]) {
    let name = |worker: usize| format!("worker-{}", worker % workers);
    let mut delayed = Vec::new();
    for event in events {
        match *event {
            Event::Ask { worker, only, has, time_left, takes } => {
                let shards = |bits: u8| (0..8).filter(|bit| bits >> bit & 1 == 1).collect();
                let only = only.map(|bits| Readable {
                    train: shards(bits),
                    validation: shards(bits.rotate_left(3)),
                    test: shards(bits.rotate_left(5)),
                });
                let has = has.into_iter().collect();
                world.ask(&Request { worker: name(worker), time_left, has, only, takes });
            }
            Event::Push { worker, most } => drop(world.push(&name(worker), most)),
            Event::PushUnheard { worker } => {
                world.push(&name(worker), u64::MAX);
                world.held.remove(&name(worker));
            }
            Event::Delay { worker } => {
                if let Some(message) = world.compute(&name(worker), u64::MAX) {
                    world.move_on(&name(worker), &message);
                    delayed.push(message);
                }
            }
            Event::Arrive { which } if !delayed.is_empty() => {
                let message = delayed.swap_remove(which % delayed.len());
                world.deliver(&message).ok();
            }
            Event::Again { which } if !world.sent.is_empty() => {
                let message = world.sent[which % world.sent.len()].clone();
                world.deliver(&message).ok();
            }
            Event::AgainAtOnce if !world.sent.is_empty() => {
                let message = world.sent[world.sent.len() - 1].clone();
                world.deliver(&message).ok();
            }
            Event::PushWrong { worker, way } => world.push_wrong(&name(worker), way),
            Event::GiveBack { worker, failed } => {
                world.give_back(&name(worker), failed.then_some("out of memory"));
            }
            Event::Renew { worker } => {
                if let Some(held) = world.held.get(&name(worker)) {
                    world.renew(held.grant.id);
                }
            }
            Event::RenewAny { which } if !world.sent.is_empty() => {
                world.renew(world.sent[which % world.sent.len()].contribution.lease);
            }
            Event::Pass { time } => world.now += time,
            Event::BadVersion => world.next_version_is_bad = true,
            Event::Pause => world.pause(),
            Event::Resume => world.resume(),
            Event::Save => world.save(),
            Event::Crash => world.crash(),
            Event::Arrive { .. }
            | Event::Again { .. }
            | Event::AgainAtOnce
            | Event::RenewAny { .. } => {}
        }
    }
    world.next_version_is_bad = false;
}

/// Brings a run to its end, or an endless one a few epochs further.
fn finish(world: &mut World, workers: usize) {
    let epoch = world.run.epoch();
    let endless = world.run.plan().limit == Limit::Endless;
    world.finish(workers, |run| endless && run.epoch() >= epoch + 2);
    if *world.status() == Status::Failed {
        world.check_failed();
        let answer = world.ask(&request("late"));
        assert_eq!(answer, LeaseDecision::Stopped);
        return;
    }
    let samples: u64 = world.run.plan().shards.iter().sum();
    match world.run.plan().limit {
        Limit::Endless => world.run.stop("enough").unwrap(),
        Limit::Steps(steps) => assert_eq!(world.run.number(), steps),
        Limit::Epochs(epochs) => {
            let skipped: u64 = world.run.gaps().map(|gap| gap.end - gap.start).sum();
            let counted: u64 = world.lineage.parameters.values().sum();
            assert_eq!(counted + skipped, epochs * samples);
        }
    }
    assert!(matches!(world.status(), Status::Done | Status::Stopped));
    let answer = world.ask(&Request { worker: "late".to_owned(), ..Request::default() });
    assert!(matches!(answer, LeaseDecision::Done | LeaseDecision::Stopped));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn every_sample_counts_once_whatever_happens(
        plan in plans(), workers in 1..=5usize, events in events(false), reliable in 1..=4usize,
        attempts in 1..=5u32,
    ) {
        let mut world = World::new(Plan { attempts, ..plan });
        happen(&mut world, workers, &events);
        finish(&mut world, reliable);
    }

    #[test]
    fn nothing_is_skipped_where_nothing_fails(
        plan in plans(), workers in 1..=5usize, events in events(true), reliable in 1..=4usize,
    ) {
        let mut world = World::new(plan);
        happen(&mut world, workers, &events);
        finish(&mut world, reliable);
        prop_assert_eq!(world.run.gaps().count(), 0);
        prop_assert_ne!(world.status(), &Status::Failed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// Models that may be late, and a hive that dies and takes over what it had spooled.
    #[test]
    fn every_model_counts_once_whatever_happens(
        plan in plans(), policy in averages(), workers in 1..=5usize, events in events(false),
        reliable in 1..=4usize,
    ) {
        let mut world = World::new(Plan { policy, ..plan });
        happen(&mut world, workers, &events);
        finish(&mut world, reliable);
    }

    /// Where a round waits for all of its slots, which slots make which version depends on the
    /// plan only.
    #[test]
    fn versions_of_sync_do_not_depend_on_what_happened(
        plan in plans(), slots in 1..=4u64, backup in 0..=2u64, epochs in 1..=3u64, models: bool,
        workers in 1..=5usize, reliable in 1..=4usize, events in events(false),
    ) {
        let deadline = 15_000;
        let policy = if models {
            Policy::Average { slots, quorum: slots, grace: 0, backup, deadline: Some(deadline) }
        } else {
            Policy::Sync { slots, backup, deadline }
        };
        // Nothing is given up: what is skipped is missing from its version.
        let plan = Plan { policy, limit: Limit::Epochs(epochs), attempts: u32::MAX, ..plan };
        let expected: Vec<_> = (0..epochs)
            .flat_map(|epoch| rounds(&plan, epoch, slots).into_iter().map(move |it| (epoch, it)))
            .collect();
        let mut world = World::new(plan);
        happen(&mut world, workers, &events);
        finish(&mut world, reliable);
        prop_assert_eq!(&world.lineage.versions, &expected);
    }
}

const SYNC: Policy = Policy::Sync { slots: 3, backup: 0, deadline: 15_000 };
const AVERAGE: Policy =
    Policy::Average { slots: 3, quorum: 3, grace: 0, backup: 0, deadline: Some(15_000) };
const QUORUM: Policy =
    Policy::Average { slots: 3, quorum: 2, grace: 500, backup: 0, deadline: Some(15_000) };
const BATCH: Policy = Policy::Batch { size: 3 };
const ASYNC: Policy = Policy::Async { damping: 0.5, max_staleness: None };
const BOUNDED: Policy = Policy::Async { damping: 0.5, max_staleness: Some(2) };

fn request(worker: &str) -> Request {
    Request { worker: worker.to_owned(), ..Request::default() }
}

fn granted(world: &mut World, request: &Request) -> Grant {
    match world.ask(request) {
        LeaseDecision::Granted(grant) => grant,
        other => panic!("no lease for {request:?}, but {other:?}"),
    }
}

/// A slice that makes every worker fail is tried five times, then named; the rest is untouched.
#[test]
fn a_slice_that_always_fails_is_skipped_after_five_attempts() {
    for policy in [BATCH, ASYNC, BOUNDED, SYNC, AVERAGE] {
        let mut world = World::new(plan(&[10, 7], 4, policy, Limit::Epochs(2)));
        let mut attempts = 0;
        for turn in 0..1000u64 {
            let name = format!("worker-{}", turn % 2);
            match world.ask(&request(&name)) {
                LeaseDecision::Granted(_) => {}
                LeaseDecision::Wait { .. } => continue,
                _ => break,
            }
            // Each epoch has another order: the poison is a place in this test, not a sample.
            while let Some(message) = world.compute(&name, u64::MAX) {
                if (world.run.epoch(), message.contribution.first) == (0, 4) {
                    attempts += 1;
                    world.give_back(&name, Some("cannot decode"));
                } else if world.push(&name, u64::MAX).is_none() {
                    break;
                }
            }
            world.now += 10;
        }
        assert_eq!(attempts, 5, "{policy:?}");
        assert_eq!(*world.status(), Status::Done);
        let gaps: Vec<_> = world.run.gaps().collect();
        assert_eq!(gaps.len(), 1, "{gaps:?}");
        assert_eq!((gaps[0].epoch, gaps[0].start), (0, 4));
        assert!(gaps[0].reason.starts_with("cannot decode (worker-"), "{}", gaps[0].reason);
        let counted: u64 = world.lineage.parameters.values().sum();
        assert_eq!(counted, 2 * 17 - (gaps[0].end - gaps[0].start), "{policy:?}");
    }
}

/// A sample whose gradient makes versions infinite is given up with its slice, and the run ends.
#[test]
fn a_sample_that_makes_versions_infinite_is_skipped() {
    let mut world = World::new(plan(&[10, 7], 2, ASYNC, Limit::Epochs(1)));
    world.poison.insert((1, 3));
    world.finish(2, |_| false);
    assert_eq!(world.failures, 5);
    let gaps: Vec<_> = world.run.gaps().collect();
    assert_eq!((gaps.len(), gaps[0].reason.as_str()), (1, "not finite"));
    assert_eq!(world.lineage.parameters.len() as u64, 17 - (gaps[0].end - gaps[0].start));
    assert!(!world.lineage.parameters.contains_key(&(1, 3)));
}

/// A worker that its slice kills and that starts again under the same name does not get it for
/// ever.
#[test]
fn a_slice_that_kills_its_worker_is_skipped() {
    let mut world = World::new(plan(&[6], 2, BATCH, Limit::Epochs(1)));
    let mut deaths = 0;
    while let LeaseDecision::Granted(grant) = world.ask(&request("pod-0")) {
        if grant.range.contains(&2) {
            deaths += 1;
            assert!(deaths <= 5, "given out for ever");
            world.now += TIMES.silence / 2;
        } else {
            while world.push("pod-0", u64::MAX).is_some() {}
        }
    }
    assert_eq!(deaths, 5);
    assert_eq!(world.run.gaps().map(|gap| (gap.start, gap.end)).collect::<Vec<_>>(), [(2, 4)]);
}

/// How long two workers need for an epoch when a third one takes a lease and is never seen again.
/// They need 10 ms for a contribution.
fn time_with_a_dead_worker(policy: Policy) -> Millis {
    let mut world = World::new(plan(&[40, 40], 4, policy, Limit::Epochs(1)));
    granted(&mut world, &request("dead"));
    let begin = world.now;
    while *world.status() != Status::Done {
        let mut again = Millis::MAX;
        for name in ["one", "two"] {
            match world.ask(&request(name)) {
                LeaseDecision::Granted(_) => {
                    again = again.min(world.now + 10);
                }
                LeaseDecision::Wait { until, .. } => again = again.min(until),
                LeaseDecision::Done | LeaseDecision::Stopped => return world.now - begin,
            }
        }
        world.now = again;
        for name in ["one", "two"] {
            while world.push(name, u64::MAX).is_some() {}
        }
        assert!(world.now - begin < 10 * TIMES.silence, "waiting for the dead: {policy:?}");
    }
    world.now - begin
}

#[test]
fn nobody_waits_for_the_dead() {
    let work = 1000;
    for policy in [BATCH, ASYNC, BOUNDED, SYNC, AVERAGE] {
        let time = time_with_a_dead_worker(policy);
        assert!(time <= TIMES.silence + work, "{policy:?} took {time} ms");
    }
    // One round waits for its grace, the last for the dead worker's lease to lapse.
    let time = time_with_a_dead_worker(QUORUM);
    assert!(time <= TIMES.silence + 7 * 500 + work, "took {time} ms");
    // Where the last slices may be leased twice, not even a deadline is waited for.
    for policy in [BATCH, ASYNC, Policy::Sync { slots: 3, backup: 1, deadline: 15_000 }] {
        let time = time_with_a_dead_worker(policy);
        assert!(time <= work + TIMES.silence / 2, "{policy:?} took {time} ms");
    }
}

/// The progress deadline catches a worker that still sends heartbeats.
#[test]
fn a_hung_worker_loses_its_lease() {
    for (policy, deadline) in [(BATCH, TIMES.progress), (SYNC, 15_000), (AVERAGE, 15_000)] {
        let mut world = World::new(plan(&[4], 4, policy, Limit::Epochs(1)));
        let grant = granted(&mut world, &request("hung"));
        let end = world.now + deadline;
        while world.now + 3000 <= end {
            world.now += 3000;
            world.renew(grant.id);
            assert_eq!(world.run.holder(grant.id), Some("hung"));
        }
        world.now = end + 1;
        world.renew(grant.id);
        assert_eq!(world.run.holder(grant.id), None);
        granted(&mut world, &request("other"));
    }
}

/// At most `backup` slots of a round are leased twice, each at most twice, and only late.
#[test]
fn backups_are_few_and_only_for_the_slow() {
    for backup in 0..=3u64 {
        let policy = Policy::Sync { slots: 3, backup, deadline: 60_000 };
        let mut world = World::new(plan(&[12], 4, policy, Limit::Epochs(1)));
        let firsts: BTreeSet<_> = (0..3)
            .map(|it| granted(&mut world, &request(&format!("slow-{it}"))).range.start)
            .collect();
        assert_eq!(firsts.len(), 3);
        let early = world.ask(&request("helper-0"));
        assert!(matches!(early, LeaseDecision::Wait { .. }), "nobody is late yet");
        world.now += TIMES.silence * 3 / 5;
        let repeated: BTreeSet<_> = (0..5)
            .filter_map(|it| match world.ask(&request(&format!("helper-{it}"))) {
                LeaseDecision::Granted(grant) => Some(grant.range.start),
                _ => None,
            })
            .collect();
        assert_eq!(repeated.len() as u64, backup);
        // The first to arrive wins; the other one is void and changes nothing.
        if backup > 0 {
            let slot = world.held["helper-0"].grant.range.start;
            assert!(matches!(world.push("helper-0", u64::MAX), Some(Ok(Accepted::New { .. }))));
            let loser = (0..3).map(|it| format!("slow-{it}"));
            let loser = loser.into_iter().find(|it| world.held[it].grant.range.start == slot);
            let answer = world.push(&loser.unwrap(), u64::MAX);
            assert!(matches!(answer, Some(Err(Refusal::Gone(_)))));
        }
    }
}

/// When the first of two on the same slot is gone, the slot may be leased twice again.
#[test]
fn a_backup_that_is_left_alone_is_backed_up_itself() {
    let policy = Policy::Sync { slots: 1, backup: 1, deadline: 60_000 };
    let mut world = World::new(plan(&[4], 4, policy, Limit::Epochs(1)));
    granted(&mut world, &request("first"));
    world.now += TIMES.silence * 3 / 5;
    granted(&mut world, &request("second"));
    world.give_back("first", None);
    world.now += TIMES.silence * 3 / 5;
    granted(&mut world, &request("third"));
}

/// A fast worker gets leases of many contributions, and ever smaller ones towards the end.
#[test]
fn leases_shrink_towards_the_end_of_an_epoch() {
    let mut world = World::new(plan(&[4000], 4, BATCH, Limit::Epochs(1)));
    let mut sizes = Vec::new();
    while let LeaseDecision::Granted(grant) = world.ask(&request("fast")) {
        sizes.push(grant.range.end - grant.range.start);
        loop {
            world.now += 5;
            if world.push("fast", u64::MAX).is_none() {
                break;
            }
        }
    }
    assert_eq!(sizes[0], 4, "nothing is known of a new worker");
    assert_eq!(sizes[1], 4 * 64, "as much as a lease holds");
    assert!(sizes[1..].is_sorted_by(|a, b| a >= b), "{sizes:?}");
    assert_eq!(*sizes.last().unwrap(), 4);
    assert!(sizes.len() > 20, "{sizes:?}");
}

/// A worker with little time left gets what it can finish by its own measured pace.
#[test]
fn a_lease_fits_the_time_left() {
    for (time_left, most) in [(400, 3), (1_000, 8), (u64::MAX, 20), (120, 1)] {
        let mut world = World::new(plan(&[4000], 4, BATCH, Limit::Epochs(1)));
        granted(&mut world, &request("function"));
        world.now += 100;
        world.push("function", u64::MAX).unwrap().unwrap();
        let asked = Request { time_left: Some(time_left), ..request("function") };
        let grant = granted(&mut world, &asked);
        let chunks = (grant.range.end - grant.range.start) / 4;
        assert_eq!(chunks, most, "with {time_left} ms left");
        assert!(chunks * 100 <= time_left);
        let asked = Request { time_left: Some(99), ..request("function") };
        assert!(matches!(world.ask(&asked), LeaseDecision::Wait { .. }));
    }
}

/// What is short because its shard is short is not held against a worker with little time.
#[test]
fn the_time_a_contribution_takes_is_that_of_its_shard() {
    let mut world = World::new(plan(&[5; 20], 1000, BATCH, Limit::Epochs(1)));
    granted(&mut world, &request("function"));
    world.now += 100;
    world.push("function", u64::MAX).unwrap().unwrap();
    granted(&mut world, &Request { time_left: Some(200), ..request("function") });
}

/// Also a lease on someone else's late slice fits.
#[test]
fn a_backup_is_one_contribution() {
    let mut world = World::new(plan(&[400], 4, BATCH, Limit::Epochs(1)));
    granted(&mut world, &request("slow"));
    world.now += 1;
    world.push("slow", u64::MAX).unwrap().unwrap();
    let long = granted(&mut world, &request("slow")).range;
    assert!(long.end - long.start > 4);
    let backup = loop {
        match world.ask(&request("fast")) {
            LeaseDecision::Granted(grant) if grant.range.start == long.start => break grant.range,
            LeaseDecision::Granted(_) => while world.push("fast", u64::MAX).is_some() {},
            LeaseDecision::Wait { until, .. } => world.now = until,
            other => panic!("{other:?} with a slice still out"),
        }
        assert!(world.now < 2_000_000, "nobody helps the slow");
    };
    assert_eq!(backup, long.start..long.start + 4);
    // It voids the slow lease; all the rest is free again at once.
    world.push("fast", u64::MAX).unwrap().unwrap();
    let rest = granted(&mut world, &request("fast")).range;
    assert_eq!(rest.start, long.start + 4);
    assert!(matches!(world.push("slow", u64::MAX), Some(Err(Refusal::Gone(_)))));
}

/// A slow worker that fails while someone repeats its slice fails nothing: the other will tell.
#[test]
fn what_someone_else_works_on_does_not_fail() {
    let one_attempt = Plan { attempts: 1, ..plan(&[400], 4, BATCH, Limit::Epochs(1)) };
    let mut world = World::new(one_attempt);
    granted(&mut world, &request("slow"));
    world.now += 1;
    world.push("slow", u64::MAX).unwrap().unwrap();
    let long = granted(&mut world, &request("slow")).range;
    while world.held.get("fast").is_none_or(|held| held.grant.range.start != long.start) {
        while world.push("fast", u64::MAX).is_some() {}
        if let LeaseDecision::Wait { until, .. } = world.ask(&request("fast")) {
            world.now = until;
        }
        assert!(world.now < 2_000_000, "nobody helps the slow");
    }
    world.give_back("slow", Some("out of memory"));
    assert_eq!(world.run.gaps().count(), 0);
    world.push("fast", u64::MAX).unwrap().unwrap();
    world.finish(1, |_| false);
    assert_eq!(world.run.gaps().count(), 0);
}

/// With a bound, a fast worker waits rather than make a slow one stale; both make progress.
#[test]
fn a_fast_worker_waits_for_a_slow_one() {
    for allowed in [0, 1, 3] {
        let policy = Policy::Async { damping: 0.0, max_staleness: Some(allowed) };
        let mut world = World::new(plan(&[40], 2, policy, Limit::Epochs(1)));
        granted(&mut world, &request("slow"));
        let mut ahead = 0;
        while let LeaseDecision::Granted(_) = world.ask(&request("fast")) {
            world.now += 1;
            world.push("fast", u64::MAX).unwrap().unwrap();
            ahead += 1;
            assert!(ahead <= allowed, "the slow one would be too stale");
        }
        assert_eq!(ahead, allowed, "no waiting without need");
        let answer = world.push("slow", u64::MAX).unwrap();
        assert!(matches!(answer, Ok(Accepted::New { staleness, .. }) if staleness == allowed));
        granted(&mut world, &request("fast"));
    }
}

/// With `sync`, what was made on another version than the round's would give other bits.
#[test]
fn sync_takes_only_what_was_made_on_its_own_version() {
    let mut world = World::new(plan(
        &[8],
        4,
        Policy::Sync { slots: 1, backup: 0, deadline: 15_000 },
        Limit::Epochs(1),
    ));
    granted(&mut world, &request("worker"));
    world.push("worker", u64::MAX).unwrap().unwrap();
    granted(&mut world, &request("worker"));
    let mut message = world.compute("worker", u64::MAX).unwrap();
    message.contribution.base = 0;
    let answer = world.run.contribute(world.now, message.contribution);
    assert_eq!(answer, Err(Refusal::TooStale { staleness: 1, allowed: 0 }));
    assert_eq!(world.run.step_due(), None);
}

/// A round closes without a late model once its grace is over; the model enters the next round.
#[test]
fn a_late_model_enters_the_next_round() {
    let mut world = World::new(plan(&[24], 4, QUORUM, Limit::Epochs(1)));
    let late = granted(&mut world, &request("late")).range;
    for name in ["one", "two"] {
        granted(&mut world, &request(name));
        world.push(name, u64::MAX).unwrap().unwrap();
    }
    assert_eq!(world.run.number(), 0, "the late one has some grace");
    assert_eq!(world.run.next_deadline(), Some(world.now + 500));
    let waits = world.ask(&request("one"));
    assert!(matches!(waits, LeaseDecision::Wait { .. }), "{waits:?}");
    world.now += 500;
    world.ask(&request("one"));
    assert_eq!((world.run.number(), world.run.samples()), (1, 8));
    granted(&mut world, &request("one"));
    // Its base is a version old: it is a difference, and counts.
    let answer = world.push("late", u64::MAX).unwrap().unwrap();
    assert_eq!(answer, Accepted::New { slot: 0, slots: Some(4), staleness: 1 });
    world.finish(2, |_| false);
    let first = |slot: &(u64, u64, u64)| slot.1;
    let versions: Vec<Vec<u64>> =
        world.lineage.versions.iter().map(|(_, it)| it.iter().map(first).collect()).collect();
    assert_eq!(versions, [vec![4, 8], vec![late.start, 12, 16, 20]]);
}

/// The last round of an epoch has no next round: it waits for all.
#[test]
fn nothing_is_late_for_an_epoch() {
    let mut world = World::new(plan(&[12], 4, QUORUM, Limit::Epochs(2)));
    granted(&mut world, &request("late"));
    for name in ["one", "two"] {
        granted(&mut world, &request(name));
        world.push(name, u64::MAX).unwrap().unwrap();
    }
    world.now += 5_000;
    world.ask(&request("one"));
    assert_eq!(world.run.number(), 0);
    world.push("late", u64::MAX).unwrap().unwrap();
    assert_eq!((world.run.number(), world.run.epoch()), (1, 1));
}

/// After a crash in mid-round only what had not come home is trained again.
#[test]
fn what_was_spooled_is_not_trained_again() {
    for policy in [AVERAGE, QUORUM] {
        let mut world = World::new(plan(&[24], 4, policy, Limit::Epochs(1)));
        for name in ["one", "two", "three", "four", "five"] {
            granted(&mut world, &request(name));
            world.push(name, u64::MAX).unwrap().unwrap();
        }
        // A whole round and two slots of the next are lost with the checkpoint, but spooled.
        assert_eq!((world.run.number(), world.run.samples()), (1, 12));
        world.crash();
        assert_eq!((world.replayed, world.run.number(), world.run.samples()), (5, 1, 12));
        let grant = granted(&mut world, &request("six"));
        assert_eq!(grant.range, 20..24);
        world.push("six", u64::MAX).unwrap().unwrap();
        assert_eq!(*world.status(), Status::Done);
    }
}

/// Local training takes as long as it takes: the deadline follows what was measured.
#[test]
fn a_deadline_that_is_left_out_follows_the_pace() {
    let policy = Policy::Average { slots: 1, quorum: 1, grace: 0, backup: 1, deadline: None };
    let mut run = Run::new(plan(&[12], 4, policy, Limit::Epochs(1)), 1).unwrap();
    let mut work = |begin: Millis, time: Millis, nonce: u128| {
        let decision = run.lease(begin, nonce, &request("slow"));
        let LeaseDecision::Granted(grant) = decision else { panic!("{decision:?}") };
        for now in (begin..=begin + time).step_by(5_000) {
            run.renew(now, nonce).unwrap();
        }
        let (first, base) = (grant.range.start, grant.base);
        run.contribute(
            begin + time,
            Contribution { lease: nonce, sequence: 0, first, count: 4, generation: 1, base },
        )
        .unwrap();
        run.stepped(Ok(()));
    };
    work(0, 900_000, 1);
    work(1_000_000, 2_000_000, 2);
}

/// Every sequence number of a lease is remembered, also behind the newest and after the end.
#[test]
fn a_repeat_gets_the_first_outcome() {
    let mut world = World::new(plan(&[4000], 4, BATCH, Limit::Epochs(1)));
    granted(&mut world, &request("worker"));
    world.now += 5;
    world.push("worker", u64::MAX).unwrap().unwrap();
    let grant = granted(&mut world, &request("worker"));
    while world.push("worker", u64::MAX).is_some() {}
    let outcomes = |run: &Run| (0..64).map(|it| run.outcome(grant.id, it)).collect::<Vec<_>>();
    let first = outcomes(&world.run);
    assert!(first.iter().all(Option::is_some));
    assert!(first.iter().collect::<Vec<_>>().windows(2).any(|pair| pair[0] != pair[1]));
    for message in world.sent.clone() {
        assert_eq!(world.deliver(&message), Ok(Accepted::Repeat));
    }
    assert_eq!(outcomes(&world.run), first);
}

/// Counts for an evaluation that was given up never land in the next one.
#[test]
fn an_evaluation_that_is_given_up_takes_its_leases_along() {
    let mut world = World::new(Plan {
        validation: vec![200],
        test: vec![200],
        ..plan(&[4], 4, BATCH, Limit::Epochs(1))
    });
    granted(&mut world, &request("trainer"));
    world.push("trainer", u64::MAX).unwrap().unwrap();
    assert_eq!(*world.status(), Status::Measuring);
    let grant = granted(&mut world, &request("slow"));
    assert!(matches!(
        grant.assignment,
        Assignment::Evaluate { split: EvaluationSplit::Validation, .. }
    ));
    for _ in 0..5 {
        granted(&mut world, &request("broken"));
        world.give_back("broken", Some("cannot read"));
    }
    assert!(matches!(world.push("slow", u64::MAX), Some(Err(Refusal::Gone(_)))));
    world.finish(1, |_| false);
    assert_eq!(world.run.status(), (&Status::Done, "the final version could not be measured"));
}

/// A worker that dies while it measures holds nobody up for as long as its lease.
#[test]
fn what_the_dead_were_measuring_is_measured_by_others() {
    let mut world =
        World::new(Plan { validation: vec![10], ..plan(&[4], 4, BATCH, Limit::Epochs(1)) });
    granted(&mut world, &request("trainer"));
    world.now += 100;
    world.push("trainer", u64::MAX).unwrap().unwrap();
    let slow = granted(&mut world, &request("slow"));
    let LeaseDecision::Wait { until, .. } = world.ask(&request("quick")) else {
        panic!("the only slice is taken")
    };
    assert!(until < world.now + TIMES.silence / 2, "{until} is late at {}", world.now);
    world.now += 1_500;
    let quick = granted(&mut world, &request("quick"));
    assert_eq!((quick.range.clone(), quick.base), (slow.range.clone(), slow.base));
    let third = world.ask(&request("third"));
    assert!(matches!(third, LeaseDecision::Wait { .. }), "two are enough: {third:?}");
    // Who gives up leaves the slice to the other.
    world.give_back("slow", Some("cannot read"));
    assert!(matches!(world.ask(&request("third")), LeaseDecision::Wait { .. }));
    world.now += 1_500;
    granted(&mut world, &request("third"));
    world.push("quick", u64::MAX).unwrap().unwrap();
    assert!(matches!(world.push("third", u64::MAX), Some(Err(Refusal::Gone(_)))));
    world.finish(1, |_| false);
    assert_eq!(*world.status(), Status::Done);
}

/// Trainers and evaluators each get their own work, wait for it, and hear of the end.
#[test]
fn a_worker_gets_only_what_it_takes() {
    for policy in [BATCH, ASYNC, BOUNDED, SYNC, AVERAGE] {
        let plan = Plan {
            validation: vec![10],
            test: vec![10],
            ..plan(&[12], 4, policy, Limit::Epochs(2))
        };
        let mut world = World::new(plan);
        let trainer = Request { takes: Takes::Training, ..request("trainer") };
        let judge = Request { takes: Takes::Evaluations, ..request("judge") };
        let waits = |decision: LeaseDecision, why: &str| match decision {
            LeaseDecision::Wait { reason, .. } => assert!(reason.contains(why), "{reason}"),
            other => panic!("{other:?}"),
        };
        for epoch in 0..2 {
            waits(world.ask(&judge), "only evaluations");
            while world.run.epoch() == epoch && *world.status() == Status::Running {
                granted(&mut world, &trainer);
                while world.push("trainer", u64::MAX).is_some() {}
            }
            if epoch == 0 {
                // The trainer goes on, though there is something to measure.
                granted(&mut world, &trainer);
                granted(&mut world, &judge);
                world.push("judge", u64::MAX).unwrap().unwrap();
                while world.push("trainer", u64::MAX).is_some() {}
            }
        }
        for _ in 0..2 {
            waits(world.ask(&trainer), "no evaluations");
            granted(&mut world, &judge);
            world.push("judge", u64::MAX).unwrap().unwrap();
        }
        assert_eq!(world.ask(&trainer), LeaseDecision::Done);
        assert_eq!(world.ask(&judge), LeaseDecision::Done);
    }
}

/// Who keeps a version for its measurement is told when there will be none.
#[test]
fn a_measurement_that_training_outran_is_given_up() {
    let plan = Plan { validation: vec![10], ..plan(&[8], 4, ASYNC, Limit::Endless) };
    let mut run = Run::new(Plan { evaluate_every: Some(1), ..plan }, 1).unwrap();
    let started = |run: &mut Run| {
        let notices = run.take_notices();
        let is = |it: &&Notice| matches!(it, Notice::MeasuringStarted { .. });
        let is_not = |it: &&Notice| matches!(it, Notice::MeasuringFailed { .. });
        (notices.iter().filter(is).count(), notices.iter().filter(is_not).count())
    };
    assert!(matches!(run.lease(0, 1, &request("worker")), LeaseDecision::Granted(_)));
    let contribution =
        Contribution { lease: 1, sequence: 0, first: 0, count: 4, generation: 1, base: 0 };
    run.contribute(1, contribution).unwrap();
    assert!(run.step_due().is_some());
    run.stepped(Ok(()));
    assert_eq!(started(&mut run), (1, 0));
    run.stop("enough").unwrap();
    assert_eq!(started(&mut run), (0, 1));
    // A version that was under way when the run was stopped is not counted.
    run.stepped(Ok(()));
    assert_eq!(run.number(), 1);
}

/// What a worker says of its failure is cut to a length that checkpoints can bear.
#[test]
fn a_long_reason_is_cut() {
    let mut world = World::new(Plan { attempts: 1, ..plan(&[4, 4], 4, BATCH, Limit::Epochs(1)) });
    granted(&mut world, &request("worker"));
    world.give_back("worker", Some(&"x".repeat(100_000)));
    assert_eq!(world.run.gaps().count(), 1);
    assert!(world.run.gaps().all(|gap| gap.reason.len() < 400));
    world.finish(1, |_| false);
    assert_eq!(*world.status(), Status::Done);
}

/// Where every slice fails, twenty of them are enough; each may have been tried again meanwhile.
#[test]
fn a_run_that_has_diverged_fails_early() {
    for policy in [BATCH, ASYNC, BOUNDED, SYNC, AVERAGE] {
        let mut world = World::new(plan(&[400, 400], 4, policy, Limit::Epochs(3)));
        for _ in 0..5 {
            granted(&mut world, &request("worker"));
            world.push("worker", u64::MAX).unwrap().unwrap();
        }
        let mut failed = BTreeSet::new();
        while let LeaseDecision::Granted(grant) = world.ask(&request("worker")) {
            failed.insert(grant.range.start);
            world.give_back("worker", Some("the loss is NaN"));
        }
        assert_eq!(failed.len(), 20, "{policy:?}");
        let (status, reason) = world.run.status();
        assert_eq!(*status, Status::Failed);
        assert_eq!(
            reason,
            "20 slices in a row failed, the last with: the loss is NaN (worker); the run has \
             probably diverged: lower the rate"
        );
        // It stays so.
        world.save();
        world.crash();
        assert_eq!(world.ask(&request("worker")), LeaseDecision::Stopped);
    }
}

/// Contributions that are finite themselves, but never lead to a version, are failures too.
#[test]
fn versions_that_are_never_finite_fail_the_run() {
    for policy in [BATCH, ASYNC, BOUNDED, SYNC, AVERAGE] {
        let mut world = World::new(plan(&[400], 4, policy, Limit::Epochs(1)));
        world.poison.extend((0..400).map(|index| (0, index)));
        world.finish(2, |_| false);
        assert_eq!(*world.status(), Status::Failed, "{policy:?}");
        assert!(world.run.status().1.contains("the last with: not finite;"));
        assert_eq!((world.run.number(), world.run.samples()), (0, 0));
        assert!(world.run.gaps().count() < 21, "{policy:?}");
    }
}

/// Bad slices among good ones, and workers that are killed one after the other, fail no run.
#[test]
fn failures_that_are_not_in_a_row_fail_no_run() {
    let large = Policy::Batch { size: 1000 };
    for policy in [BATCH, large] {
        let mut world = World::new(plan(&[400], 4, policy, Limit::Epochs(1)));
        for turn in 0..95 {
            granted(&mut world, &request("worker"));
            match turn % 19 {
                18 => world.push("worker", u64::MAX).map(|answer| answer.unwrap()),
                _ => {
                    world.give_back("worker", Some("cannot decode"));
                    None
                }
            };
        }
        for victim in 0..40 {
            granted(&mut world, &request(&format!("victim-{victim}")));
            world.now += TIMES.silence + 1;
            world.run.tick(world.now);
        }
        assert_eq!(*world.status(), Status::Running, "{policy:?}");
        world.finish(1, |_| false);
        assert_eq!((world.status(), world.run.gaps().count()), (&Status::Done, 0));
    }
}

/// An epoch of which nothing counted is the end, however small it is.
#[test]
fn an_epoch_that_is_skipped_whole_fails_the_run() {
    for policy in [BATCH, ASYNC, BOUNDED, SYNC, AVERAGE] {
        let mut world = World::new(plan(&[10, 7], 4, policy, Limit::Epochs(2)));
        world.finish(1, |run| run.epoch() == 1);
        while let LeaseDecision::Granted(_) = world.ask(&request("worker")) {
            world.give_back("worker", Some("cannot decode"));
        }
        let (status, reason) = world.run.status();
        assert_eq!(*status, Status::Failed, "{policy:?}");
        assert!(reason.starts_with("no slice of epoch 2 counted"), "{reason}");
        assert!(reason.contains("cannot decode (worker)"), "{reason}");
        assert_eq!(world.run.samples(), 17);
    }
}

/// Plans from outside are refused before anything is computed from them.
#[test]
fn plans_that_cannot_be_are_refused() {
    let refused = |plan: Plan| Run::new(plan, 1).is_err();
    assert!(refused(plan(&[], 4, BATCH, Limit::Endless)));
    assert!(refused(plan(&[3, 0], 4, BATCH, Limit::Endless)));
    assert!(refused(plan(&[u64::MAX, 1], 4, BATCH, Limit::Endless)));
    let good = plan(&[4], 4, BATCH, Limit::Endless);
    assert!(refused(Plan { validation: vec![u64::MAX, 1], ..good.clone() }));
    assert!(refused(Plan { test: vec![u64::MAX, 1], ..good }));
    assert!(refused(plan(&[4], 0, BATCH, Limit::Endless)));
    assert!(refused(plan(
        &[4],
        4,
        Policy::Sync { slots: 0, backup: 0, deadline: 1 },
        Limit::Endless
    )));
    let huge = Policy::Sync { slots: u64::MAX, backup: u64::MAX, deadline: 1_000 };
    let mut world = World::new(plan(&[4, 9], u64::MAX, huge, Limit::Epochs(2)));
    world.finish(2, |_| false);
    assert_eq!(world.run.number(), 2, "one round per epoch");
}

/// Many workers, shards and slices: nothing here waits for a clock, but a decision that read the
/// whole epoch would make this take minutes.
#[test]
fn a_large_epoch() {
    let (shards, workers) = (4_000, 500);
    for policy in [
        Policy::Async { damping: 0.5, max_staleness: None },
        Policy::Sync { slots: 400, backup: 2, deadline: 60_000 },
        Policy::Average { slots: 400, quorum: 390, grace: 0, backup: 2, deadline: Some(60_000) },
    ] {
        let mut run = Run::new(plan(&vec![20; shards], 2, policy, Limit::Epochs(1)), 1).unwrap();
        let (mut now, mut nonce) = (0, 0);
        while *run.status().0 != Status::Done {
            let mut held = Vec::new();
            for worker in 0..workers {
                nonce += 1;
                if let LeaseDecision::Granted(grant) =
                    run.lease(now, nonce, &request(&format!("worker-{worker}")))
                {
                    held.push(grant);
                }
            }
            now += 10;
            assert!(now < 3_600_000, "the epoch does not end");
            for grant in held {
                let chunks = (grant.range.end - grant.range.start).div_ceil(2);
                for sequence in 0..chunks {
                    let contribution = Contribution {
                        lease: grant.id,
                        sequence,
                        first: grant.range.start + sequence * 2,
                        count: 2,
                        generation: 1,
                        base: run.number().min(grant.base),
                    };
                    if run.contribute(now, contribution).is_ok() && run.step_due().is_some() {
                        run.stepped(Ok(()));
                    }
                }
            }
        }
        assert_eq!(run.samples(), 20 * shards as u64);
    }
}
