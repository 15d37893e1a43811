//! The planner: what it compares, what it prefers, and what it refuses.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;

use polarshard_partition::{
    Bytes, Candidate, Costs, Error, Layout, Params, Plan, Policy, Route, Stage, Terms, Traffic,
    Wire, WorldSize, plan_best, strategies,
};
use proptest::prelude::*;

use crate::models;

const COSTS: Costs = Costs {
    link_bytes_per_second: 50e9,
    flops_per_second: 400e12,
    call_seconds: 20e-6,
    memory_limit: None,
};

fn terms() -> Terms {
    Terms {
        stage: Stage::Two,
        accumulate: NonZeroUsize::MIN,
        gradient_wire: None,
        result_wire: Wire::F16,
        control_elems: 8,
        overlap: true,
    }
}

fn best(params: &Params, world: usize, costs: &Costs) -> Result<Vec<Candidate>, Error> {
    plan_best(
        params,
        WorldSize::new(world).unwrap(),
        NonZeroUsize::new(25_000_000).unwrap(),
        &terms(),
        costs,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn every_combination_is_predicted(params in strategies::params(), world in strategies::world(), size in strategies::bucket_size(), terms in strategies::terms()) {
        let costs = Costs { link_bytes_per_second: 1e3, flops_per_second: 1e5, call_seconds: 1e-2, memory_limit: None };
        let candidates = plan_best(&params, world, size, &terms, &costs).unwrap();
        let combinations: BTreeSet<_> = candidates.iter().map(|c| (c.placement, c.route, c.policy)).collect();
        prop_assert_eq!((candidates.len(), combinations.len()), (36, 36));
        for candidate in &candidates {
            let layout = Layout::new(&params, world, candidate.placement, size).unwrap();
            let plan = Plan::new(&params, layout, candidate.route, candidate.policy);
            let predictions: Vec<_> = world.ranks().map(|rank| plan.predict(rank, &terms)).collect();
            let calls: Vec<_> = predictions.iter().map(|prediction| prediction.calls.clone()).collect();
            prop_assert_eq!(candidate.bytes, Traffic::of(world, &calls).total().bytes);
            prop_assert_eq!(Some(candidate.calls), calls.iter().map(|calls| calls.len() as u64).max());
            prop_assert_eq!(Some(candidate.flops), predictions.iter().map(|prediction| prediction.flops).max());
            prop_assert_eq!(Some(candidate.memory), predictions.iter().map(|prediction| prediction.memory.total()).max());
            let seconds = candidate.bytes as f64 / world.get() as f64 / 1e3 + candidate.flops as f64 / 1e5 + candidate.calls as f64 * 1e-2;
            prop_assert!((candidate.seconds - seconds).abs() <= 1e-12 * seconds);
        }
        let sorted = candidates.is_sorted_by(|a, b| {
            let key = |c: &Candidate| (c.bytes, c.placement, c.route, c.policy);
            a.seconds < b.seconds || a.seconds == b.seconds && key(a) < key(b)
        });
        prop_assert!(sorted);
    }
}

/// Newton-Schulz once a matrix, spread over the ranks, is what counts where FLOPs are dear.
#[test]
fn slow_ranks_assign_each_matrix_to_one() {
    let costs = Costs {
        flops_per_second: 1e12,
        ..COSTS
    };
    let candidates = best(&models::gpt2_124m(), 8, &costs).unwrap();
    assert_eq!(candidates[0].policy, Policy::AssignOwner);
    let least = candidates.iter().map(|candidate| candidate.flops).min();
    assert_eq!(least, Some(candidates[0].flops));
}

/// All-reduces send the gradients twice, which is what counts where bytes are dear.
#[test]
fn slow_links_reduce_to_owners_or_scatter() {
    let costs = Costs {
        link_bytes_per_second: 1e9,
        call_seconds: 0.0,
        ..COSTS
    };
    let candidates = best(&models::gpt2_124m(), 8, &costs).unwrap();
    let once = |candidate: &Candidate| {
        matches!(candidate.route, Route::ReduceToOwner | Route::ReduceScatter)
    };
    assert!(once(&candidates[0]));
    let least = candidates.iter().map(|candidate| candidate.bytes).min();
    assert_eq!(least, Some(candidates[0].bytes));
}

/// A bucket is one reduce-scatter, or a reduction to each of its owners, of nearly the same bytes.
#[test]
fn slow_calls_scatter() {
    let candidates = best(&models::gpt2_124m(), 8, &COSTS).unwrap();
    assert_eq!(candidates[0].route, Route::ReduceScatter);
    let to_owners = |candidate: &&Candidate| {
        let alike = (candidate.placement, candidate.policy);
        candidate.route == Route::ReduceToOwner
            && alike == (candidates[0].placement, candidates[0].policy)
    };
    let other = candidates.iter().find(to_owners).unwrap();
    assert!(other.calls > candidates[0].calls && other.seconds > candidates[0].seconds);
}

#[test]
fn candidates_over_the_memory_limit_are_left_out() {
    let params = models::gpt2_124m();
    let all = best(&params, 8, &COSTS).unwrap();
    let mut memory: Vec<_> = all.iter().map(|candidate| candidate.memory).collect();
    memory.sort_unstable();
    let limit = memory[10];
    let some = best(
        &params,
        8,
        &Costs {
            memory_limit: Some(limit),
            ..COSTS
        },
    )
    .unwrap();
    let expected: Vec<_> = all
        .iter()
        .filter(|candidate| candidate.memory <= limit)
        .copied()
        .collect();
    assert_eq!(some, expected);
    let less = Bytes(memory[0].0 - 1);
    let none = best(
        &params,
        8,
        &Costs {
            memory_limit: Some(less),
            ..COSTS
        },
    );
    assert_eq!(
        none,
        Err(Error::MemoryLimit {
            limit: less.0,
            least: memory[0].0
        })
    );
}

#[test]
fn costs_must_be_positive_numbers() {
    let params = models::gpt2_124m();
    for call_seconds in [-1.0, f64::NAN, f64::INFINITY] {
        let error = best(
            &params,
            8,
            &Costs {
                call_seconds,
                ..COSTS
            },
        )
        .unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("a call's time in seconds of "),
            "{error}"
        );
    }
    for value in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = best(
            &params,
            8,
            &Costs {
                link_bytes_per_second: value,
                ..COSTS
            },
        )
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("a link's speed in bytes per second of {value} is not a positive number")
        );
        assert!(matches!(
            best(
                &params,
                8,
                &Costs {
                    flops_per_second: value,
                    ..COSTS
                }
            ),
            Err(Error::Cost { .. })
        ));
    }
}
