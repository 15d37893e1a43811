//! Layouts: what holds for each of them, whatever the placement.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;

use polarshard_partition::{
    Error, Layout, Param, Params, Placement, Span, UpdateGroup, Wire, WorldSize, strategies,
};
use proptest::prelude::*;

use crate::oracle::Oracle;

proptest! {
    #[test]
    fn blocks_tile_every_parameter_and_shards_tile_the_blocks((params, layout) in strategies::layout()) {
        let oracle = Oracle::new(&params, &layout);
        prop_assert_eq!(layout.padding(), oracle.padding.iter().sum::<usize>());
        for (id, block) in layout.block_ids().zip(layout.blocks()) {
            prop_assert_eq!(block.shard_len % 2, 0);
            let mut end = 0;
            for rank in layout.world().ranks() {
                let span = layout.shard_span(id, rank);
                prop_assert_eq!(span, Span::of_len(end, block.shard_len));
                end = span.end;
            }
            for pair in block.runs.windows(2) {
                let maximal = match (pair[0].source, pair[1].source) {
                    (Some(a), Some(b)) => a.param != b.param || a.start + pair[0].len != b.start,
                    (a, b) => a.is_some() || b.is_some(),
                };
                prop_assert!(maximal, "{:?} could be one", pair);
            }
            let space = layout.space(block.space);
            for source in block.runs.iter().filter_map(|run| run.source) {
                prop_assert_eq!(space.group, params.get(source.param).group());
                prop_assert_eq!(space.wire, params.get(source.param).wire);
            }
        }
    }

    #[test]
    fn slices_tile_every_parameter((params, layout) in strategies::layout()) {
        let oracle = Oracle::new(&params, &layout);
        for (id, param) in params.iter() {
            let mut end = 0;
            for slice in layout.slices(id) {
                prop_assert_eq!((slice.param, slice.span.start), (id, end));
                prop_assert!(!slice.span.is_empty());
                for elem in slice.span.start..slice.span.end {
                    let home = oracle.home(id, elem);
                    prop_assert_eq!((home.block, home.rank), (slice.block, slice.rank));
                    prop_assert_eq!(home.at, slice.at + elem - slice.span.start);
                }
                end = slice.span.end;
            }
            prop_assert_eq!(end, param.elems());
            for pair in layout.slices(id).windows(2) {
                let joined = pair[0].block == pair[1].block && pair[0].rank == pair[1].rank && pair[0].at + pair[0].span.len() == pair[1].at;
                prop_assert!(!joined, "{:?} could be one", pair);
            }
            let owners: BTreeSet<_> = layout.owners(id).iter().collect();
            prop_assert_eq!(owners, oracle.param_owners(id));
        }
    }

    #[test]
    fn matrix_slices_tile_the_matrix_with_one_a_rank((params, layout) in strategies::layout()) {
        let oracle = Oracle::new(&params, &layout);
        for (id, param, matrix) in params.matrices() {
            let slices = layout.matrix_slices(&params, id);
            let mut end = matrix.span.start;
            for slice in &slices {
                prop_assert_eq!(slice.span.start, end);
                for elem in slice.span.start..slice.span.end {
                    prop_assert_eq!(oracle.home(param, elem).at, slice.at + elem - slice.span.start);
                    prop_assert_eq!(oracle.owner(param, elem), slice.rank);
                }
                end = slice.span.end;
            }
            prop_assert_eq!(end, matrix.span.end);
            let owners: BTreeSet<_> = layout.matrix_owners(&params, id).iter().collect();
            prop_assert_eq!(owners.len(), slices.len());
            prop_assert_eq!(owners, oracle.owners(param, matrix.span));
        }
    }

    #[test]
    fn rank_slices_are_all_slices_by_place((params, layout) in strategies::layout()) {
        let mut all = BTreeSet::new();
        for rank in layout.world().ranks() {
            let slices: Vec<_> = layout.rank_slices(rank).copied().collect();
            prop_assert!(slices.iter().all(|slice| slice.rank == rank));
            prop_assert!(slices.is_sorted_by_key(|slice| (slice.block, slice.at)));
            all.extend(slices);
        }
        let by_param: BTreeSet<_> = params.iter().flat_map(|(id, _)| layout.slices(id).to_vec()).collect();
        prop_assert_eq!(all, by_param);
    }

    #[test]
    fn buckets_follow_the_plan((params, layout) in strategies::layout()) {
        let size = layout.bucket_size().get();
        let position = |id| params.plan_order().position(|other| other == id).unwrap();
        let elems = |ids: &[_]| ids.iter().map(|id| params.get(*id).elems()).sum::<usize>();
        let mut seen = BTreeSet::new();
        for (id, bucket) in layout.bucket_ids().zip(layout.buckets()) {
            prop_assert!(bucket.params.is_sorted_by_key(|id| position(*id)));
            for param in &bucket.params {
                prop_assert!(seen.insert(*param), "a parameter lies in one bucket");
                prop_assert_eq!(layout.bucket_of(*param), Some(id));
                prop_assert!(layout.slices(*param).iter().all(|slice| slice.block == bucket.block));
            }
            prop_assert_eq!(layout.block(bucket.block).space, bucket.space);
            let in_block: BTreeSet<_> = layout.block(bucket.block).runs.iter().filter_map(|run| Some(run.source?.param)).collect();
            prop_assert_eq!(bucket.is_block, layout.placement() != Placement::Flat);
            if bucket.is_block {
                prop_assert_eq!(in_block, bucket.params.iter().copied().collect());
            }
        }
        let filled: BTreeSet<_> = params.iter().filter(|(_, param)| param.elems() > 0).map(|(id, _)| id).collect();
        prop_assert_eq!(&seen, &filled);
        for (id, param) in params.iter().filter(|(_, param)| param.elems() == 0) {
            prop_assert_eq!(param.elems(), 0);
            prop_assert_eq!(layout.bucket_of(id), None);
            prop_assert!(layout.slices(id).is_empty() && layout.owners(id).is_empty());
        }
        let lasts: Vec<_> = layout.buckets().iter().map(|bucket| position(*bucket.params.last().unwrap())).collect();
        prop_assert!(lasts.is_sorted(), "each bucket is full before its successor");

        // Greedy within each flat space, but for blocks of whole matrices.
        for (index, space) in layout.spaces().iter().enumerate() {
            if layout.placement() == Placement::Whole && space.group == UpdateGroup::Muon {
                continue;
            }
            let buckets: Vec<_> = layout.buckets().iter().filter(|bucket| bucket.space.index() == index).collect();
            for bucket in &buckets {
                prop_assert!(elems(&bucket.params) <= size || bucket.params.len() == 1);
            }
            for pair in buckets.windows(2) {
                let next = pair[1].params[0];
                prop_assert!(elems(&pair[0].params) + elems(&[next]) > size, "it closed too early");
                prop_assert!(position(*pair[0].params.last().unwrap()) < position(next));
            }
        }
    }

    #[test]
    fn spaces_are_few_and_ordered((params, layout) in strategies::layout()) {
        prop_assert!(layout.spaces().is_sorted_by(|a, b| a < b));
        let expected: BTreeSet<_> = params.iter().filter(|(_, param)| param.elems() > 0).map(|(_, param)| (param.group(), param.wire)).collect();
        prop_assert_eq!(layout.spaces().iter().map(|space| (space.group, space.wire)).collect::<BTreeSet<_>>(), expected);
    }

    #[test]
    fn even_blocks_pad_less_than_two_a_rank((params, layout) in strategies::layout()) {
        let world = layout.world().get();
        for block in layout.blocks() {
            if layout.placement() == Placement::Whole && layout.space(block.space).group == UpdateGroup::Muon {
                continue;
            }
            let padding: usize = block.runs.iter().filter(|run| run.source.is_none()).map(|run| run.len).sum();
            prop_assert!(padding < 2 * world);
            // All at the end, and parameters whole.
            let filled = block.runs.iter().take_while(|run| run.source.is_some()).count();
            prop_assert!(block.runs.len() - filled <= 1);
            for run in &block.runs[..filled] {
                prop_assert_eq!(run.len, params.get(run.source.unwrap().param).elems());
            }
            if layout.placement() == Placement::Striped {
                prop_assert!(block.runs[..filled].is_sorted_by(|a, b| a.source.unwrap().param > b.source.unwrap().param), "plan order");
            }
        }
    }
}

#[test]
fn a_layout_that_no_word_can_count_is_refused() {
    let vector = |len| {
        Params::new(vec![Param {
            name: "a".into(),
            shape: [len].into_iter().collect(),
            wire: Wire::F32,
            matrices: vec![],
        }])
        .unwrap()
    };
    let layout = |len, world| {
        Layout::new(
            &vector(len),
            WorldSize::new(world).unwrap(),
            Placement::Striped,
            NonZeroUsize::MIN,
        )
    };
    let error = Error::TooLarge {
        what: "the layout".into(),
    };
    assert_eq!(layout(usize::MAX / 2 + 1, 1), Err(error.clone()));
    assert_eq!(layout(usize::MAX / 2, 2), Err(error.clone()));
    assert_eq!(layout(1, usize::MAX), Err(error));
    assert!(layout(usize::MAX / 4, 2).is_ok());
}
