//! Which ranks take jobs of one cost, where it is open which job is whose.

use std::collections::BTreeMap;

use crate::Rank;
use crate::lpt::Loads;

/// The turns of ranks to take a job of one cost, as many as longest-processing-time gives them: any
/// order of taking them ends at the same loads, but for which of several ranks of one load has a turn
/// more.
#[derive(Debug)]
pub(crate) struct Turns {
    loads: Loads,
    cost: u64,
    /// Turns that a rank has whatever happens.
    sure: BTreeMap<Rank, usize>,
    /// The load before the last turns. Not all ranks that had it may have one of these.
    last: u64,
    /// Who has one of the last turns until another rank of that load takes it, ascending.
    waiting: Vec<Rank>,
}

impl Turns {
    /// Of ranks that start with these loads; at least one.
    pub(crate) fn new(loads: &[u64]) -> Self {
        Self {
            loads: Loads::new(loads),
            cost: 0,
            sure: BTreeMap::new(),
            last: 0,
            waiting: Vec::new(),
        }
    }

    /// Deals the turns of so many jobs of one cost.
    pub(crate) fn deal(&mut self, jobs: usize, cost: u64) {
        self.cost = cost;
        for _ in 0..jobs {
            let (load, rank) = self.loads.least();
            if load > self.last {
                self.settle();
                self.last = load;
            }
            self.waiting.push(rank);
            self.loads.add(rank, cost);
        }
    }

    /// Takes a turn of a rank, if it has one.
    pub(crate) fn take(&mut self, rank: Rank) -> bool {
        if let Some(sure) = self.sure.get_mut(&rank).filter(|sure| **sure > 0) {
            *sure -= 1;
            return true;
        }
        if let Ok(own) = self.waiting.binary_search(&rank) {
            self.waiting.remove(own);
            return true;
        }
        if self.loads.load(rank) != self.last {
            return false;
        }
        let Some(other) = self.waiting.pop() else {
            return false;
        };
        self.loads.set(other, self.last);
        self.loads.add(rank, self.cost);
        true
    }

    /// Takes all turns that are left: the sure ones by rank, then the others.
    pub(crate) fn end(&mut self) -> impl Iterator<Item = Rank> + use<> {
        let sure = std::mem::take(&mut self.sure).into_iter();
        let sure = sure.flat_map(|(rank, turns)| std::iter::repeat_n(rank, turns));
        sure.chain(std::mem::take(&mut self.waiting))
    }

    /// Other turns come after these, so they are sure.
    fn settle(&mut self) {
        for rank in self.waiting.drain(..) {
            *self.sure.entry(rank).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_ranks_that_are_alike_those_have_a_turn_that_take_it() {
        let mut turns = Turns::new(&[5, 0, 5, 5]);
        // Rank 1 has one at 0 whatever happens, and after that all four are alike, for two turns.
        turns.deal(3, 5);
        assert!(turns.take(Rank(3)));
        assert!(!turns.take(Rank(3)));
        assert!(turns.take(Rank(1)));
        assert_eq!(turns.end().collect::<Vec<_>>(), [Rank(0)]);
        // Ranks 1 and 2 have 5 now.
        turns.deal(2, 1);
        assert!(!turns.take(Rank(0)));
        assert!(turns.take(Rank(2)));
        assert_eq!(turns.end().collect::<Vec<_>>(), [Rank(1)]);
    }

    #[test]
    fn a_job_without_cost_is_for_any_of_the_least_loaded() {
        let mut turns = Turns::new(&[0, 3, 0]);
        turns.deal(3, 0);
        assert!(!turns.take(Rank(1)));
        assert!(turns.take(Rank(2)));
        assert!(turns.take(Rank(2)));
        assert_eq!(turns.end().collect::<Vec<_>>(), [Rank(0)]);
    }
}
