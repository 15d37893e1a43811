//! `Whole`: matrices on one rank each, as far as the padding allows.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use polarshard_partition::{
    Bucket, Layout, Matrix, MatrixId, Param, ParamId, Params, Placement, Rank, Span, UpdateGroup,
    Wire, WorldSize, strategies,
};
use proptest::prelude::*;

use crate::oracle::Oracle;

fn whole() -> impl Strategy<Value = (Params, Layout)> {
    // Few ranks, so that matrices can stay whole.
    let world = prop_oneof![1..=5usize, 6..=64usize];
    (strategies::params(), world, strategies::bucket_size()).prop_map(|(params, world, size)| {
        let layout = Layout::new(
            &params,
            WorldSize::new(world).unwrap(),
            Placement::Whole,
            size,
        )
        .unwrap();
        (params, layout)
    })
}

fn squares(sides: &[usize]) -> Params {
    let params = sides.iter().enumerate().map(|(index, &side)| Param {
        name: format!("p{index}"),
        shape: [side, side].into_iter().collect(),
        wire: Wire::F32,
        matrices: vec![Matrix {
            span: Span::new(0, side * side),
            rows: side,
            cols: side,
            cost: (side * side * side) as u64,
        }],
    });
    Params::new(params.collect()).unwrap()
}

fn lay(params: &Params, world: usize, bucket_size: usize) -> Layout {
    let size = NonZeroUsize::new(bucket_size).unwrap();
    Layout::new(
        params,
        WorldSize::new(world).unwrap(),
        Placement::Whole,
        size,
    )
    .unwrap()
}

/// How many parameters each bucket has.
fn params_of_buckets(layout: &Layout) -> Vec<usize> {
    let buckets = layout.buckets().iter();
    buckets.map(|bucket| bucket.params.len()).collect()
}

/// (rank, elements) of the slices of every parameter.
fn map(params: &Params, layout: &Layout) -> Vec<Vec<(usize, usize)>> {
    params
        .iter()
        .map(|(id, _)| {
            layout
                .slices(id)
                .iter()
                .map(|slice| (slice.rank.0, slice.span.len()))
                .collect()
        })
        .collect()
}

/// A deal as `Whole` is defined, without any haste: the shard length, and the rank of each
/// whole matrix. The `splits` costliest are split.
struct Deal {
    shard_len: usize,
    ranks: BTreeMap<MatrixId, Rank>,
}

fn deal(params: &Params, ids: &[ParamId], world: usize, splits: usize) -> Deal {
    let mut matrices: Vec<_> = ids.iter().flat_map(|id| params.matrices_of(*id)).collect();
    let elems: usize = matrices
        .iter()
        .map(|id| params.matrix(*id).1.span.len())
        .sum();
    matrices.sort_by_key(|id| (Reverse(params.matrix(*id).1.cost), *id));
    let mut loads = vec![(0, 0, 0); world];
    for (rank, load) in loads.iter_mut().enumerate() {
        load.1 = rank;
    }
    let mut ranks = BTreeMap::new();
    for id in &matrices[splits..] {
        let matrix = params.matrix(*id).1;
        let (load, rank, filled) = loads.iter_mut().min().unwrap();
        *load += matrix.cost;
        *filled += matrix.span.len();
        ranks.insert(*id, Rank(*rank));
    }
    let longest = loads.iter().map(|load| load.2).max().unwrap();
    Deal {
        shard_len: longest.next_multiple_of(2).max(mean(elems, world)),
        ranks,
    }
}

/// The mean of the shards, rounded up to an even number.
fn mean(elems: usize, world: usize) -> usize {
    elems.div_ceil(world).next_multiple_of(2)
}

fn fits(params: &Params, ids: &[ParamId], world: usize, splits: usize) -> bool {
    let elems: usize = ids.iter().map(|id| params.get(*id).elems()).sum();
    let padding = deal(params, ids, world, splits).shard_len * world - elems;
    (padding as f64) < 0.05 * elems as f64
}

/// The parameters of the blocks, as `Whole` is defined.
fn groups(params: &Params, layout: &Layout, ids: &[ParamId]) -> Vec<Vec<ParamId>> {
    let world = layout.world().get();
    let mut groups = Vec::new();
    let mut rest = ids.to_vec();
    while !rest.is_empty() {
        let take = |times: usize| {
            let limit = times * layout.bucket_size().get();
            let elems = |count: usize| {
                rest[..count]
                    .iter()
                    .map(|id| params.get(*id).elems())
                    .sum::<usize>()
            };
            (2..=rest.len())
                .take_while(|count| elems(*count) <= limit)
                .last()
                .unwrap_or(1)
        };
        let count = (1..=4)
            .map(take)
            .find(|count| fits(params, &rest[..*count], world, 0))
            .unwrap_or(take(4));
        groups.push(rest.drain(..count).collect());
    }
    groups
}

proptest! {
    #[test]
    fn blocks_grow_until_whole_matrices_fit((params, layout) in whole()) {
        for (index, space) in layout.spaces().iter().enumerate().filter(|(_, space)| space.group == UpdateGroup::Muon) {
            let members = |id: &ParamId| {
                let param = params.get(*id);
                param.elems() > 0 && (param.group(), param.wire) == (space.group, space.wire)
            };
            let ids: Vec<_> = params.plan_order().filter(members).collect();
            let buckets = layout.buckets().iter().filter(|bucket| bucket.space.index() == index);
            let found: Vec<_> = buckets.map(|bucket| bucket.params.clone()).collect();
            prop_assert_eq!(found, groups(&params, &layout, &ids));
        }
    }

    #[test]
    fn blocks_split_no_more_matrices_than_the_cap_asks((params, layout) in whole()) {
        let oracle = Oracle::new(&params, &layout);
        let world = layout.world().get();
        let muon = |bucket: &&Bucket| layout.space(bucket.space).group == UpdateGroup::Muon;
        for bucket in layout.buckets().iter().filter(muon) {
            let block = layout.block(bucket.block);
            let matrices: Vec<_> = bucket.params.iter().flat_map(|id| params.matrices_of(*id)).collect();
            let elems: usize = matrices.iter().map(|id| params.matrix(*id).1.span.len()).sum();
            // What a number of splits makes of the block: the owner of every element.
            let agrees = |splits: usize| {
                let Deal { shard_len, ranks } = deal(&params, &bucket.params, world, splits);
                let mut filled = vec![0; world];
                for (id, rank) in &ranks {
                    filled[rank.0] += params.matrix(*id).1.span.len();
                }
                let mut rank = 0;
                shard_len == block.shard_len && matrices.iter().all(|id| {
                    let (param, matrix) = params.matrix(*id);
                    (matrix.span.start..matrix.span.end).all(|elem| {
                        let owner = ranks.get(id).copied().unwrap_or_else(|| {
                            while filled[rank] >= mean(elems, world) {
                                rank += 1;
                            }
                            filled[rank] += 1;
                            Rank(rank)
                        });
                        oracle.owner(param, elem) == owner
                    })
                })
            };
            let needed = |splits: usize| splits == 0 || !fits(&params, &bucket.params, world, splits - 1);
            let enough = |splits: usize| splits == matrices.len() || fits(&params, &bucket.params, world, splits);
            let rule = (0..=matrices.len()).any(|splits| needed(splits) && enough(splits) && agrees(splits));
            prop_assert!(rule, "{:?}", block);
        }
    }

    #[test]
    fn padding_ends_each_shard((_, layout) in whole()) {
        for block in layout.blocks() {
            for run in block.runs.iter().filter(|run| run.source.is_none()) {
                prop_assert_eq!((run.at + run.len) % block.shard_len, 0);
            }
        }
    }

    #[test]
    fn one_rank_needs_no_split(params in strategies::params(), size in strategies::bucket_size()) {
        let layout = Layout::new(&params, WorldSize::new(1).unwrap(), Placement::Whole, size).unwrap();
        for (id, ..) in params.matrices() {
            prop_assert_eq!(layout.matrix_slices(&params, id).len(), 1);
        }
    }

    #[test]
    fn blocks_of_adamw_are_those_of_striped((params, layout) in whole()) {
        let striped = Layout::new(&params, layout.world(), Placement::Striped, layout.bucket_size()).unwrap();
        let adamw = |layout: &Layout| -> BTreeSet<Vec<(usize, usize, Option<_>)>> {
            let blocks = layout.blocks().iter().filter(|block| layout.space(block.space).group == UpdateGroup::AdamW);
            blocks.map(|block| block.runs.iter().map(|run| (run.at, run.len, run.source.map(|source| source.param))).collect()).collect()
        };
        prop_assert_eq!(adamw(&layout), adamw(&striped));
    }
}

#[test]
fn equal_matrices_are_dealt_whole() {
    let params = squares(&[10; 4]);
    let layout = lay(&params, 4, 400);
    // Ties go by registration order to the lowest rank.
    assert_eq!(
        map(&params, &layout),
        [[(0, 100)], [(1, 100)], [(2, 100)], [(3, 100)]]
    );
    assert_eq!((layout.padding(), layout.blocks().len()), (0, 1));
    let layout = lay(&params, 2, 400);
    assert_eq!(
        map(&params, &layout),
        [[(0, 100)], [(1, 100)], [(0, 100)], [(1, 100)]]
    );
    // Two buckets of two parameters; the plan begins with the last.
    let layout = lay(&params, 2, 200);
    assert_eq!(params_of_buckets(&layout), [2, 2]);
    assert_eq!(
        map(&params, &layout),
        [[(0, 100)], [(1, 100)], [(0, 100)], [(1, 100)]]
    );
}

#[test]
fn a_block_grows_by_bucket_size_until_the_padding_is_under_the_cap() {
    // One, two or three matrices leave a rank idle; four, which is four times the bucket size, do not.
    let params = squares(&[10; 8]);
    let layout = lay(&params, 4, 100);
    assert_eq!(params_of_buckets(&layout), [4, 4]);
    assert_eq!(layout.padding(), 0);
    // Two are enough for two ranks.
    let layout = lay(&params, 2, 100);
    assert_eq!(params_of_buckets(&layout), [2; 4]);
}

#[test]
fn a_block_that_fits_at_its_largest_is_not_split() {
    // In plan order 100, 64, 100 and 64 elements: only all four balance two ranks.
    let params = squares(&[8, 10, 8, 10]);
    let layout = lay(&params, 2, 100);
    assert_eq!(
        map(&params, &layout),
        [[(0, 64)], [(0, 100)], [(1, 64)], [(1, 100)]]
    );
    assert_eq!((layout.blocks().len(), layout.padding()), (1, 0));
}

#[test]
fn the_costliest_matrix_is_split_up_to_the_mean() {
    // 400 and three times 100 elements on two ranks: whole, a shard of 400 leaves 100 of padding.
    let params = squares(&[20, 10, 10, 10]);
    let layout = lay(&params, 2, 1000);
    // The small ones go 0, 1, 0; then 150 and 250 of the large one fill both shards to 350.
    assert_eq!(
        map(&params, &layout),
        [
            vec![(0, 150), (1, 250)],
            vec![(0, 100)],
            vec![(1, 100)],
            vec![(0, 100)]
        ]
    );
    assert_eq!((layout.blocks()[0].shard_len, layout.padding()), (350, 0));
}

/// Costs that have nothing to do with elements: no bound on shards sees that one rank gets three
/// matrices, so only the deal does.
#[test]
fn a_deal_that_costs_unbalance_is_split_too() {
    let squares = squares(&[10; 4]);
    let costly = |((_, param), cost): ((ParamId, &Param), u64)| {
        let mut param = param.clone();
        param.matrices[0].cost = cost;
        param
    };
    let params = squares.iter().zip([10, 1, 1, 1]).map(costly).collect();
    let params = Params::new(params).unwrap();
    let layout = lay(&params, 2, 1000);
    // Whole: 100 and 300. With the costly one split: 0, 1, 0, and all of it beside the second.
    let slices = [[(1, 100)], [(0, 100)], [(1, 100)], [(0, 100)]];
    assert_eq!(map(&params, &layout), slices);
    assert_eq!(layout.padding(), 0);
}

/// Five matrices are longer than a shard may be; the sixth costliest is not, and stays whole.
#[test]
fn no_matrix_is_split_without_need() {
    let sides: Vec<_> = [100; 5].into_iter().chain([10; 160]).collect();
    let params = squares(&sides);
    let layout = lay(&params, 16, 100_000);
    assert_eq!(
        (layout.blocks().len(), layout.blocks()[0].shard_len),
        (1, 4126)
    );
    let small = |rank| {
        let slices = layout.rank_slices(rank);
        slices
            .filter(|slice| params.get(slice.param).elems() == 100)
            .map(|slice| slice.span.len())
            .collect::<Vec<_>>()
    };
    for rank in layout.world().ranks() {
        assert_eq!(small(rank), [100; 10], "rank {rank}");
    }
}

#[test]
fn padding_just_under_the_cap_is_left() {
    // Shards of 484 for 484 + 441 elements: 43 of padding are 4.6%.
    let layout = lay(&squares(&[22, 21]), 2, 1000);
    assert_eq!((layout.padding(), layout.blocks()[0].shard_len), (43, 484));
    // 441 + 400: 41 of 841 are 4.9%; rounded to even shards 43 are 5.1%, so the larger is split.
    let params = squares(&[21, 20]);
    let layout = lay(&params, 2, 1000);
    assert_eq!((layout.padding(), layout.blocks()[0].shard_len), (3, 422));
    assert_eq!(
        map(&params, &layout),
        [vec![(0, 22), (1, 419)], vec![(0, 400)]]
    );
    // Exactly 5% is not under it: 420 + 380 with shards of 420.
    let strip = |name: &str, cols| Param {
        name: name.into(),
        shape: [10, cols].into_iter().collect(),
        wire: Wire::F32,
        matrices: vec![Matrix {
            span: Span::new(0, 10 * cols),
            rows: 10,
            cols,
            cost: cols as u64,
        }],
    };
    let params = Params::new(vec![strip("a", 42), strip("b", 38)]).unwrap();
    assert_eq!(lay(&params, 2, 1000).padding(), 0);
}

#[test]
fn more_ranks_than_matrices_split_them_all() {
    let params = squares(&[10]);
    let layout = lay(&params, 4, 1000);
    assert_eq!(
        map(&params, &layout),
        [[(0, 26), (1, 26), (2, 26), (3, 22)]]
    );
}

#[test]
fn matrices_of_a_stack_go_to_ranks_of_their_own() {
    let matrix = |index: usize| Matrix {
        span: Span::of_len(index * 6, 6),
        rows: 2,
        cols: 3,
        cost: 1,
    };
    let stack = Param {
        name: "s".into(),
        shape: [4, 2, 3].into_iter().collect(),
        wire: Wire::F32,
        matrices: (0..4).map(matrix).collect(),
    };
    let params = Params::new(vec![stack]).unwrap();
    let layout = lay(&params, 2, 1000);
    assert_eq!(map(&params, &layout), [[(0, 6), (1, 6), (0, 6), (1, 6)]]);
    assert_eq!(layout.owners(params.id("s").unwrap()).len(), 2);
    let single = params
        .matrices()
        .map(|(id, ..)| layout.matrix_owners(&params, id).len());
    assert_eq!(single.collect::<Vec<_>>(), [1; 4]);
}
