//! What a rank holds, in bytes.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::iter::Sum;
use std::ops::Add;

use crate::predict::exchange_wire;
use crate::{
    BucketPlan, ParamId, Params, Plan, Rank, Route, SpaceId, Span, Stage, Terms, UpdateGroup, Wire,
};

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    const fn of(elems: usize, wire: Wire) -> Self {
        Self(elems as u64 * wire.bytes() as u64)
    }
}

impl Add for Bytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(bytes: I) -> Self {
        bytes.fold(Self(0), Self::add)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0)
    }
}

/// What a rank holds, by purpose. Shards count with their padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Memory {
    /// The model's weights, whole, in their own types.
    pub weights: Bytes,
    /// The fp32 masters of its shards.
    pub masters: Bytes,
    /// The fp32 momentum of its Muon shards; of a parameter whose momentum it keeps whole, that
    /// instead of its slices.
    pub momentum: Bytes,
    /// Both fp32 moments of its AdamW shards.
    pub moments: Bytes,
    /// The fp32 reduced gradients of its shards; of a parameter whose gradient it keeps whole, that
    /// instead of its slices.
    pub reduced_gradients: Bytes,
    /// Stage 1 with several micro-batches: the fp32 accumulators of all elements.
    pub unreduced_gradients: Bytes,
    /// The wire buffers: the largest bucket of each flat space, being filled, and the largest of
    /// all, being reduced.
    pub buckets: Bytes,
    /// The largest buffer of an exchange, or the windows of gathered weights: the two largest of
    /// each flat space, as one is copied while the next is gathered.
    pub staging: Bytes,
}

impl Memory {
    /// All of it.
    pub fn total(&self) -> Bytes {
        let Self {
            weights,
            masters,
            momentum,
            moments,
            reduced_gradients,
            unreduced_gradients,
            buckets,
            staging,
        } = *self;
        [
            weights,
            masters,
            momentum,
            moments,
            reduced_gradients,
            unreduced_gradients,
            buckets,
            staging,
        ]
        .into_iter()
        .sum()
    }
}

impl Plan {
    pub(crate) fn memory(&self, rank: Rank, terms: &Terms) -> Memory {
        let layout = self.layout();
        let shards = |group| {
            let blocks = layout
                .blocks()
                .iter()
                .filter(|block| layout.space(block.space).group == group);
            blocks.map(|block| block.shard_len).sum::<usize>()
        };
        let (muon, adamw) = (shards(UpdateGroup::Muon), shards(UpdateGroup::AdamW));
        let elems = elems(self.params());
        let reduced = if self.route() == Route::AllReduce {
            elems
        } else {
            self.with_whole(muon + adamw, rank, &self.replicas(rank))
        };
        let unreduced = if terms.stage == Stage::One && terms.accumulate.get() > 1 {
            elems
        } else {
            0
        };
        Memory {
            weights: self
                .params()
                .iter()
                .map(|(_, param)| Bytes::of(param.elems(), param.wire))
                .sum(),
            masters: Bytes::of(muon + adamw, Wire::F32),
            momentum: Bytes::of(
                self.with_whole(muon, rank, &self.full_momentum(rank)),
                Wire::F32,
            ),
            moments: Bytes::of(2 * adamw, Wire::F32),
            reduced_gradients: Bytes::of(reduced, Wire::F32),
            unreduced_gradients: Bytes::of(unreduced, Wire::F32),
            buckets: self.bucket_memory(terms),
            staging: self.staging(rank, terms),
        }
    }

    /// `elems` of shards, with some parameters whole instead of in slices.
    fn with_whole(&self, elems: usize, rank: Rank, whole: &[ParamId]) -> usize {
        let own = |param| {
            let slices = self.layout().slices(param).iter();
            slices
                .filter(|slice| slice.rank == rank)
                .map(|slice| slice.span.len())
                .sum::<usize>()
        };
        let others = |param| self.params().get(param).elems() - own(param);
        elems + whole.iter().map(|param| others(*param)).sum::<usize>()
    }

    fn bucket_memory(&self, terms: &Terms) -> Bytes {
        let mut largest = vec![Bytes(0); self.layout().spaces().len()];
        for (bucket, BucketPlan { len, .. }) in self.layout().buckets().iter().zip(self.buckets()) {
            let largest = &mut largest[bucket.space.index()];
            *largest = Bytes::of(*len, self.gradient_wire(bucket.space, terms)).max(*largest);
        }
        let in_flight = largest.iter().copied().max().unwrap_or_default();
        in_flight + largest.into_iter().sum()
    }

    fn staging(&self, rank: Rank, terms: &Terms) -> Bytes {
        let exchanges = self
            .exchange_kinds()
            .iter()
            .map(|kind| Bytes::of(self.exchange(*kind, rank).len, exchange_wire(*kind, terms)));
        exchanges
            .chain([self.windows_memory()])
            .max()
            .unwrap_or_default()
    }

    fn windows_memory(&self) -> Bytes {
        let layout = self.layout();
        let mut windows: BTreeMap<SpaceId, Vec<usize>> = BTreeMap::new();
        for id in layout.block_ids() {
            let lens = self.windows(id).into_iter().map(Span::len);
            windows
                .entry(layout.block(id).space)
                .or_default()
                .extend(lens);
        }
        let both = |(space, mut lens): (SpaceId, Vec<usize>)| {
            lens.sort_unstable_by_key(|len| Reverse(*len));
            let elems = lens.iter().take(2).sum::<usize>() * layout.world().get();
            Bytes::of(elems, layout.space(space).wire)
        };
        windows.into_iter().map(both).sum()
    }
}

fn elems(params: &Params) -> usize {
    params.iter().map(|(_, param)| param.elems()).sum()
}
