//! The slices of a layout: runs of a parameter inside a shard.

use crate::{Block, BlockId, ParamId, Rank, Ranks, Span};

/// A run of one parameter inside one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slice {
    /// The parameter.
    pub param: ParamId,
    /// The elements, in the parameter.
    pub span: Span,
    /// The block that they lie in.
    pub block: BlockId,
    /// The rank that owns them.
    pub rank: Rank,
    /// Where they begin in that rank's shard of the block.
    pub at: usize,
}

impl Slice {
    /// The part of it that is in `span` of the parameter, if any.
    pub(crate) fn within(self, span: Span) -> Option<Self> {
        let common = self.span.intersect(span)?;
        Some(Self {
            span: common,
            at: self.at + (common.start - self.span.start),
            ..self
        })
    }
}

/// All slices, to be found by parameter and by place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slices {
    /// By parameter, ascending in it.
    slices: Vec<Slice>,
    /// The first slice of each parameter, and the number of slices at the end.
    first_of_param: Vec<usize>,
    /// Indices into `slices`, by block, rank and place in the shard.
    by_place: Vec<usize>,
    /// The first of `by_place` of each block, and the number of slices at the end.
    first_of_block: Vec<usize>,
}

impl Slices {
    /// Cuts the runs of all blocks at the shards' borders. Linear in what it returns: two counting
    /// sorts, of which the second is the inverse of the first.
    pub(crate) fn new(blocks: &[Block], params: usize) -> Self {
        let mut placed = Vec::new();
        let mut first_of_block = Vec::with_capacity(blocks.len() + 1);
        for (index, block) in blocks.iter().enumerate() {
            first_of_block.push(placed.len());
            cut(BlockId(index), block, &mut placed);
        }
        first_of_block.push(placed.len());

        let first_of_param = starts(params, placed.iter().map(|slice| slice.param.index()));
        let mut next = first_of_param.clone();
        let mut order = vec![0; placed.len()];
        for (index, slice) in placed.iter().enumerate() {
            order[next[slice.param.index()]] = index;
            next[slice.param.index()] += 1;
        }
        for group in first_of_param.windows(2) {
            // Already so, but where whole matrices were dealt to ranks.
            order[group[0]..group[1]].sort_by_key(|index| placed[*index].span.start);
        }
        let mut by_place = vec![0; placed.len()];
        for (index, place) in order.iter().enumerate() {
            by_place[*place] = index;
        }
        let slices = order.iter().map(|index| placed[*index]).collect();
        Self {
            slices,
            first_of_param,
            by_place,
            first_of_block,
        }
    }

    pub(crate) fn of_param(&self, param: ParamId) -> &[Slice] {
        &self.slices[self.first_of_param[param.index()]..self.first_of_param[param.index() + 1]]
    }

    /// The slices of a parameter that touch `span`, uncut.
    pub(crate) fn touching(&self, param: ParamId, span: Span) -> &[Slice] {
        let slices = self.of_param(param);
        let from = slices.partition_point(|slice| slice.span.end <= span.start);
        let to = from + slices[from..].partition_point(|slice| slice.span.start < span.end);
        &slices[from..to]
    }

    /// The slices of a rank's shard of a block, ascending in it.
    pub(crate) fn of_shard(&self, block: BlockId, rank: Rank) -> impl Iterator<Item = &Slice> {
        let places = &self.by_place
            [self.first_of_block[block.index()]..self.first_of_block[block.index() + 1]];
        let from = places.partition_point(|index| self.slices[*index].rank < rank);
        places[from..]
            .iter()
            .map(|index| &self.slices[*index])
            .take_while(move |slice| slice.rank == rank)
    }
}

/// The ranks that own a part of what the slices cover.
pub(crate) fn owners<'a>(slices: impl IntoIterator<Item = &'a Slice>) -> Ranks {
    slices.into_iter().map(|slice| slice.rank).collect()
}

/// Where each of `count` groups begins, when sorted by group, and the number of all at the end.
pub(crate) fn starts(count: usize, groups: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut starts = vec![0; count + 1];
    for group in groups {
        starts[group + 1] += 1;
    }
    for group in 0..count {
        starts[group + 1] += starts[group];
    }
    starts
}

fn cut(id: BlockId, block: &Block, slices: &mut Vec<Slice>) {
    for run in &block.runs {
        let Some(source) = run.source else { continue };
        let mut done = 0;
        while done < run.len {
            let (rank, at) = (
                (run.at + done) / block.shard_len,
                (run.at + done) % block.shard_len,
            );
            let len = (block.shard_len - at).min(run.len - done);
            let span = Span::of_len(source.start + done, len);
            slices.push(Slice {
                param: source.param,
                span,
                block: id,
                rank: Rank(rank),
                at,
            });
            done += len;
        }
    }
}
