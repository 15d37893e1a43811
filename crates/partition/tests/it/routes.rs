//! Gradients on their way: what is reduced, who has what then, and who keeps what.

use std::collections::{BTreeMap, BTreeSet};

use polarshard_partition::{
    BucketPlan, Layout, ParamId, Params, Place, Placement, Plan, Policy, Rank, Reduction, Route,
    Span, strategies,
};
use proptest::prelude::*;

use crate::oracle::Oracle;

/// The consumers of an element, as routes and policies are defined.
fn consumers(plan: &Plan, oracle: &Oracle, param: ParamId, elem: usize) -> BTreeSet<Rank> {
    let whole = plan.policy() == Policy::CopyToOwners && oracle.split(plan.params(), param);
    match plan.route() {
        Route::AllReduce => plan.layout().world().ranks().collect(),
        Route::BucketAllReduce | Route::ReduceToOwner if whole => oracle.param_owners(param),
        _ => [oracle.owner(param, elem)].into(),
    }
}

/// The parameter and element at every place of a buffer; `None` is padding.
fn contents(plan: &BucketPlan) -> Vec<Option<(ParamId, usize)>> {
    let mut contents = vec![None; plan.len];
    for piece in &plan.pieces {
        for (offset, elem) in (piece.span.start..piece.span.end).enumerate() {
            assert_eq!(
                contents[piece.at + offset].replace((piece.param, elem)),
                None,
                "pieces overlap"
            );
        }
    }
    contents
}

/// Whether `rank` has the sum at `place` once `op` has run.
fn has_sum(op: &Reduction, rank: Rank, place: usize, shard_len: usize) -> bool {
    let within = (op.span().start..op.span().end).contains(&place);
    within
        && match op {
            Reduction::AllReduce(_) => true,
            Reduction::Reduce { root, .. } => *root == rank,
            Reduction::ReduceScatter(_) => place / shard_len == rank.0,
        }
}

fn native(plan: &Plan) -> bool {
    plan.route() == Route::ReduceScatter && plan.layout().placement() != Placement::Flat
}

proptest! {
    #[test]
    fn buffers_hold_each_parameter_of_the_bucket_once(plan in strategies::plan()) {
        let (params, layout) = (plan.params(), plan.layout());
        for (bucket, content) in layout.buckets().iter().zip(plan.buckets()) {
            prop_assert!(content.pieces.is_sorted_by(|a, b| a.at + a.span.len() <= b.at));
            let mut elems: Vec<_> = contents(content).into_iter().flatten().collect();
            let block = layout.block(bucket.block);
            if native(&plan) {
                // The buffer is the block.
                prop_assert_eq!(content.len, block.shard_len * layout.world().get());
                for run in &block.runs {
                    let first = contents(content)[run.at];
                    prop_assert_eq!(first, run.source.map(|source| (source.param, source.start)));
                }
            } else {
                prop_assert_eq!(elems.len(), content.len, "no padding");
            }
            elems.sort_unstable();
            let mut expected: Vec<_> = bucket.params.iter().flat_map(|id| (0..params.get(*id).elems()).map(|elem| (*id, elem))).collect();
            expected.sort_unstable();
            prop_assert_eq!(elems, expected);
            for (id, _) in params.iter() {
                let pieces: Vec<_> = content.pieces_of(id).copied().collect();
                prop_assert!(pieces.is_sorted_by_key(|piece| piece.span.start));
                let all: BTreeSet<_> = content.pieces.iter().filter(|piece| piece.param == id).copied().collect();
                prop_assert_eq!(pieces.len(), all.len());
                prop_assert_eq!(pieces.into_iter().collect::<BTreeSet<_>>(), all);
            }
        }
    }

    #[test]
    fn a_buffer_lies_in_the_order_of_the_flat_space(plan in strategies::plan()) {
        let oracle = Oracle::new(plan.params(), plan.layout());
        for content in plan.buckets() {
            let homes: Vec<_> = contents(content).into_iter().flatten().map(|(param, elem)| oracle.home(param, elem)).collect();
            prop_assert!(homes.is_sorted());
        }
    }

    #[test]
    fn segments_are_the_runs_of_one_owner_and_one_set_of_consumers(plan in strategies::plan()) {
        let oracle = Oracle::new(plan.params(), plan.layout());
        for content in plan.buckets() {
            // Element by element: a segment ends where anything changes.
            let attributes: Vec<_> = contents(content).into_iter().map(|place| {
                let (param, elem) = place?;
                Some((oracle.owner(param, elem), consumers(&plan, &oracle, param, elem)))
            }).collect();
            let mut expected: Vec<(usize, usize, _)> = Vec::new();
            for (place, attributes) in attributes.into_iter().enumerate() {
                let Some(attributes) = attributes else { continue };
                match expected.last_mut() {
                    Some((_, end, last)) if *end == place && *last == attributes => *end += 1,
                    _ => expected.push((place, place + 1, attributes)),
                }
            }
            let segments: Vec<_> = content.segments.iter().map(|segment| {
                (segment.span.start, segment.span.end, (segment.owner, segment.consumers.iter().collect()))
            }).collect();
            prop_assert_eq!(segments, expected);
        }
    }

    #[test]
    fn every_consumer_gets_the_sum_and_nobody_else_copies_it(plan in strategies::plan()) {
        let layout = plan.layout();
        let oracle = Oracle::new(plan.params(), layout);
        for (id, content) in layout.bucket_ids().zip(plan.buckets()) {
            let shard_len = layout.block(layout.bucket(id).block).shard_len;
            let contents = contents(content);
            let mut copied = vec![BTreeSet::new(); content.len];
            for rank in layout.world().ranks() {
                let mut end = 0;
                for kept in plan.kept(id, rank) {
                    prop_assert!(kept.from.start >= end && !kept.from.is_empty());
                    end = kept.from.end;
                    for (offset, place) in (kept.from.start..kept.from.end).enumerate() {
                        let (param, elem) = contents[place].expect("padding is kept by nobody");
                        let sums = content.ops.iter().filter(|op| has_sum(op, rank, place, shard_len)).count();
                        prop_assert_eq!(sums, 1, "what is kept has been summed, once");
                        prop_assert!(copied[place].insert(rank), "kept once");
                        let whole = consumers(&plan, &oracle, param, elem).len() > 1 || plan.route() == Route::AllReduce;
                        match kept.into {
                            Place::Whole { param: into, at } => prop_assert_eq!((into, at + offset, true), (param, elem, whole)),
                            Place::Shard { block, at } => {
                                let home = oracle.home(param, elem);
                                prop_assert_eq!((block, rank, at + offset, false), (home.block, home.rank, home.at, whole));
                            }
                        }
                    }
                }
            }
            for (place, ranks) in copied.into_iter().enumerate() {
                let expected = contents[place].map(|(param, elem)| consumers(&plan, &oracle, param, elem));
                prop_assert_eq!(ranks, expected.unwrap_or_default());
            }
        }
    }

    #[test]
    fn kept_runs_are_as_few_as_can_be(plan in strategies::plan()) {
        for id in plan.layout().bucket_ids() {
            for rank in plan.layout().world().ranks() {
                for pair in plan.kept(id, rank).windows(2) {
                    let len = pair[0].from.len();
                    let continues = match (pair[0].into, pair[1].into) {
                        (Place::Shard { block: a, at }, Place::Shard { block: b, at: next }) => a == b && at + len == next,
                        (Place::Whole { param: a, at }, Place::Whole { param: b, at: next }) => a == b && at + len == next,
                        _ => false,
                    };
                    prop_assert!(!(continues && pair[0].from.end == pair[1].from.start), "{:?} could be one", pair);
                }
            }
        }
    }

    #[test]
    fn calls_are_those_of_the_route(plan in strategies::plan()) {
        let oracle = Oracle::new(plan.params(), plan.layout());
        for content in plan.buckets() {
            let contents = contents(content);
            let all = Span::new(0, content.len);
            match plan.route() {
                Route::AllReduce | Route::BucketAllReduce => prop_assert_eq!(&content.ops, &[Reduction::AllReduce(all)]),
                Route::ReduceScatter if native(&plan) => prop_assert_eq!(&content.ops, &[Reduction::ReduceScatter(all)]),
                Route::ReduceScatter | Route::ReduceToOwner => {
                    let mut expected: Vec<Reduction> = Vec::new();
                    for (place, elem) in contents.into_iter().enumerate() {
                        let (param, elem) = elem.expect("no padding");
                        let owner = oracle.owner(param, elem);
                        let shared = consumers(&plan, &oracle, param, elem).len() > 1;
                        match expected.last_mut() {
                            Some(Reduction::AllReduce(span)) if shared => span.end += 1,
                            Some(Reduction::Reduce { span, root }) if !shared && *root == owner => span.end += 1,
                            _ => {
                                let span = Span::of_len(place, 1);
                                expected.push(if shared { Reduction::AllReduce(span) } else { Reduction::Reduce { span, root: owner } });
                            }
                        }
                    }
                    prop_assert_eq!(&content.ops, &expected);
                }
            }
        }
    }

    #[test]
    fn whole_gradients_and_momenta_are_named(plan in strategies::plan()) {
        let (params, layout) = (plan.params(), plan.layout());
        let oracle = Oracle::new(params, layout);
        for rank in layout.world().ranks() {
            let mut whole = BTreeMap::<ParamId, usize>::new();
            for bucket in layout.bucket_ids() {
                for kept in plan.kept(bucket, rank) {
                    if let Place::Whole { param, .. } = kept.into {
                        *whole.entry(param).or_default() += kept.from.len();
                    }
                }
            }
            prop_assert!(whole.iter().all(|(param, elems)| params.get(*param).elems() == *elems));
            prop_assert_eq!(plan.replicas(rank), whole.into_keys().collect::<Vec<_>>());
            let momentum: Vec<_> = params.iter().map(|(id, _)| id).filter(|id| {
                plan.policy() == Policy::CopyToOwners && oracle.split(params, *id) && oracle.param_owners(*id).contains(&rank)
            }).collect();
            prop_assert_eq!(plan.full_momentum(rank), momentum);
        }
    }

    #[test]
    fn windows_tile_the_shards((params, layout) in strategies::layout()) {
        let world = layout.world().get();
        let limit = layout.bucket_size().get().max(world);
        let plan = plan_of(&params, layout);
        for (id, block) in plan.layout().block_ids().zip(plan.layout().blocks()) {
            let windows = plan.windows(id);
            let mut end = 0;
            for window in &windows {
                prop_assert_eq!(window.start, end);
                prop_assert!(!window.is_empty() && world * window.len() <= limit);
                end = window.end;
            }
            // One rank alone has nothing to gather.
            prop_assert_eq!(end, if world == 1 { 0 } else { block.shard_len });
            for pair in windows.windows(2) {
                prop_assert!(world * (pair[0].len() + 1) > limit, "{:?} could be longer", pair[0]);
            }
        }
    }
}

fn plan_of(params: &Params, layout: Layout) -> Plan {
    Plan::new(params, layout, Route::default(), Policy::default())
}
