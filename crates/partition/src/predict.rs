use std::fmt;
use std::iter::Sum;
use std::num::NonZeroUsize;
use std::ops::Add;

use crate::{
    BucketPlan, Call, Class, Collective, ExchangeKind, Params, Plan, Rank, Reduction, Route, Slice,
    Span, Stage, UpdateGroup, Wire,
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

/// What a prediction depends on beside the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Terms {
    /// What is sharded.
    pub stage: Stage,
    /// Micro-batches a step.
    pub accumulate: NonZeroUsize,
    /// The gradients' element type on the wire; `None` is the weight's.
    pub gradient_wire: Option<Wire>,
    /// The element type of the Newton-Schulz iteration, in which results travel.
    pub result_wire: Wire,
    /// Elements of the one control sum.
    pub control_elems: usize,
}

/// What one optimizer step costs one rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Prediction {
    /// Its calls, in order: the gradients' of each micro-batch, by bucket; the control sum; the
    /// sends of the gradients' exchange, of the updates' and of the results'; the weights'
    /// all-gathers, by block and window.
    pub calls: Vec<Call>,
    /// FLOPs of its Newton-Schulz iterations.
    pub flops: u64,
    /// What it holds.
    pub memory: Memory,
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
    pub adam_moments: Bytes,
    /// The fp32 reduced gradients of its shards; of a parameter whose gradient it keeps whole, that
    /// instead of its slices.
    pub reduced_gradients: Bytes,
    /// Stage 1 with several micro-batches: the fp32 accumulators of all elements.
    pub unreduced_gradients: Bytes,
    /// The wire buffers: the largest bucket of each flat space, being filled, and the largest of
    /// all, being reduced.
    pub buckets: Bytes,
    /// The largest buffer of the boundary: an exchange's, or a window of gathered weights.
    pub staging: Bytes,
}

impl Memory {
    /// All of it.
    pub fn total(&self) -> Bytes {
        let Self {
            weights,
            masters,
            momentum,
            adam_moments,
            reduced_gradients,
            unreduced_gradients,
            buckets,
            staging,
        } = *self;
        [
            weights,
            masters,
            momentum,
            adam_moments,
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
    /// What one optimizer step will cost `rank`: exactly its calls and FLOPs, and the memory of the
    /// buffers named in [`Memory`].
    pub fn predict(&self, rank: Rank, terms: &Terms) -> Prediction {
        let mut calls = self.reductions(terms);
        calls.extend(self.sends(rank, terms));
        calls.extend(self.gathers());
        Prediction {
            calls,
            flops: self.flops(rank),
            memory: self.memory(rank, terms),
        }
    }

    /// The calls before the exchanges, on every rank: gradients and the control sum.
    pub(crate) fn reductions(&self, terms: &Terms) -> Vec<Call> {
        let times = match terms.stage {
            Stage::One => 1,
            Stage::Two => terms.accumulate.get(),
        };
        let buckets = self.layout().buckets().iter().zip(self.buckets());
        let once: Vec<_> = buckets
            .flat_map(|(bucket, plan)| {
                let wire = self.gradient_wire(bucket.space, terms);
                plan.ops.iter().map(move |op| reduction(op, wire))
            })
            .collect();
        let control = Call {
            class: Class::Control,
            collective: Collective::AllReduce,
            elems: terms.control_elems,
            wire: Wire::F64,
            root: None,
        };
        let mut calls = once.repeat(times);
        calls.push(control);
        calls
    }

    /// The sends of one rank.
    pub(crate) fn sends(&self, rank: Rank, terms: &Terms) -> Vec<Call> {
        let kinds = self.exchange_kinds().iter();
        kinds
            .flat_map(|kind| {
                let wire = exchange_wire(*kind, terms);
                self.exchange(*kind, rank)
                    .sends
                    .into_iter()
                    .map(move |parcel| Call {
                        class: Class::Exchange,
                        collective: Collective::Send,
                        elems: parcel.span.len(),
                        wire,
                        root: Some(parcel.peer),
                    })
            })
            .collect()
    }

    /// The calls after the exchanges, on every rank: the weights.
    pub(crate) fn gathers(&self) -> impl Iterator<Item = Call> + '_ {
        self.layout().block_ids().flat_map(|id| {
            let wire = self.layout().space(self.layout().block(id).space).wire;
            let world = self.layout().world().get();
            self.windows(id).into_iter().map(move |window| Call {
                class: Class::Weight,
                collective: Collective::AllGather,
                elems: world * window.len(),
                wire,
                root: None,
            })
        })
    }

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
            adam_moments: Bytes::of(2 * adamw, Wire::F32),
            reduced_gradients: Bytes::of(reduced, Wire::F32),
            unreduced_gradients: Bytes::of(unreduced, Wire::F32),
            buckets: self.bucket_memory(terms),
            staging: self.staging(rank, terms),
        }
    }

    /// `elems` of shards, with some parameters whole instead of in slices.
    fn with_whole(&self, elems: usize, rank: Rank, whole: &[crate::ParamId]) -> usize {
        let slices = |param| self.layout().slices(param).iter();
        let own = whole
            .iter()
            .flat_map(|param| slices(*param))
            .filter(|slice| slice.rank == rank);
        let own: usize = own.map(|slice: &Slice| slice.span.len()).sum();
        elems - own
            + whole
                .iter()
                .map(|param| self.params().get(*param).elems())
                .sum::<usize>()
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
        let windows = self.gathers().map(|call| Bytes::of(call.elems, call.wire));
        exchanges.chain(windows).max().unwrap_or_default()
    }

    fn gradient_wire(&self, space: crate::SpaceId, terms: &Terms) -> Wire {
        terms
            .gradient_wire
            .unwrap_or(self.layout().space(space).wire)
    }
}

fn elems(params: &Params) -> usize {
    params.iter().map(|(_, param)| param.elems()).sum()
}

const fn exchange_wire(kind: ExchangeKind, terms: &Terms) -> Wire {
    match kind {
        ExchangeKind::Gradients | ExchangeKind::Updates => Wire::F32,
        ExchangeKind::Results => terms.result_wire,
    }
}

const fn reduction(op: &Reduction, wire: Wire) -> Call {
    let (collective, Span { start, end }, root) = match *op {
        Reduction::AllReduce(span) => (Collective::AllReduce, span, None),
        Reduction::Reduce { span, root } => (Collective::Reduce, span, Some(root)),
        Reduction::ReduceScatter(span) => (Collective::ReduceScatter, span, None),
    };
    Call {
        class: Class::Gradient,
        collective,
        elems: end - start,
        wire,
        root,
    }
}
