use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::Rank;

/// What each rank has to do, with the least loaded at hand: longest-processing-time gives each
/// job, costliest first, to that rank, and ends at most 4/3 − 1/(3W) above the optimum (Graham,
/// "Bounds on multiprocessing timing anomalies", 1969).
#[derive(Debug)]
pub(crate) struct Loads {
    loads: Vec<u64>,
    /// Every rank at its load; and at loads that it had, which are passed over.
    heap: BinaryHeap<Reverse<(u64, Rank)>>,
}

impl Loads {
    /// Ranks that start with these loads.
    pub(crate) fn new(loads: Vec<u64>) -> Self {
        let heap = loads
            .iter()
            .enumerate()
            .map(|(rank, load)| Reverse((*load, Rank(rank))))
            .collect();
        Self { loads, heap }
    }

    /// The least loaded rank; the lowest of those.
    pub(crate) fn least(&mut self) -> Rank {
        loop {
            let Reverse((load, rank)) = *self
                .heap
                .peek()
                .expect("every rank is in the heap at its load");
            if self.loads[rank.0] == load {
                return rank;
            }
            self.heap.pop();
        }
    }

    /// What a rank has to do.
    pub(crate) fn load(&self, rank: Rank) -> u64 {
        self.loads[rank.0]
    }

    /// Gives a rank a job.
    pub(crate) fn add(&mut self, rank: Rank, cost: u64) {
        let load = self.loads[rank.0].saturating_add(cost);
        if load != self.loads[rank.0] {
            self.loads[rank.0] = load;
            self.heap.push(Reverse((load, rank)));
        }
    }
}
