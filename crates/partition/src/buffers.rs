//! Buffers that are made once and used again: how long they are, and how many there are of each flat space.

use crate::{Bytes, Plan, Rank, SpaceId, Span, Terms, Wire};

/// What is asked of the buffers of one flat space, which are all as long as the longest use of one.
#[derive(Debug, Clone, Copy, Default)]
struct Demand {
    longest: usize,
    /// Whether a use begins before the one before it has ended.
    twice: bool,
}

impl Demand {
    fn add(&mut self, len: usize, overlaps: bool) {
        self.longest = len.max(self.longest);
        self.twice |= overlaps;
    }

    fn bytes(self, wire: Wire) -> Bytes {
        let times = if self.twice { 2 } else { 1 };
        Bytes::of(times * self.longest, wire)
    }
}

impl Plan {
    /// The buffers in which gradients that come in plan order are reduced. One bucket of a flat space fills at a time; a
    /// reduced one keeps its buffer until the bucket after it, of any flat space, is full.
    pub(crate) fn wire_buffers(&self, terms: &Terms) -> Bytes {
        let all = self.layout().buckets();
        let mut before = vec![None; self.layout().spaces().len()];
        let uses = all.iter().zip(self.buckets()).enumerate();
        let uses = uses.map(|(index, (bucket, plan))| {
            let before = before[bucket.space.index()].replace(index);
            let overlaps = before.is_some_and(|before: usize| {
                // Ids descend in plan order.
                let last_to_come = all[before + 1].params.last();
                terms.overlap && bucket.params.first() >= last_to_come
            });
            (bucket.space, plan.len, overlaps)
        });
        self.buffers(uses, |space| self.gradient_wire(space, terms))
    }

    /// The buffers in which weights are gathered: one window is gathered while the one before it is copied. What one rank
    /// gathers is its own.
    pub(crate) fn staging_buffers(&self) -> Bytes {
        let layout = self.layout();
        let world = layout.world().get();
        let windows = layout.block_ids().flat_map(|id| {
            let space = layout.block(id).space;
            let lens = self.windows(id).into_iter().map(Span::len);
            lens.map(move |len| (space, world * len))
        });
        let mut before = None;
        let uses = windows.map(|(space, len)| (space, len, before.replace(space) == Some(space)));
        self.buffers(uses, |space| layout.space(space).wire)
    }

    /// The longest buffer of an exchange. Each is given up before the next one is made.
    pub(crate) fn exchange_buffer(&self, rank: Rank, terms: &Terms) -> Bytes {
        let kinds = self.exchange_kinds().iter();
        let buffers = kinds.map(|kind| {
            let len = self.exchange(*kind, rank).len;
            Bytes::of(len, kind.wire(terms))
        });
        buffers.max().unwrap_or_default()
    }

    fn buffers(
        &self,
        uses: impl Iterator<Item = (SpaceId, usize, bool)>,
        wire: impl Fn(SpaceId) -> Wire,
    ) -> Bytes {
        let mut demands = vec![Demand::default(); self.layout().spaces().len()];
        for (space, len, overlaps) in uses {
            demands[space.index()].add(len, overlaps);
        }
        let demands = demands.into_iter().enumerate();
        demands
            .map(|(index, demand)| demand.bytes(wire(SpaceId(index))))
            .sum()
    }
}
