//! Slices that lie one behind the other, so that one operation goes over many of them: launches cost a device with
//! many small parameters more than their elements.

use candle_core::{Result, Tensor};
use polarshard_partition::{BlockId, Span};

use super::owned::OwnedSlice;
use crate::flat;

/// Slices one behind the other in a shard, and in the state of their update group.
#[derive(Debug)]
pub(crate) struct Stretch {
    block: BlockId,
    /// The first element in the shard, and in the state.
    shard_start: usize,
    state_start: usize,
    slices: Vec<OwnedSlice>,
}

/// A part of a stretch that is treated alike.
#[derive(Debug)]
pub(crate) struct Section<'a> {
    pub(crate) block: BlockId,
    pub(crate) in_shard: Span,
    pub(crate) in_state: Span,
    pub(crate) slices: &'a [OwnedSlice],
}

impl Stretch {
    /// Lays the state of slices out, those of a block in the order of its shard.
    pub(crate) fn all(slices: impl Iterator<Item = OwnedSlice>) -> Vec<Self> {
        let mut slices: Vec<_> = slices.collect();
        slices.sort_by_key(|slice| (slice.block, slice.at));
        let mut state_start = 0;
        let adjacent =
            |a: &OwnedSlice, b: &OwnedSlice| a.block == b.block && a.in_shard().end == b.at;
        let stretch = |slices: &[OwnedSlice]| {
            let stretch = Self {
                block: slices[0].block,
                shard_start: slices[0].at,
                state_start,
                slices: slices.to_vec(),
            };
            state_start += stretch.elems();
            stretch
        };
        slices.chunk_by(adjacent).map(stretch).collect()
    }

    pub(crate) fn elems(&self) -> usize {
        self.slices.iter().map(|slice| slice.span.len()).sum()
    }

    /// Its slices, with where each lies in the state.
    pub(crate) fn places(&self) -> impl Iterator<Item = (&OwnedSlice, Span)> {
        let place = |slice| {
            let one = std::slice::from_ref(slice);
            (slice, self.section(one).in_state)
        };
        self.slices.iter().map(place)
    }

    /// Cuts the stretch where the treatment changes, and leaves out what has none.
    pub(crate) fn sections<T: PartialEq>(
        &self,
        treatment: impl Fn(&OwnedSlice) -> Option<T>,
    ) -> Vec<(T, Section<'_>)> {
        let alike = |a: &OwnedSlice, b: &OwnedSlice| treatment(a) == treatment(b);
        let sections = self.slices.chunk_by(alike);
        sections
            .filter_map(|slices| Some((treatment(&slices[0])?, self.section(slices))))
            .collect()
    }

    fn section<'a>(&self, slices: &'a [OwnedSlice]) -> Section<'a> {
        let in_shard = Span::new(slices[0].at, slices[slices.len() - 1].in_shard().end);
        let start = self.state_start + (in_shard.start - self.shard_start);
        Section {
            block: self.block,
            in_shard,
            in_state: Span::of_len(start, in_shard.len()),
            slices,
        }
    }
}

impl Section<'_> {
    /// Each slice's part of values of the section.
    pub(crate) fn parts(&self, values: &Tensor) -> Result<Vec<Tensor>> {
        let part = |slice: &OwnedSlice| {
            let start = slice.at - self.in_shard.start;
            flat::view(values, Span::of_len(start, slice.span.len()))
        };
        self.slices.iter().map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use candle_core::{DType, Device};
    use polarshard_partition::{
        Layout, Param, Params, Placement, Plan, Policy, Rank, Route, Wire, WorldSize,
    };

    use super::super::owned::owned;
    use super::*;
    use crate::error::Result;

    /// Of five vectors in one block.
    fn stretches() -> Result<Vec<Stretch>> {
        let vector = |len: usize| Param {
            name: len.to_string(),
            shape: [len].into_iter().collect(),
            wire: Wire::F32,
            matrices: Vec::new(),
        };
        let params = Params::new([3, 1, 4, 2, 5].map(vector).to_vec())?;
        let (world, bucket_size) = (WorldSize::new(1)?, NonZeroUsize::new(100).unwrap());
        let layout = Layout::new(&params, world, Placement::Striped, bucket_size)?;
        let plan = Plan::new(&params, layout, Route::default(), Policy::default());
        Ok(Stretch::all(owned(&plan, Rank(0)).into_iter()))
    }

    #[test]
    fn neighbours_are_one_section_until_they_are_treated_otherwise() -> Result<()> {
        let stretches = stretches()?;
        let [stretch] = &stretches[..] else {
            panic!("one block without padding inside")
        };
        assert_eq!(stretch.elems(), 15);
        assert_eq!(stretch.sections(|_| Some(())).len(), 1);
        // In the block they lie in plan order: 5, 2, 4, 1, 3 elements.
        let sections = stretch.sections(|slice| match slice.span.len() {
            4 => None,
            len => Some(len < 3),
        });
        let found: Vec<_> = sections
            .iter()
            .map(|(small, section)| (*small, section.in_shard.start, section.in_shard.end))
            .collect();
        let expected = [(false, 0, 5), (true, 5, 7), (true, 11, 12), (false, 12, 15)];
        assert_eq!(found, expected);
        Ok(())
    }

    #[test]
    fn parts_are_those_of_the_slices() -> Result<()> {
        let stretches = stretches()?;
        let (_, section) = &stretches[0].sections(|slice| (slice.span.len() > 1).then_some(()))[0];
        let values = Tensor::arange(0f32, section.in_shard.len() as f32, &Device::Cpu)?;
        let parts = section.parts(&values)?;
        let firsts = parts.iter().map(|part| part.get(0)?.to_scalar::<f32>());
        assert_eq!(
            firsts.collect::<candle_core::Result<Vec<_>>>()?,
            [0.0, 5.0, 7.0]
        );
        assert!(parts.iter().all(|part| part.dtype() == DType::F32));
        Ok(())
    }
}
