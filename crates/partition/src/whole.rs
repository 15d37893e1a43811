use std::cmp::Reverse;
use std::num::NonZeroUsize;

use crate::block::{RunWriter, even_shard};
use crate::bucket::within;
use crate::lpt::Loads;
use crate::{Block, ParamId, Params, Rank, Source, SpaceId, Span, WorldSize};

/// Padding must be under one part in this many of a block's elements.
const CAP: u128 = 20;
/// A block grows by `bucket_size` at a time, up to this many times it.
const GROWTH: usize = 4;

/// Blocks of the Muon parameters `ids`, in plan order, with the parameters in each: whole matrices
/// on ranks.
///
/// A block first takes what a bucket takes. While whole matrices leave too much padding, it grows
/// by one more `bucket_size`; then its costliest matrices are split.
pub(crate) fn blocks(
    space: SpaceId,
    params: &Params,
    ids: &[ParamId],
    world: WorldSize,
    bucket_size: NonZeroUsize,
) -> Vec<(Vec<ParamId>, Block)> {
    let mut blocks = Vec::new();
    let mut rest = ids;
    while !rest.is_empty() {
        let grown = |growth| {
            Units::new(
                params,
                &rest[..within(params, rest, bucket_size.get().saturating_mul(growth))],
                world,
            )
        };
        let unsplit = (1..GROWTH)
            .map(grown)
            .find_map(|units| Some((units.deal(0)?, units)));
        let (deal, units) = unsplit.unwrap_or_else(|| {
            let units = grown(GROWTH);
            (units.deal_with_fewest_splits(), units)
        });
        blocks.push((units.ids.to_vec(), units.block(space, &deal)));
        rest = &rest[units.ids.len()..];
    }
    blocks
}

/// One matrix of a block.
#[derive(Debug)]
struct Unit {
    param: ParamId,
    span: Span,
    cost: u64,
}

/// The matrices of a block.
#[derive(Debug)]
struct Units<'a> {
    ids: &'a [ParamId],
    world: WorldSize,
    /// In plan order, ascending in a parameter.
    units: Vec<Unit>,
    /// Indices of `units`, costliest first: the first so many are split.
    order: Vec<usize>,
    elems: usize,
}

/// The rank of each whole matrix, by its index in `Units`; `None` is split.
#[derive(Debug)]
struct Deal {
    ranks: Vec<Option<Rank>>,
    shard_len: usize,
}

impl<'a> Units<'a> {
    fn new(params: &Params, ids: &'a [ParamId], world: WorldSize) -> Self {
        let matrices = ids.iter().flat_map(|param| {
            params
                .get(*param)
                .matrices
                .iter()
                .map(|matrix| (*param, matrix))
        });
        let units: Vec<_> = matrices
            .map(|(param, matrix)| Unit {
                param,
                span: matrix.span,
                cost: matrix.cost,
            })
            .collect();
        let mut order: Vec<_> = (0..units.len()).collect();
        order.sort_by_key(|index| {
            (
                Reverse(units[*index].cost),
                units[*index].param,
                units[*index].span.start,
            )
        });
        let elems = units.iter().map(|unit| unit.span.len()).sum();
        Self {
            ids,
            world,
            units,
            order,
            elems,
        }
    }

    /// Splits costliest matrices until the padding is under the cap, or none is whole. With one
    /// split less it is over; that number is looked for by doubling, then halving, because there
    /// can be hundreds, and a deal for each.
    fn deal_with_fewest_splits(&self) -> Deal {
        let all = self.order.len();
        // The bound falls with every split: what it rules out needs no deal.
        let mut fewest = first(0, all, |splits| self.fits(self.least_shard(splits)));
        let (mut most, mut step) = (fewest, 1);
        let mut deal = loop {
            if let Some(deal) = self.deal(most) {
                break deal;
            }
            fewest = most + 1;
            most = all.min(most + step);
            step *= 2;
        };
        first(fewest, most, |splits| {
            let found = self.deal(splits);
            found.map(|found| deal = found).is_some()
        });
        deal
    }

    /// Whole matrices to ranks, but for the `splits` costliest; `None` if the padding is over the
    /// cap and a matrix is left to split.
    fn deal(&self, splits: usize) -> Option<Deal> {
        let last = splits >= self.order.len();
        if !last && !self.fits(self.least_shard(splits)) {
            return None;
        }
        let mut ranks = vec![None; self.units.len()];
        let mut filled = vec![0; self.world.get()];
        let mut loads = Loads::new(&vec![0; self.world.get()]);
        for &index in self.order.iter().skip(splits) {
            let (_, rank) = loads.least();
            loads.add(rank, self.units[index].cost);
            filled[rank.0] += self.units[index].span.len();
            ranks[index] = Some(rank);
        }
        let longest = filled.into_iter().max().unwrap_or(0);
        let shard_len = longest.next_multiple_of(2).max(self.mean());
        (last || self.fits(shard_len)).then_some(Deal { ranks, shard_len })
    }

    /// A shard length that no deal with so many splits is below: the mean's; the longest whole
    /// matrix; and, where there are more whole matrices than ranks, the two that must meet.
    fn least_shard(&self, splits: usize) -> usize {
        let world = self.world.get();
        let mut lens: Vec<_> = self.order[splits..]
            .iter()
            .map(|index| self.units[*index].span.len())
            .collect();
        let longest = lens.iter().copied().max().unwrap_or(0);
        let pair = if lens.len() > world {
            let (longer, nth, _) = lens.select_nth_unstable_by_key(world, |len| Reverse(*len));
            *nth + longer.iter().copied().min().unwrap_or(0)
        } else {
            0
        };
        longest.max(pair).next_multiple_of(2).max(self.mean())
    }

    fn mean(&self) -> usize {
        even_shard(self.elems, self.world)
    }

    fn fits(&self, shard_len: usize) -> bool {
        let padding = shard_len as u128 * self.world.get() as u128 - self.elems as u128;
        padding * CAP < self.elems as u128
    }

    /// In each shard the whole matrices, then what is left of the split ones up to the mean, then
    /// padding.
    fn block(&self, space: SpaceId, deal: &Deal) -> Block {
        let mut whole = vec![Vec::new(); self.world.get()];
        let mut split = Vec::new();
        for (unit, rank) in self.units.iter().zip(&deal.ranks) {
            let units = rank.map_or(&mut split, |rank| &mut whole[rank.0]);
            units.push(unit);
        }
        let mut split = split.into_iter().map(|unit| (unit.param, unit.span));
        let mut left: Option<(ParamId, Span)> = split.next();
        let mut runs = RunWriter::default();
        for (rank, units) in whole.into_iter().enumerate() {
            for unit in units {
                runs.push(
                    unit.span.len(),
                    Some(Source {
                        param: unit.param,
                        start: unit.span.start,
                    }),
                );
            }
            while let Some((param, span)) = left {
                let room = (rank * deal.shard_len + self.mean()).saturating_sub(runs.len);
                if room == 0 {
                    break;
                }
                let len = room.min(span.len());
                runs.push(
                    len,
                    Some(Source {
                        param,
                        start: span.start,
                    }),
                );
                left = if len < span.len() {
                    Some((param, Span::new(span.start + len, span.end)))
                } else {
                    split.next()
                };
            }
            runs.pad_to((rank + 1) * deal.shard_len);
        }
        Block {
            space,
            shard_len: deal.shard_len,
            runs: runs.runs,
        }
    }
}

/// A number from `low` to `high` from which on `holds`: it holds for it or it is `high`, and does
/// not for the one before it or it is `low`.
fn first(mut low: usize, mut high: usize, mut holds: impl FnMut(usize) -> bool) -> usize {
    while low < high {
        let middle = low.midpoint(high);
        if holds(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}
