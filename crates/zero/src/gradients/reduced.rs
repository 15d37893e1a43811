//! What a rank keeps of the reduced gradients until the boundary: its shards, or whole parameters; as they come, or summed
//! in fp32 where those of several micro-batches come.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use polarshard_partition::{BlockId, Kept, ParamId, Place, Plan, Rank, Span, Terms};

use crate::dtypes;
use crate::error::Result;
use crate::flat::{self, Write};
use crate::step::{OwnedSlice, Section};

#[derive(Debug)]
pub(crate) struct Reduced {
    /// By bucket.
    kept: Vec<Vec<Kept>>,
    /// By bucket: whether this step's sum has begun.
    begun: Vec<bool>,
    shards: BTreeMap<BlockId, Tensor>,
    wholes: BTreeMap<ParamId, Tensor>,
}

impl Reduced {
    pub(crate) fn new(plan: &Plan, rank: Rank, terms: &Terms, device: &Device) -> Result<Self> {
        let layout = plan.layout();
        let kept: Vec<_> = layout
            .bucket_ids()
            .map(|bucket| plan.kept(bucket, rank))
            .collect();
        let mut shards = BTreeMap::new();
        let mut wholes = BTreeMap::new();
        for (bucket, kept) in layout.buckets().iter().zip(&kept) {
            let dtype = dtypes::dtype(plan.reduced_wire(bucket.space, terms));
            for place in kept.iter().map(|kept| kept.into) {
                match place {
                    Place::Shard { block, .. } if !shards.contains_key(&block) => {
                        let len = layout.block(block).shard_len;
                        shards.insert(block, flat::zeros(len, dtype, device)?);
                    }
                    Place::Whole { param, .. } if !wholes.contains_key(&param) => {
                        let len = plan.params().get(param).elems();
                        wholes.insert(param, flat::zeros(len, dtype, device)?);
                    }
                    _ => {}
                }
            }
        }
        Ok(Self {
            begun: vec![false; kept.len()],
            kept,
            shards,
            wholes,
        })
    }

    /// Adds what this rank keeps of a reduced bucket.
    pub(crate) fn fold(&mut self, bucket: usize, buffer: &Tensor) -> Result<()> {
        let kept = self.kept[bucket].iter().map(|Kept { from, into }| {
            let (flat, at) = match into {
                Place::Shard { block, at } => (&self.shards[block], *at),
                Place::Whole { param, at } => (&self.wholes[param], *at),
            };
            let values = flat::view(buffer, *from)?;
            Ok(Write { flat, at, values })
        });
        let kept = kept.collect::<Result<Vec<_>>>()?;
        if std::mem::replace(&mut self.begun[bucket], true) {
            for Write { flat, at, values } in &kept {
                flat::add(flat, *at, values, 1.0)?;
            }
        } else {
            flat::write_all(&kept)?;
        }
        Ok(())
    }

    /// The sum over one slice of this rank, as a view.
    pub(crate) fn slice(&self, slice: &OwnedSlice) -> Result<Tensor> {
        Ok(match self.wholes.get(&slice.param) {
            Some(whole) => flat::view(whole, slice.span)?,
            None => flat::view(&self.shards[&slice.block], slice.in_shard())?,
        })
    }

    /// Where the sum over a slice lies, counted from its place in the shard: neighbours there are neighbours in the sum
    /// if they have this in common.
    pub(crate) fn place(&self, slice: &OwnedSlice) -> Option<(ParamId, usize)> {
        let is_whole = self.wholes.contains_key(&slice.param);
        is_whole.then(|| (slice.param, slice.span.start.wrapping_sub(slice.at)))
    }

    /// The sum over a section whose slices have one [`place`](Self::place).
    pub(crate) fn section(&self, section: &Section<'_>) -> Result<Tensor> {
        let first = &section.slices[0];
        Ok(match self.wholes.get(&first.param) {
            Some(whole) => {
                let span = Span::of_len(first.span.start, section.in_shard.len());
                flat::view(whole, span)?
            }
            None => flat::view(&self.shards[&section.block], section.in_shard)?,
        })
    }

    /// The sum over a whole parameter, where this rank keeps it.
    pub(crate) fn whole(&self, param: ParamId) -> Option<&Tensor> {
        self.wholes.get(&param)
    }

    /// Forgets the sums.
    pub(crate) fn clear(&mut self) {
        self.begun.fill(false);
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        let held = self.shards.values().chain(self.wholes.values());
        held.map(flat::bytes).sum()
    }
}
