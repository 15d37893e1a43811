//! The calls, FLOPs and memory of a step, before it is taken.

use std::num::NonZeroUsize;

use crate::{
    Call, Class, Collective, ExchangeKind, Memory, Plan, Rank, Reduction, SpaceId, Span, Stage,
    Wire,
};

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
    /// Whether a bucket is reduced while later ones fill.
    pub overlap: bool,
}

impl Terms {
    /// How often a step reduces each bucket.
    pub(crate) const fn reductions_of_a_bucket(&self) -> usize {
        match self.stage {
            Stage::One => 1,
            Stage::Two => self.accumulate.get(),
        }
    }
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
        let times = terms.reductions_of_a_bucket();
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
                let wire = kind.wire(terms);
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

    /// The element type in which a rank keeps the reduced gradients of a flat space: the wire's,
    /// or fp32 where it adds those of several micro-batches.
    pub fn reduced_wire(&self, space: SpaceId, terms: &Terms) -> Wire {
        if terms.reductions_of_a_bucket() > 1 {
            Wire::F32
        } else {
            self.gradient_wire(space, terms)
        }
    }

    /// The element type in which the gradients of a flat space travel.
    pub(crate) fn gradient_wire(&self, space: SpaceId, terms: &Terms) -> Wire {
        terms
            .gradient_wire
            .unwrap_or(self.layout().space(space).wire)
    }
}

impl ExchangeKind {
    /// The element type in which slices travel.
    pub(crate) const fn wire(self, terms: &Terms) -> Wire {
        match self {
            Self::Gradients | Self::Updates => Wire::F32,
            Self::Results => terms.result_wire,
        }
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
