//! Predictions against counts that go element by element.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use polarshard_partition::{
    Bytes, Call, Class, Collective, Layout, Matrix, Memory, Param, Params, Placement, Plan, Policy,
    Rank, Route, SpaceId, Span, Stage, Terms, Traffic, UpdateGroup, Wire, WorldSize, strategies,
};
use proptest::prelude::*;

use crate::oracle::{Oracle, matrix_at};

fn traffic(plan: &Plan, terms: &Terms) -> Traffic {
    let world = plan.layout().world();
    let calls: Vec<Vec<Call>> = world
        .ranks()
        .map(|rank| plan.predict(rank, terms).calls)
        .collect();
    let collectives = |calls: &[Call]| {
        calls
            .iter()
            .filter(|call| call.collective != Collective::Send)
            .copied()
            .collect::<Vec<_>>()
    };
    assert!(
        calls
            .iter()
            .all(|of_rank| collectives(of_rank) == collectives(&calls[0])),
        "collectives are the same on all ranks"
    );
    Traffic::of(world, &calls)
}

const fn micro_batches(terms: &Terms) -> u64 {
    match terms.stage {
        Stage::One => 1,
        Stage::Two => terms.accumulate.get() as u64,
    }
}

/// Bytes of gradients, exchanges and weights, summed over ranks.
fn count(plan: &Plan, terms: &Terms) -> (u64, u64, u64) {
    let (params, layout) = (plan.params(), plan.layout());
    let oracle = Oracle::new(params, layout);
    let hops = layout.world().get() as u64 - 1;
    let native = plan.route() == Route::ReduceScatter && layout.placement() != Placement::Flat;
    let (mut gradients, mut exchanges, mut weights) = (0, 0, 0);
    for (id, param) in params.iter() {
        let wire = terms.gradient_wire.unwrap_or(param.wire).bytes() as u64;
        let owners = oracle.param_owners(id).len() as u64;
        let copied = plan.policy() == Policy::CopyToOwners && oracle.split(params, id);
        for elem in 0..param.elems() {
            gradients += wire
                * match plan.route() {
                    Route::AllReduce | Route::BucketAllReduce => 2 * hops,
                    Route::ReduceToOwner if copied => 2 * hops,
                    Route::ReduceToOwner | Route::ReduceScatter => hops,
                };
            weights += hops * param.wire.bytes() as u64;
            if param.group() == UpdateGroup::AdamW {
                continue;
            }
            let matrix = matrix_at(params, id, elem);
            let matrix_owners = oracle.owners(id, params.matrix(matrix).1.span).len() as u64;
            exchanges += match plan.policy() {
                Policy::CopyToOwners if plan.route() == Route::ReduceScatter => 4 * (owners - 1),
                Policy::CopyToOwners => 0,
                Policy::ExchangeUpdate => 4 * (matrix_owners - 1),
                Policy::AssignOwner
                    if plan.compute_owner(matrix) == Some(oracle.owner(id, elem)) =>
                {
                    0
                }
                Policy::AssignOwner => 4 + terms.result_wire.bytes() as u64,
            };
        }
    }
    // Padding travels with native collectives alone.
    for block in layout.blocks() {
        let padding: usize = block
            .runs
            .iter()
            .filter(|run| run.source.is_none())
            .map(|run| run.len)
            .sum();
        let weight = layout.space(block.space).wire;
        weights += hops * padding as u64 * weight.bytes() as u64;
        if native {
            gradients +=
                hops * padding as u64 * terms.gradient_wire.unwrap_or(weight).bytes() as u64;
        }
    }
    (micro_batches(terms) * gradients, exchanges, weights)
}

proptest! {
    #[test]
    fn bytes_are_those_of_every_element(plan in strategies::plan(), terms in strategies::terms()) {
        let traffic = traffic(&plan, &terms);
        let (gradients, exchanges, weights) = count(&plan, &terms);
        prop_assert_eq!(traffic.class(Class::Gradient).bytes, gradients);
        prop_assert_eq!(traffic.class(Class::Exchange).bytes, exchanges);
        prop_assert_eq!(traffic.class(Class::Weight).bytes, weights);
        let hops = plan.layout().world().get() as u64 - 1;
        prop_assert_eq!(traffic.class(Class::Control).bytes, 2 * hops * 8 * terms.control_elems as u64);
        prop_assert_eq!(traffic.class(Class::Control).calls, 1);
    }

    #[test]
    fn calls_come_in_order_and_number(plan in strategies::plan(), terms in strategies::terms()) {
        let layout = plan.layout();
        for rank in layout.world().ranks() {
            let calls = plan.predict(rank, &terms).calls;
            let order = |call: &Call| match call.class {
                Class::Gradient => 0,
                Class::Control => 1,
                Class::Exchange => 2,
                Class::Weight => 3,
            };
            prop_assert!(calls.is_sorted_by_key(order));
            let reductions: usize = plan.buckets().iter().map(|bucket| bucket.ops.len()).sum();
            let number = |class| calls.iter().filter(|call| call.class == class).count();
            prop_assert_eq!(number(Class::Gradient), reductions * micro_batches(&terms) as usize);
            prop_assert_eq!(number(Class::Weight), layout.block_ids().map(|id| plan.windows(id).len()).sum::<usize>());
            let sends = plan.exchange_kinds().iter().flat_map(|kind| plan.exchange(*kind, rank).sends);
            let sends: Vec<_> = sends.map(|parcel| (parcel.span.len(), Some(parcel.peer))).collect();
            let recorded = calls.iter().filter(|call| call.class == Class::Exchange).map(|call| (call.elems, call.root));
            prop_assert_eq!(recorded.collect::<Vec<_>>(), sends);
            for call in &calls {
                let rooted = matches!(call.collective, Collective::Reduce | Collective::Send);
                prop_assert_eq!(call.root.is_some(), rooted);
            }
        }
    }

    #[test]
    fn flops_are_those_of_the_jobs(plan in strategies::plan(), terms in strategies::terms()) {
        for rank in plan.layout().world().ranks() {
            let jobs: u64 = plan.jobs(rank).iter().map(|id| plan.params().matrix(*id).1.cost).sum();
            prop_assert_eq!(plan.predict(rank, &terms).flops, jobs);
        }
    }

    #[test]
    fn a_reduce_scatter_sends_half_of_an_all_reduce_and_its_padding((params, layout) in strategies::layout(), terms in strategies::terms()) {
        let policy = Policy::AssignOwner;
        let bytes = |route| traffic(&Plan::new(&params, layout.clone(), route, policy), &terms).class(Class::Gradient).bytes;
        let hops = layout.world().get() as u64 - 1;
        let padding: u64 = layout.blocks().iter().map(|block| {
            let wire = terms.gradient_wire.unwrap_or(layout.space(block.space).wire).bytes();
            block.runs.iter().filter(|run| run.source.is_none()).map(|run| (run.len * wire) as u64).sum::<u64>()
        }).sum();
        let padding = if layout.placement() == Placement::Flat { 0 } else { micro_batches(&terms) * hops * padding };
        prop_assert_eq!(bytes(Route::ReduceScatter), bytes(Route::BucketAllReduce) / 2 + padding);
    }

    #[test]
    fn an_assigned_matrix_travels_but_for_its_compute_owners_share((params, layout) in strategies::layout(), terms in strategies::terms()) {
        let oracle = Oracle::new(&params, &layout);
        let plan = Plan::new(&params, layout, Route::ReduceScatter, Policy::AssignOwner);
        let travelling: usize = params.matrices().map(|(id, param, matrix)| {
            matrix.span.len() - oracle.share(param, matrix, plan.compute_owner(id).unwrap())
        }).sum();
        let bytes = travelling * (4 + terms.result_wire.bytes());
        prop_assert_eq!(traffic(&plan, &terms).class(Class::Exchange).bytes, bytes as u64);
    }

    #[test]
    fn the_default_holds_its_shards_and_nothing_more((params, layout) in strategies::layout(), terms in strategies::terms()) {
        let plan = Plan::new(&params, layout, Route::ReduceScatter, Policy::AssignOwner);
        let layout = plan.layout();
        let elems: usize = params.iter().map(|(_, param)| param.elems()).sum();
        let bytes = |elems: usize| Bytes(4 * elems as u64);
        let mut masters = Bytes(0);
        let mut state = Bytes(0);
        for rank in layout.world().ranks() {
            let memory = plan.predict(rank, &terms).memory;
            prop_assert!(memory.reduced_gradients <= memory.masters);
            let buckets = plan.buckets().iter().map(|bucket| bucket.len).sum();
            let accumulates = terms.stage == Stage::One && terms.accumulate.get() > 1;
            prop_assert_eq!(memory.unreduced_gradients, bytes(if accumulates { buckets } else { 0 }));
            masters = masters + memory.masters;
            state = state + memory.momentum + memory.momentum + memory.moments;
        }
        prop_assert_eq!(masters, bytes(elems + layout.padding()));
        prop_assert_eq!(state, bytes(2 * elems));
    }

    #[test]
    fn buffers_are_those_that_a_step_makes(plan in strategies::plan(), terms in strategies::terms()) {
        let memory = plan.predict(Rank(0), &terms).memory;
        prop_assert_eq!(memory.buckets, wire_buffers(&plan, &terms));
        prop_assert_eq!(memory.staging, staging_buffers(&plan));
    }
}

/// Buffers of flat spaces, all as long as the longest use, that are made when none is free and never unmade.
#[derive(Default)]
struct Pool {
    longest: BTreeMap<SpaceId, usize>,
    free: BTreeMap<SpaceId, usize>,
    made: BTreeMap<SpaceId, usize>,
}

impl Pool {
    fn take(&mut self, space: SpaceId, len: usize) {
        let longest = self.longest.entry(space).or_default();
        *longest = len.max(*longest);
        match self.free.get_mut(&space) {
            Some(free) if *free > 0 => *free -= 1,
            _ => *self.made.entry(space).or_default() += 1,
        }
    }

    fn give_back(&mut self, space: SpaceId) {
        *self.free.entry(space).or_default() += 1;
    }

    fn bytes(&self, wire: impl Fn(SpaceId) -> Wire) -> Bytes {
        let each = self.made.iter().map(|(space, made)| {
            let bytes = made * self.longest[space] * wire(*space).bytes();
            Bytes(bytes as u64)
        });
        each.sum()
    }
}

/// Fills, reduces and collects the buckets of a micro-batch, parameter by parameter.
fn wire_buffers(plan: &Plan, terms: &Terms) -> Bytes {
    let layout = plan.layout();
    let space = |bucket: usize| layout.buckets()[bucket].space;
    let mut pool = Pool::default();
    let mut arrived = vec![0; layout.buckets().len()];
    let (mut next, mut reducing) = (0, None);
    for param in plan.params().plan_order() {
        let Some(bucket) = layout.bucket_of(param).map(|bucket| bucket.index()) else {
            continue;
        };
        if arrived[bucket] == 0 {
            pool.take(space(bucket), plan.buckets()[bucket].len);
        }
        arrived[bucket] += 1;
        while next < arrived.len() && arrived[next] == layout.buckets()[next].params.len() {
            if let Some(before) = reducing.replace(next) {
                pool.give_back(space(before));
            }
            if !terms.overlap {
                reducing = None;
                pool.give_back(space(next));
            }
            next += 1;
        }
    }
    pool.bytes(|space| terms.gradient_wire.unwrap_or(layout.space(space).wire))
}

/// Gathers and copies the weights, window by window.
fn staging_buffers(plan: &Plan) -> Bytes {
    let layout = plan.layout();
    let world = layout.world().get();
    let mut pool = Pool::default();
    let mut gathering = None;
    for id in layout.block_ids() {
        let space = layout.block(id).space;
        for window in plan.windows(id) {
            pool.take(space, world * window.len());
            if let Some(before) = gathering.replace(space) {
                pool.give_back(before);
            }
        }
    }
    pool.bytes(|space| layout.space(space).wire)
}

/// What fills while what is reduced, by hand. A capital letter fills a bucket, two small ones share one.
#[test]
fn wire_buffers_of_worked_examples() {
    let bytes = |plan_order: &str, overlap| {
        let param = |(index, kind): (usize, char)| {
            let rows = if kind.is_uppercase() { 4 } else { 2 };
            let matrix = Matrix {
                span: Span::new(0, rows * 3),
                rows,
                cols: 3,
                cost: 1,
            };
            let is_muon = kind.eq_ignore_ascii_case(&'m');
            Param {
                name: index.to_string(),
                shape: [rows, 3].into_iter().collect(),
                wire: Wire::F32,
                matrices: is_muon.then_some(matrix).into_iter().collect(),
            }
        };
        let params = plan_order.chars().rev().enumerate().map(param);
        let params = Params::new(params.collect()).unwrap();
        let (world, size) = (WorldSize::new(2).unwrap(), NonZeroUsize::new(12).unwrap());
        let layout = Layout::new(&params, world, Placement::Striped, size).unwrap();
        let plan = Plan::new(&params, layout, Route::ReduceScatter, Policy::AssignOwner);
        let terms = Terms {
            stage: Stage::Two,
            accumulate: NonZeroUsize::MIN,
            gradient_wire: None,
            result_wire: Wire::F32,
            control_elems: 0,
            overlap,
        };
        plan.predict(Rank(1), &terms).memory.buckets
    };
    // The second bucket fills while the first one is reduced; a third one takes the first one's buffer.
    assert_eq!(bytes("M", true), Bytes(12 * 4));
    assert_eq!(bytes("MM", true), Bytes(2 * 12 * 4));
    assert_eq!(bytes("MMM", true), Bytes(2 * 12 * 4));
    // The bucket of vectors is full before the second matrix comes, so the first one's buffer is free by then.
    assert_eq!(bytes("MvvM", true), Bytes((12 + 12) * 4));
    // It is not yet full when the second bucket of matrices begins. Six elements are padded to eight.
    assert_eq!(bytes("Mmvm", true), Bytes((2 * 12 + 8) * 4));
    // A reduction that is waited for leaves nothing behind.
    assert_eq!(bytes("MMM", false), Bytes(12 * 4));
}

/// Three matrices on three ranks: 20 elements of a shard; a is on ranks 0 and 1, b on 1 and 2, c on
/// 2 with one element of padding. And a bias, with 2 elements of a shard.
#[test]
fn memory_of_a_worked_example() {
    let muon = |name: &str, rows, cols| Param {
        name: name.into(),
        shape: [rows, cols].into_iter().collect(),
        wire: Wire::BF16,
        matrices: vec![Matrix {
            span: Span::new(0, rows * cols),
            rows,
            cols,
            cost: 1,
        }],
    };
    let bias = Param {
        name: "bias".into(),
        shape: [4].into_iter().collect(),
        wire: Wire::F32,
        matrices: vec![],
    };
    let params = Params::new(vec![
        muon("a", 7, 5),
        muon("b", 5, 3),
        muon("c", 3, 3),
        bias,
    ])
    .unwrap();
    let layout = Layout::new(
        &params,
        WorldSize::new(3).unwrap(),
        Placement::Flat,
        NonZeroUsize::new(40).unwrap(),
    )
    .unwrap();
    let terms = Terms {
        stage: Stage::One,
        accumulate: NonZeroUsize::new(2).unwrap(),
        gradient_wire: None,
        result_wire: Wire::F16,
        control_elems: 5,
        overlap: true,
    };
    let memory = |route, policy, rank| {
        Plan::new(&params, layout.clone(), route, policy)
            .predict(Rank(rank), &terms)
            .memory
    };

    // Rank 1 owns 15 of a and 5 of b. Buckets: b and c are 24 elements, a is 35, the bias 4.
    let shards = Memory {
        weights: Bytes(59 * 2 + 4 * 4),
        masters: Bytes(22 * 4),
        momentum: Bytes(20 * 4),
        moments: Bytes(2 * 4 * 2),
        reduced_gradients: Bytes(20 * 2 + 2 * 4),
        unreduced_gradients: Bytes(63 * 4),
        // a fills while b and c are reduced, in buffers that a fits in.
        buckets: Bytes(2 * 35 * 2 + 4 * 4),
        // It sends 5 of b to rank 2 and gets 10, sends 15 of a to rank 0 and gets 20.
        exchange: Bytes((5 + 10 + 15 + 20) * 4),
        // 20 elements of a shard in windows of 13 and 7, both in buffers for 13 of each rank; and 2 of the bias.
        staging: Bytes(2 * 3 * 13 * 2 + 3 * 2 * 4),
    };
    assert_eq!(
        memory(Route::ReduceScatter, Policy::ExchangeUpdate, 1),
        shards
    );
    // Both matrices that it owns a part of are whole, so there is no sum of a shard of them.
    assert_eq!(
        memory(Route::ReduceToOwner, Policy::CopyToOwners, 1),
        Memory {
            momentum: Bytes((35 + 15) * 4),
            reduced_gradients: Bytes((35 + 15) * 2 + 2 * 4),
            exchange: Bytes(0),
            ..shards
        }
    );
    assert_eq!(
        memory(Route::ReduceScatter, Policy::CopyToOwners, 1),
        Memory {
            momentum: Bytes((35 + 15) * 4),
            ..shards
        }
    );
    assert_eq!(
        memory(Route::AllReduce, Policy::ExchangeUpdate, 1),
        Memory {
            reduced_gradients: Bytes(59 * 2 + 4 * 4),
            ..shards
        }
    );
    // Rank 2 owns 10 of b, c, an element of padding, and of the bias padding alone. The sum of its shard is there for c.
    assert_eq!(
        memory(Route::BucketAllReduce, Policy::CopyToOwners, 2),
        Memory {
            momentum: Bytes((15 + 9) * 4),
            moments: Bytes(0),
            reduced_gradients: Bytes((15 + 20) * 2),
            exchange: Bytes(0),
            ..shards
        }
    );
    let total = shards.total();
    assert_eq!(
        total,
        Bytes(134 + 88 + 80 + 16 + 48 + 252 + 156 + 200 + 180)
    );
    assert_eq!(total.to_string(), "1154 bytes");
    // Stage 2 accumulates shards, in fp32.
    let stage_two = Terms {
        stage: Stage::Two,
        ..terms
    };
    let plan = Plan::new(
        &params,
        layout.clone(),
        Route::ReduceScatter,
        Policy::ExchangeUpdate,
    );
    assert_eq!(
        plan.predict(Rank(1), &stage_two).memory,
        Memory {
            reduced_gradients: Bytes(22 * 4),
            unreduced_gradients: Bytes(0),
            ..shards
        }
    );
}
