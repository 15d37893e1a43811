//! Longest-processing-time: jobs to ranks, each to the least loaded.

use crate::Rank;

/// What each rank has to do, with the least loaded at hand: longest-processing-time gives each
/// job, costliest first, to that rank, and ends at most 4/3 − 1/(3W) above the optimum (Graham,
/// "Bounds on multiprocessing timing anomalies", 1969).
#[derive(Debug)]
pub(crate) struct Loads {
    /// A tournament: W inner nodes of which the first is not used, then one leaf a rank; a node is
    /// the lesser of its children, at twice its index and one more. A load stands above its rank
    /// in one number, because comparing pairs takes branches that no processor foresees.
    nodes: Vec<u128>,
}

impl Loads {
    /// Ranks that start with these loads; at least one.
    pub(crate) fn new(loads: &[u64]) -> Self {
        let mut nodes = vec![0; loads.len()];
        nodes.extend(
            loads
                .iter()
                .enumerate()
                .map(|(rank, load)| node(*load, Rank(rank))),
        );
        for index in (1..loads.len()).rev() {
            nodes[index] = nodes[2 * index].min(nodes[2 * index + 1]);
        }
        Self { nodes }
    }

    /// The least loaded rank, of several the lowest, and its load.
    pub(crate) fn least(&self) -> (u64, Rank) {
        let least = self.nodes[1];
        ((least >> 64) as u64, Rank(least as u64 as usize))
    }

    /// What a rank has to do.
    pub(crate) fn load(&self, rank: Rank) -> u64 {
        (self.nodes[self.nodes.len() / 2 + rank.0] >> 64) as u64
    }

    /// Gives a rank a job.
    pub(crate) fn add(&mut self, rank: Rank, cost: u64) {
        self.set(rank, self.load(rank).saturating_add(cost));
    }

    /// Gives a rank other jobs.
    pub(crate) fn set(&mut self, rank: Rank, load: u64) {
        let mut index = self.nodes.len() / 2 + rank.0;
        self.nodes[index] = node(load, rank);
        while index > 1 {
            index /= 2;
            self.nodes[index] = self.nodes[2 * index].min(self.nodes[2 * index + 1]);
        }
    }
}

fn node(load: u64, rank: Rank) -> u128 {
    (u128::from(load) << 64) + rank.0 as u128
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_is_the_least_at_any_number_of_ranks() {
        for world in 1..=17 {
            let mut loads: Vec<u64> = (0..world).map(|rank| rank * 7 % 5).collect();
            let mut tournament = Loads::new(&loads);
            for step in 0..100 {
                let (load, rank) = tournament.least();
                assert_eq!(loads.iter().min(), Some(&load));
                assert_eq!(loads.iter().position(|other| *other == load), Some(rank.0));
                // To the least and to any other.
                for (rank, cost) in [(rank, step % 4), (Rank((step % world) as usize), step % 3)] {
                    tournament.add(rank, cost);
                    loads[rank.0] += cost;
                    assert_eq!(tournament.load(rank), loads[rank.0]);
                }
            }
        }
    }
}
