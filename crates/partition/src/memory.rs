//! What a rank holds, in bytes.

use std::fmt;
use std::iter::Sum;
use std::ops::Add;

use crate::{ParamId, Plan, Rank, Route, Stage, Terms, UpdateGroup, Wire};

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    pub(crate) const fn of(elems: usize, wire: Wire) -> Self {
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

/// What a rank keeps from step to step and the buffers that travel, at most, by purpose, if gradients come in plan order.
/// What single operations take on top of that (scaled gradients, updates and results of a step, the iteration's workspace) is
/// not in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Memory {
    /// The model's weights, whole, in their own types.
    pub weights: Bytes,
    /// The fp32 masters of its shards, with their padding.
    pub masters: Bytes,
    /// The fp32 momentum of its Muon slices; of a parameter whose momentum it keeps whole, that
    /// instead of its slices.
    pub momentum: Bytes,
    /// Both fp32 moments of its AdamW slices.
    pub moments: Bytes,
    /// The reduced gradients: the parameters whose gradient it keeps whole, and the shards, with
    /// their padding, in which it owns anything else; in the wire's type, or in fp32 where it adds
    /// those of several micro-batches.
    pub reduced_gradients: Bytes,
    /// Stage 1 with several micro-batches: an fp32 accumulator for each bucket, with its padding.
    pub unreduced_gradients: Bytes,
    /// The wire buffers, each as long as the longest bucket of its flat space, and kept from step
    /// to step: one of each flat space, and a second one where a bucket fills while another one
    /// of that space is reduced.
    pub buckets: Bytes,
    /// The longest buffer of an exchange: each is given up before the next one is made, although a
    /// backend may keep it until its device is done with it. The last one is kept until the weights
    /// are gathered.
    pub exchange: Bytes,
    /// The buffers of gathered weights, each as long as the longest window of its flat space, and
    /// kept from step to step: one of each flat space, and a second one where two windows in a row
    /// are of that space. One rank needs none.
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
            exchange,
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
            exchange,
            staging,
        ]
        .into_iter()
        .sum()
    }
}

impl Plan {
    pub(crate) fn memory(&self, rank: Rank, terms: &Terms) -> Memory {
        let blocks = self.layout().blocks().iter();
        let full = self.full_momentum(rank);
        let momentum = self.elems(&full) + self.own(rank, UpdateGroup::Muon, &full);
        let accumulates = terms.stage == Stage::One && terms.accumulate.get() > 1;
        let unreduced = if accumulates {
            self.buckets().iter().map(|bucket| bucket.len).sum()
        } else {
            0
        };
        let f32 = |elems| Bytes::of(elems, Wire::F32);
        Memory {
            weights: self
                .params()
                .iter()
                .map(|(_, param)| Bytes::of(param.elems(), param.wire))
                .sum(),
            masters: f32(blocks.map(|block| block.shard_len).sum()),
            momentum: f32(momentum),
            moments: f32(2 * self.own(rank, UpdateGroup::AdamW, &[])),
            reduced_gradients: self.reduced(rank, terms),
            unreduced_gradients: f32(unreduced),
            buckets: self.wire_buffers(terms),
            exchange: self.exchange_buffer(rank, terms),
            staging: self.staging_buffers(),
        }
    }

    /// Elements of the slices that a rank owns of a group, but for those of some parameters, which ascend.
    fn own(&self, rank: Rank, group: UpdateGroup, without: &[ParamId]) -> usize {
        let slices = self.layout().rank_slices(rank);
        slices
            .filter(|slice| self.params().get(slice.param).group() == group)
            .filter(|slice| without.binary_search(&slice.param).is_err())
            .map(|slice| slice.span.len())
            .sum()
    }

    /// Bytes in which a rank keeps reduced gradients.
    fn reduced(&self, rank: Rank, terms: &Terms) -> Bytes {
        let layout = self.layout();
        let bytes = |elems, space| Bytes::of(elems, self.reduced_wire(space, terms));
        let whole = self.replicas(rank);
        let wholes = whole.iter().filter_map(|id| {
            let bucket = layout.bucket_of(*id)?;
            let elems = self.params().get(*id).elems();
            Some(bytes(elems, layout.bucket(bucket).space))
        });
        if self.route() == Route::AllReduce {
            return wholes.sum();
        }
        let slices = layout.rank_slices(rank);
        let mut blocks: Vec<_> = slices
            .filter(|slice| whole.binary_search(&slice.param).is_err())
            .map(|slice| slice.block)
            .collect();
        // They come by block.
        blocks.dedup();
        let shards = blocks.into_iter().map(|id| {
            let block = layout.block(id);
            bytes(block.shard_len, block.space)
        });
        wholes.chain(shards).sum()
    }

    fn elems(&self, params: &[ParamId]) -> usize {
        let elems = |param: &ParamId| self.params().get(*param).elems();
        params.iter().map(elems).sum()
    }
}
