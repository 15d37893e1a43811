//! What a rank keeps of reduced gradients, and where.

use crate::bucket_plan::{copied_to_owners, split};
use crate::{BlockId, BucketId, ParamId, Plan, Policy, Rank, Route, Span};

/// A run of a reduced buffer that a rank keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kept {
    /// The elements, in the buffer.
    pub from: Span,
    /// Where they go.
    pub into: Place,
}

/// Where a rank keeps reduced gradients: an element in one of them, never in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// In its shard of a block.
    Shard {
        /// The block.
        block: BlockId,
        /// The first element, in the shard.
        at: usize,
    },
    /// In a whole gradient.
    Whole {
        /// The parameter.
        param: ParamId,
        /// The first element, in the parameter.
        at: usize,
    },
}

impl Place {
    const fn shift(self, by: usize) -> Self {
        match self {
            Self::Shard { block, at } => Self::Shard { block, at: at + by },
            Self::Whole { param, at } => Self::Whole { param, at: at + by },
        }
    }
}

impl Plan {
    /// What `rank` keeps of a bucket's reduced buffer, ascending in the buffer, in as few runs as
    /// can be; padding is in none.
    pub fn kept(&self, bucket: BucketId, rank: Rank) -> Vec<Kept> {
        let mut kept: Vec<Kept> = Vec::new();
        for (at, slice) in self.buckets()[bucket.index()].slices(self.layout()) {
            let into = if self.keeps_whole(slice.param, rank) {
                Place::Whole {
                    param: slice.param,
                    at: slice.span.start,
                }
            } else if slice.rank == rank {
                Place::Shard {
                    block: slice.block,
                    at: slice.at,
                }
            } else {
                continue;
            };
            let from = Span::of_len(at, slice.span.len());
            match kept.last_mut() {
                Some(last)
                    if last.from.end == from.start && last.into.shift(last.from.len()) == into =>
                {
                    last.from.end = from.end;
                }
                _ => kept.push(Kept { from, into }),
            }
        }
        kept
    }

    /// The parameters whose whole reduced gradient `rank` keeps, ascending.
    pub fn replicas(&self, rank: Rank) -> Vec<ParamId> {
        if self.route() == Route::AllReduce {
            let filled = self.params().iter().filter(|(_, param)| param.elems() > 0);
            return filled.map(|(id, _)| id).collect();
        }
        self.owned(rank, |param| self.copied_to_owners(param))
    }

    /// The parameters whose whole momentum `rank` keeps, ascending: under `CopyToOwners`, the
    /// split Muon parameters that it owns a part of.
    pub fn full_momentum(&self, rank: Rank) -> Vec<ParamId> {
        self.owned(rank, |param| {
            self.policy() == Policy::CopyToOwners && split(self.params(), self.layout(), param)
        })
    }

    /// The parameters of some kind that `rank` owns a part of, ascending.
    fn owned(&self, rank: Rank, kind: impl Fn(ParamId) -> bool) -> Vec<ParamId> {
        let mut owned: Vec<_> = self
            .layout()
            .rank_slices(rank)
            .map(|slice| slice.param)
            .collect();
        owned.sort_unstable();
        owned.dedup();
        owned.retain(|param| kind(*param));
        owned
    }

    fn keeps_whole(&self, param: ParamId, rank: Rank) -> bool {
        self.route() == Route::AllReduce
            || self.copied_to_owners(param)
                && self
                    .layout()
                    .slices(param)
                    .iter()
                    .any(|slice| slice.rank == rank)
    }

    fn copied_to_owners(&self, param: ParamId) -> bool {
        copied_to_owners(
            self.params(),
            self.layout(),
            self.route(),
            self.policy(),
            param,
        )
    }
}
