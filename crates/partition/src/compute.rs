//! Which rank orthogonalizes which matrix.

use std::cmp::Reverse;
use std::sync::OnceLock;

use crate::slices::starts;
use crate::turns::Turns;
use crate::{Layout, MatrixId, Params, Placement, Plan, Policy, Rank};

/// Which rank orthogonalizes which matrix.
#[derive(Debug, Clone)]
pub(crate) enum Compute {
    /// Each matrix on one rank.
    Assigned {
        /// The compute owner of each matrix.
        owners: Vec<Rank>,
        /// The matrices, by compute owner, ascending.
        jobs: Vec<MatrixId>,
        /// The first job of each rank, and the number of matrices at the end.
        first_of_rank: Vec<usize>,
    },
    /// By ownership, each rank's jobs found when they are asked for: a stack of many matrices over
    /// many ranks makes more jobs in all than anybody wants to hold.
    Owned(Vec<OnceLock<Vec<MatrixId>>>),
}

impl Compute {
    pub(crate) fn new(params: &Params, layout: &Layout, policy: Policy) -> Self {
        let world = layout.world().get();
        if policy != Policy::AssignOwner {
            return Self::Owned(vec![OnceLock::new(); world]);
        }
        let owners = assign(params, layout);
        let first_of_rank = starts(world, owners.iter().map(|rank| rank.0));
        let mut next = first_of_rank.clone();
        let mut jobs = vec![MatrixId(0); owners.len()];
        for (index, rank) in owners.iter().enumerate() {
            jobs[next[rank.0]] = MatrixId(index);
            next[rank.0] += 1;
        }
        Self::Assigned {
            owners,
            jobs,
            first_of_rank,
        }
    }
}

impl Plan {
    /// The matrices that `rank` orthogonalizes, ascending: under `CopyToOwners` all of each Muon
    /// parameter that it owns a part of, under `ExchangeUpdate` those that it owns a part of, under
    /// `AssignOwner` those that it is the compute owner of.
    ///
    /// # Panics
    /// If the rank is not of this plan's world.
    pub fn jobs(&self, rank: Rank) -> &[MatrixId] {
        match self.compute() {
            Compute::Assigned {
                jobs,
                first_of_rank,
                ..
            } => &jobs[first_of_rank[rank.0]..first_of_rank[rank.0 + 1]],
            Compute::Owned(jobs) => jobs[rank.0].get_or_init(|| self.owned_jobs(rank)),
        }
    }

    /// The one rank that orthogonalizes a matrix, under `AssignOwner`.
    pub fn compute_owner(&self, matrix: MatrixId) -> Option<Rank> {
        match self.compute() {
            Compute::Assigned { owners, .. } => Some(owners[matrix.index()]),
            Compute::Owned(_) => None,
        }
    }

    /// FLOPs of `rank`'s Newton-Schulz iterations.
    pub(crate) fn flops(&self, rank: Rank) -> u64 {
        let cost = |sum: u64, id: &MatrixId| sum.saturating_add(self.params().matrix(*id).1.cost);
        match self.compute() {
            Compute::Assigned { .. } => self.jobs(rank).iter().fold(0, cost),
            Compute::Owned(_) => self.owned_jobs(rank).iter().fold(0, cost),
        }
    }

    fn owned_jobs(&self, rank: Rank) -> Vec<MatrixId> {
        let mut jobs: Vec<MatrixId> = Vec::new();
        for slice in self.layout().rank_slices(rank) {
            if self.policy() == Policy::CopyToOwners {
                jobs.extend(self.params().matrices_of(slice.param));
            } else {
                jobs.extend(
                    self.params()
                        .matrices_touching(slice.param, slice.span)
                        .map(|(id, _)| id),
                );
            }
        }
        jobs.sort_unstable();
        jobs.dedup();
        jobs
    }
}

/// Longest-processing-time over the whole model, each matrix to the least loaded rank. Which of several
/// matrices of one cost a rank gets changes no load: it gets those that it owns most of, so that little
/// of them travels. Under `Whole` an unsplit matrix is its owner's, before all others.
fn assign(params: &Params, layout: &Layout) -> Vec<Rank> {
    let mut owners = vec![Rank(0); params.matrices().len()];
    let mut loads = vec![0u64; layout.world().get()];
    let mut free = Vec::with_capacity(owners.len());
    for (id, param, matrix) in params.matrices() {
        let mut slices = layout.slices_within(param, matrix.span);
        match (slices.next(), slices.next()) {
            (Some(only), None) if layout.placement() == Placement::Whole => {
                owners[id.index()] = only.rank;
                loads[only.rank.0] = loads[only.rank.0].saturating_add(matrix.cost);
            }
            _ => free.push((Reverse(matrix.cost), id)),
        }
    }
    free.sort_unstable();
    let mut turns = Turns::new(&loads);
    for alike in free.chunk_by(|(a, _), (b, _)| a == b) {
        let Reverse(cost) = alike[0].0;
        turns.deal(alike.len(), cost);
        let mut parts: Vec<_> = alike
            .iter()
            .flat_map(|(_, id)| largest_parts(params, layout, *id))
            .collect();
        parts.sort_unstable();
        let mut taken = vec![false; alike.len()];
        for (_, id, rank) in parts {
            let index = alike.partition_point(|(_, other)| *other < id);
            if !taken[index] && turns.take(rank) {
                owners[id.index()] = rank;
                taken[index] = true;
            }
        }
        let mut left = turns.end();
        for ((_, id), _) in alike.iter().zip(taken).filter(|(_, taken)| !taken) {
            owners[id.index()] = left.next().expect("a turn for each matrix");
        }
    }
    owners
}

/// The two largest parts of a matrix, as they are compared: of one in many parts most travels whoever
/// computes it, so no others are tried.
fn largest_parts(
    params: &Params,
    layout: &Layout,
    id: MatrixId,
) -> impl Iterator<Item = (Reverse<usize>, MatrixId, Rank)> {
    let (param, matrix) = params.matrix(id);
    let mut largest = [None; 2];
    for slice in layout.slices_within(param, matrix.span) {
        let part = Some((slice.span.len(), Reverse(slice.rank)));
        if part > largest[0] {
            largest = [part, largest[0]];
        } else if part > largest[1] {
            largest[1] = part;
        }
    }
    let parts = largest.into_iter().flatten();
    parts.map(move |(len, Reverse(rank))| (Reverse(len), id, rank))
}
