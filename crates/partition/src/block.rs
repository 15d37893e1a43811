//! The flat spaces and the blocks that they are made of.

use crate::{ParamId, Params, Span, UpdateGroup, Wire, WorldSize};

/// A flat space: the elements of one update group and one element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Space {
    /// The update group.
    pub group: UpdateGroup,
    /// The weights' element type.
    pub wire: Wire,
}

/// A flat space, by its place in `Layout::spaces`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceId(pub(crate) usize);

impl SpaceId {
    /// Its place in `Layout::spaces`.
    pub const fn index(self) -> usize {
        self.0
    }
}

/// A block, by its place in `Layout::blocks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub(crate) usize);

impl BlockId {
    /// Its place in `Layout::blocks`.
    pub const fn index(self) -> usize {
        self.0
    }
}

/// W × `shard_len` elements of a flat space: the unit of ownership and of the weights' all-gather.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Block {
    /// Its flat space.
    pub space: SpaceId,
    /// Elements of a shard, an even number: rank r owns the r-th run of this length.
    pub shard_len: usize,
    /// What lies in it: ascending, without gaps, and maximal (no two runs could be one).
    pub runs: Vec<Run>,
}

/// A run of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// Where it begins in the block.
    pub at: usize,
    /// Elements.
    pub len: usize,
    /// What it holds; `None` is padding.
    pub source: Option<Source>,
}

/// The elements of a parameter that a run holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Source {
    /// The parameter.
    pub param: ParamId,
    /// The run's first element, in the parameter.
    pub start: usize,
}

impl Block {
    /// Parameters one after the other, padding at the end, cut into W equal shards.
    pub(crate) fn even(space: SpaceId, params: &Params, ids: &[ParamId], world: WorldSize) -> Self {
        let mut runs = RunWriter::default();
        for &param in ids {
            runs.push(params.get(param).elems(), Some(Source { param, start: 0 }));
        }
        let shard_len = even_shard(runs.len, world);
        runs.pad_to(world.get() * shard_len);
        Self {
            space,
            shard_len,
            runs: runs.runs,
        }
    }
}

/// The shortest even shard of which W hold `elems`: the padding is below 2W, as in DeepSpeed's
/// alignment to 2W.
pub(crate) fn even_shard(elems: usize, world: WorldSize) -> usize {
    2 * elems.div_ceil(2 * world.get())
}

/// Writes runs one after the other.
#[derive(Debug, Default)]
pub(crate) struct RunWriter {
    pub(crate) runs: Vec<Run>,
    pub(crate) len: usize,
}

impl RunWriter {
    /// Appends `len` elements of `source`; grows the last run where they continue it.
    pub(crate) fn push(&mut self, len: usize, source: Option<Source>) {
        if len == 0 {
            return;
        }
        match self.runs.last_mut() {
            Some(last) if continues(last, source) => last.len += len,
            _ => self.runs.push(Run {
                at: self.len,
                len,
                source,
            }),
        }
        self.len += len;
    }

    /// Appends padding up to `end`.
    pub(crate) fn pad_to(&mut self, end: usize) {
        self.push(end - self.len, None);
    }
}

fn continues(last: &Run, source: Option<Source>) -> bool {
    match (last.source, source) {
        (Some(before), Some(after)) => {
            before.param == after.param && before.start + last.len == after.start
        }
        (None, None) => true,
        _ => false,
    }
}

impl Run {
    /// Its elements, in the block.
    pub const fn span(&self) -> Span {
        Span::of_len(self.at, self.len)
    }
}
