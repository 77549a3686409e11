//! What must hold after every event, whatever happened: for tests, and for whoever doubts.

use crate::run::{Run, Status};

impl Run {
    /// Checks that every position of the epoch is exactly one of free, leased, pending, applied
    /// and skipped, and that the sums kept along the way agree. Reads everything: not for the hot
    /// path.
    pub fn audit(&self) -> Result<(), String> {
        // A run that ended has dropped its leases; nothing is handed out any more.
        if !matches!(self.status, Status::Running | Status::Paused) {
            return if self.pending.is_empty() && self.leases.values().all(|it| !it.trains()) {
                Ok(())
            } else {
                Err("work is left in a run that takes none".to_owned())
            };
        }
        self.ledger.audit()?;
        let mut claims: Vec<_> = self.ledger.claims();
        let pending = self.pending.iter();
        claims.extend(pending.map(|it| (it.first, it.first + it.count, "pending")));
        let mut leased: Vec<_> = self
            .leases
            .values()
            .filter(|lease| lease.trains())
            .map(|lease| (lease.cursor, lease.end, "leased"))
            .collect();
        if let Some(round) = &self.round {
            let (start, end) = round.reach;
            let under_way = claims.iter().filter(|claim| claim.2 == "pending").chain(&leased);
            if let Some(stray) = under_way.clone().find(|it| it.0 < start || it.1 > end) {
                return Err(format!("{stray:?} lies outside of the round {round:?}"));
            }
        }
        // Of two leases on the same positions the longer one counts.
        leased.sort_unstable_by_key(|&(start, end, _)| (start, std::cmp::Reverse(end)));
        leased.dedup_by_key(|claim| claim.0);
        claims.extend(leased);
        claims.sort_unstable();
        let mut next = 0;
        for claim in &claims {
            if claim.0 != next || claim.1 <= claim.0 {
                return Err(format!("position {next} is not covered once: {claims:?}"));
            }
            next = claim.1;
        }
        if next != self.ledger.order().positions() {
            return Err(format!("positions from {next} on are nobody's: {claims:?}"));
        }
        if self.evaluation.is_none() && self.leases.values().any(|lease| !lease.trains()) {
            return Err("a lease on an evaluation that is over".to_owned());
        }
        Ok(())
    }
}
