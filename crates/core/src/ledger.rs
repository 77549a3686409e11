//! The ledger: for every position of the epoch under way, whether it is free, taken, applied or
//! skipped.
//!
//! Taken positions (leased or pending) are those that are in none of the three sets here; whoever
//! takes them must give them back, apply them or skip them. Only applied and skipped ones are kept
//! in checkpoints: after a crash everything else is free again, and so are the parameters without
//! it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::position::{Order, Place};
use crate::{Plan, PlanError};

/// Positions applied by one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval {
    /// The first position.
    pub start: u64,
    /// One behind the last.
    pub end: u64,
    /// The number of the version that applied them.
    pub version: u64,
}

/// Positions that were given up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    /// In which epoch.
    pub epoch: u64,
    /// The first position.
    pub start: u64,
    /// One behind the last.
    pub end: u64,
    /// Why.
    pub reason: String,
}

/// What a checkpoint keeps of a ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerSnapshot {
    /// The epoch under way.
    pub epoch: u64,
    /// What was applied in it.
    pub applied: Vec<Interval>,
    /// What was skipped in any epoch.
    pub gaps: Vec<Gap>,
}

/// Free positions that failed before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Retry {
    end: u64,
    failures: u32,
}

/// Positions on their way out of the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) range: Range<u64>,
    pub(crate) failures: u32,
    pub(crate) place: Place,
}

/// Which free positions a worker can and would rather have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish<'request> {
    /// Positions that are up now.
    pub(crate) window: (u64, u64),
    /// At most so many.
    pub(crate) most: u64,
    /// The only shards the worker can read.
    pub(crate) only: Option<&'request BTreeSet<usize>>,
    /// Shards the worker has at hand.
    pub(crate) has: &'request BTreeSet<usize>,
    /// Shards that others are working on.
    pub(crate) busy: &'request BTreeSet<usize>,
}

#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    epoch: u64,
    order: Order,
    free: BTreeMap<u64, u64>,
    retry: BTreeMap<u64, Retry>,
    applied: BTreeMap<u64, Interval>,
    skipped: BTreeMap<u64, Gap>,
    /// Positions neither applied nor skipped.
    open: u64,
    /// Positions in `free` and `retry`.
    unclaimed: u64,
    /// How often the free positions were searched.
    #[cfg(test)]
    looked: std::cell::Cell<u64>,
}

impl Ledger {
    pub(crate) fn new(plan: &Plan, epoch: u64) -> Self {
        let order = plan.order(epoch);
        let positions = order.positions();
        let free = BTreeMap::from([(0, positions)]);
        Self {
            epoch,
            order,
            free,
            retry: BTreeMap::new(),
            applied: BTreeMap::new(),
            skipped: BTreeMap::new(),
            open: positions,
            unclaimed: positions,
            #[cfg(test)]
            looked: std::cell::Cell::new(0),
        }
    }

    pub(crate) fn restore(plan: &Plan, snapshot: &LedgerSnapshot) -> Result<Self, PlanError> {
        let mut ledger = Self::new(plan, snapshot.epoch);
        for interval in &snapshot.applied {
            ledger.cut(interval.start..interval.end)?;
            ledger.applied(interval.start..interval.end, interval.version);
        }
        for gap in snapshot.gaps.iter().filter(|gap| gap.epoch == snapshot.epoch) {
            ledger.cut(gap.start..gap.end)?;
            ledger.skip(gap.start..gap.end, &gap.reason);
        }
        Ok(ledger)
    }

    /// Removes a range from the free positions, wherever the cuts fall.
    fn cut(&mut self, range: Range<u64>) -> Result<(), PlanError> {
        let wrong = |what: &str| {
            PlanError::Ledger(format!("positions {}..{} {what}", range.start, range.end))
        };
        if range.start >= range.end || range.end > self.order.positions() {
            return Err(wrong("lie outside of the epoch"));
        }
        let mut at = range.start;
        while at < range.end {
            let found = self.free.range(..=at).next_back().map(|(&start, &end)| (start, end));
            let Some((start, end)) = found.filter(|&(_, end)| end > at) else {
                return Err(wrong("are there twice"));
            };
            let until = end.min(range.end);
            self.free.remove(&start);
            if start < at {
                self.free.insert(start, at);
            }
            if until < end {
                self.free.insert(until, end);
            }
            self.unclaimed -= until - at;
            at = until;
        }
        Ok(())
    }

    /// Takes a range that is wholly free and never failed; says whether it was.
    pub(crate) fn claim(&mut self, range: Range<u64>) -> bool {
        let around = self.free.range(..=range.start).next_back();
        around.is_some_and(|(_, &end)| end >= range.end) && self.cut(range).is_ok()
    }

    pub(crate) fn snapshot(&self, former_gaps: &[Gap]) -> LedgerSnapshot {
        LedgerSnapshot {
            epoch: self.epoch,
            applied: self.applied.values().copied().collect(),
            gaps: former_gaps.iter().chain(self.skipped()).cloned().collect(),
        }
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn order(&self) -> &Order {
        &self.order
    }

    pub(crate) fn skipped(&self) -> impl Iterator<Item = &Gap> {
        self.skipped.values()
    }

    /// Positions applied or skipped in this epoch.
    pub(crate) fn settled(&self) -> u64 {
        self.order.positions() - self.open
    }

    /// Whether any position of this epoch is part of a version.
    pub(crate) fn any_applied(&self) -> bool {
        !self.applied.is_empty()
    }

    /// Positions that are not yet applied or skipped.
    pub(crate) fn open(&self) -> u64 {
        self.open
    }

    /// The first position that is neither applied nor skipped.
    pub(crate) fn first_open(&self) -> Option<u64> {
        let mut settled: Vec<_> = self
            .applied
            .values()
            .map(|interval| (interval.start, interval.end))
            .chain(self.skipped().map(|gap| (gap.start, gap.end)))
            .collect();
        settled.sort_unstable();
        let mut first = 0;
        for (start, end) in settled {
            if start > first {
                break;
            }
            first = first.max(end);
        }
        (first < self.order.positions()).then_some(first)
    }

    /// Positions of a window that are not yet applied or skipped.
    pub(crate) fn open_in(&self, (start, end): (u64, u64)) -> u64 {
        let reaches_in = |&(_, until): &(u64, u64)| until > start;
        let applied = self.applied.range(..end).rev().map(|(_, it)| (it.start, it.end));
        let skipped = self.skipped.range(..end).rev().map(|(_, gap)| (gap.start, gap.end));
        let settled = applied.take_while(reaches_in).chain(skipped.take_while(reaches_in));
        let settled: u64 = settled.map(|(from, until)| until.min(end) - from.max(start)).sum();
        end - start - settled
    }

    /// Every range that is not on its way, with what it is.
    pub(crate) fn claims(&self) -> Vec<(u64, u64, &'static str)> {
        let free = self.free.iter().map(|(&start, &end)| (start, end, "free"));
        let retry = self.retry.iter().map(|(&start, retry)| (start, retry.end, "free"));
        let applied = self.applied.values().map(|it| (it.start, it.end, "applied"));
        let skipped = self.skipped.values().map(|gap| (gap.start, gap.end, "skipped"));
        free.chain(retry).chain(applied).chain(skipped).collect()
    }

    /// Whether the sums agree with the ranges.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let (mut unclaimed, mut open) = (0, self.order.positions());
        for (start, end, state) in self.claims() {
            match state {
                "free" => unclaimed += end - start,
                _ => open -= end - start,
            }
        }
        if (unclaimed, open) != (self.unclaimed, self.open) {
            return Err(format!(
                "{unclaimed} free and {open} open positions, counted {} and {}",
                self.unclaimed, self.open
            ));
        }
        Ok(())
    }

    /// Positions that nobody has.
    pub(crate) fn unclaimed(&self) -> u64 {
        self.unclaimed
    }

    /// Whether nobody has some position of a window.
    pub(crate) fn window_unclaimed(&self, window: (u64, u64)) -> bool {
        self.free.range(..window.1).next_back().is_some_and(|(_, &end)| end > window.0)
            || self.retry.range(..window.1).next_back().is_some_and(|(_, r)| r.end > window.0)
    }

    /// Takes free positions of one stretch: first those that never failed, in a shard the worker has
    /// at hand, then in one that nobody works on, then in any.
    pub(crate) fn take(&mut self, wish: Wish<'_>) -> Option<Taken> {
        if let Some((start, place)) = self.choose(wish) {
            let (_, &end) = self.free.range(..=start).next_back()?;
            let most = start.saturating_add(wish.most);
            let until = end.min(most).min(wish.window.1).min(place.end);
            self.cut(start..until).ok()?;
            return Some(Taken { range: start..until, failures: 0, place });
        }
        let can_read = |shard: usize| wish.only.is_none_or(|only| only.contains(&shard));
        let readable =
            |start: u64| self.order.place_of(start).filter(|place| can_read(place.shard));
        let (start, place) = self
            .retry
            .range(wish.window.0..wish.window.1)
            .filter_map(|(&start, retry)| Some((retry.failures, start, readable(start)?)))
            .min_by_key(|&(failures, start, _)| (failures, start))
            .map(|(_, start, place)| (start, place))?;
        let Retry { end, failures } = self.retry.remove(&start)?;
        let until = end.min(start.saturating_add(wish.most));
        if until < end {
            self.retry.insert(until, Retry { end, failures });
        }
        self.unclaimed -= until - start;
        Some(Taken { range: start..until, failures, place })
    }

    /// The free range to take from. Looks at the shards that the wish names or that are busy, never
    /// at all of them.
    fn choose(&self, wish: Wish<'_>) -> Option<(u64, Place)> {
        let (first, end) = wish.window;
        let free_in = |shard: usize| {
            self.order.places_of(shard, wish.window).find_map(|place| {
                let start = self.first_free(place.start.max(first), place.end.min(end))?;
                Some((start, place))
            })
        };
        let can_read = |shard: &&usize| wish.only.is_none_or(|only| only.contains(shard));
        let at_hand = wish.has.iter().filter(can_read).filter_map(|&shard| free_in(shard));
        if let Some(found) = at_hand.min_by_key(|&(start, _)| start) {
            return Some(found);
        }
        if let Some(only) = wish.only {
            return only
                .iter()
                .filter_map(|&shard| Some((wish.busy.contains(&shard), free_in(shard)?)))
                .min_by_key(|&(busy, (start, _))| (busy, start))
                .map(|(_, found)| found);
        }
        let mut busy = None;
        let mut at = first;
        while let Some(start) = self.first_free(at, end) {
            let place = self.order.place_of(start)?;
            if !wish.busy.contains(&place.shard) {
                return Some((start, place));
            }
            busy = busy.or(Some((start, place)));
            at = place.end;
        }
        busy
    }

    fn first_free(&self, from: u64, until: u64) -> Option<u64> {
        #[cfg(test)]
        self.looked.set(self.looked.get() + 1);
        if from >= until {
            return None;
        }
        if self.free.range(..from).next_back().is_some_and(|(_, &end)| end > from) {
            return Some(from);
        }
        self.free.range(from..until).next().map(|(&start, _)| start)
    }

    /// Gives taken positions back.
    pub(crate) fn release(&mut self, range: Range<u64>, failures: u32) {
        if range.is_empty() {
            return;
        }
        self.unclaimed += range.end - range.start;
        if failures > 0 {
            self.retry.insert(range.start, Retry { end: range.end, failures });
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        let before = self.free.range(..start).next_back().map(|(&s, &e)| (s, e));
        if let Some((s, e)) = before
            && e == start
        {
            self.free.remove(&s);
            start = s;
        }
        if let Some(e) = self.free.remove(&end) {
            end = e;
        }
        self.free.insert(start, end);
    }

    /// Taken positions are part of a version now.
    pub(crate) fn applied(&mut self, range: Range<u64>, version: u64) {
        self.open -= range.end - range.start;
        let Range { mut start, mut end } = range;
        // Neighbours of one version are joined, so that what a checkpoint says does not depend on
        // the order of arrival.
        if let Some((_, known)) = self.applied.range(..start).next_back()
            && (known.end, known.version) == (start, version)
        {
            start = known.start;
        }
        if let Some(known) = self.applied.get(&end).copied()
            && known.version == version
        {
            self.applied.remove(&end);
            end = known.end;
        }
        self.applied.insert(start, Interval { start, end, version });
    }

    /// Taken positions are given up for good.
    pub(crate) fn skip(&mut self, range: Range<u64>, reason: &str) -> Gap {
        self.open -= range.end - range.start;
        let gap = Gap {
            epoch: self.epoch,
            start: range.start,
            end: range.end,
            reason: reason.to_owned(),
        };
        self.skipped.insert(gap.start, gap.clone());
        gap
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LeaseTimes, Limit, Policy};

    static NONE: BTreeSet<usize> = BTreeSet::new();

    fn wish(most: u64) -> Wish<'static> {
        Wish { window: (0, u64::MAX), most, only: None, has: &NONE, busy: &NONE }
    }

    fn plan(shards: &[u64]) -> Plan {
        Plan {
            seed: 0,
            shards: shards.to_vec(),
            validation: Vec::new(),
            test: Vec::new(),
            chunk: 4,
            policy: Policy::Batch { size: 1 },
            limit: Limit::Epochs(1),
            lease: LeaseTimes::default(),
            evaluate_every: None,
            attempts: 5,
            turns: false,
        }
    }

    fn ledger(shards: &[u64]) -> Ledger {
        Ledger::new(&plan(shards), 0)
    }

    #[test]
    fn positions_go_out_and_come_back() {
        let mut ledger = ledger(&[10, 10]);
        let first = ledger.take(wish(4)).expect("free positions");
        assert_eq!(first.range, 0..4);
        let second = ledger.take(wish(100)).expect("free positions");
        assert_eq!(second.range, 4..10, "a slice ends with its shard");
        assert_eq!(ledger.unclaimed(), 10);
        ledger.release(0..4, 0);
        ledger.release(4..10, 0);
        assert_eq!(ledger.free.len(), 1, "neighbours are joined");
        assert_eq!(ledger.unclaimed(), 20);
    }

    #[test]
    fn what_failed_comes_last_and_keeps_its_count() {
        let mut ledger = ledger(&[8]);
        let taken = ledger.take(wish(4)).expect("free positions");
        ledger.release(taken.range, 2);
        assert_eq!(
            ledger.take(wish(4)).map(|taken| (taken.range, taken.failures)),
            Some((4..8, 0))
        );
        assert_eq!(
            ledger.take(wish(4)).map(|taken| (taken.range, taken.failures)),
            Some((0..4, 2))
        );
        assert_eq!(ledger.take(wish(4)), None);
    }

    #[test]
    fn a_worker_gets_what_it_can_read_and_rather_what_it_has() {
        let mut ledger = ledger(&[4, 4, 4]);
        let has = ledger.take(Wish { has: &[2].into(), ..wish(2) }).expect("free positions");
        assert_eq!(has.place.shard, 2);
        let only = ledger.take(Wish { only: Some(&[1].into()), has: &[2].into(), ..wish(2) });
        assert_eq!(only.map(|taken| taken.place.shard), Some(1));
        let idle = ledger.take(Wish { busy: &[1, 2].into(), ..wish(2) });
        assert_eq!(idle.map(|taken| taken.place.shard), Some(0));
        assert_eq!(ledger.take(Wish { only: Some(&NONE), ..wish(2) }), None);
    }

    #[test]
    fn a_snapshot_brings_back_what_was_settled_and_frees_the_rest() {
        let plan = Plan { seed: 3, ..plan(&[6, 6]) };
        let mut ledger = Ledger::new(&plan, 5);
        let taken = ledger.take(wish(4)).expect("free positions");
        ledger.applied(taken.range.clone(), 9);
        let gone = ledger.take(wish(2)).expect("free positions");
        ledger.skip(gone.range, "poisoned");
        ledger.take(wish(2)).expect("free positions");
        let snapshot = ledger.snapshot(&[]);
        let again = Ledger::restore(&plan, &snapshot).expect("its own snapshot");
        assert_eq!(again.open(), 6);
        assert_eq!(again.unclaimed(), 6, "what was only leased is free again");
        assert_eq!(again.snapshot(&[]), snapshot);
    }

    #[test]
    fn what_a_version_applied_reads_the_same_in_any_order() {
        let parts = [0..2, 2..4, 4..6, 8..10];
        let snapshot = |order: [usize; 4]| {
            let mut ledger = ledger(&[10]);
            ledger.take(wish(10)).expect("free positions");
            for part in order {
                ledger.applied(parts[part].clone(), 1);
            }
            ledger.snapshot(&[]).applied
        };
        let expected = [(0, 6), (8, 10)].map(|(start, end)| Interval { start, end, version: 1 });
        for order in [[0, 1, 2, 3], [2, 1, 0, 3], [3, 0, 2, 1], [1, 3, 2, 0]] {
            assert_eq!(snapshot(order), expected);
        }
    }

    #[test]
    fn what_is_open_of_a_window() {
        let mut ledger = ledger(&[20]);
        ledger.take(wish(20)).expect("free positions");
        ledger.applied(0..6, 1);
        ledger.skip(8..12, "poisoned");
        let open =
            [(0, 20), (4, 10), (6, 8), (8, 12), (10, 11), (12, 20)].map(|it| ledger.open_in(it));
        assert_eq!(open, [10, 2, 2, 0, 0, 8]);
    }

    /// An epoch of 200,000 slices in 10,000 shards, 500 of them busy: what a decision looks at
    /// depends on neither.
    #[test]
    fn a_decision_does_not_read_the_whole_epoch() {
        let mut ledger = ledger(&[20; 10_000]);
        let mut busy = BTreeSet::new();
        for _ in 0..500 {
            let taken = ledger.take(Wish { busy: &busy, ..wish(1) }).expect("free positions");
            assert!(busy.insert(taken.place.shard), "an idle shard comes first");
        }
        for many in 0..1000 {
            let before = ledger.looked.get();
            // Places that the other wishes do not come to.
            let shard_at = |at| ledger.order.place_of_slot(at).expect("a slot").shard;
            let has = [shard_at(9999 - many)].into();
            let only = (0..10).map(|at| shard_at(5000 + many + at)).collect();
            ledger.take(wish(1)).expect("free positions");
            ledger.take(Wish { has: &has, busy: &busy, ..wish(1) }).expect("free positions");
            ledger.take(Wish { only: Some(&only), ..wish(1) }).expect("free positions");
            assert!(ledger.looked.get() - before <= 1 + 1 + 10);
            ledger.take(Wish { busy: &busy, ..wish(1) }).expect("free positions");
            assert!(ledger.looked.get() - before <= 12 + 500 + 1, "busy shards are stepped over");
        }
    }

    #[test]
    fn a_ledger_that_is_not_the_runs_is_refused() {
        let interval = |start, end| Interval { start, end, version: 1 };
        for applied in [vec![interval(0, 99)], vec![interval(0, 4), interval(2, 6)]] {
            let snapshot = LedgerSnapshot { epoch: 0, applied, gaps: vec![] };
            assert!(Ledger::restore(&plan(&[10]), &snapshot).is_err());
        }
    }
}
