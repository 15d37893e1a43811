//! What the three policies have in common, and in what they differ.

use std::num::NonZeroUsize;

use anyhow::{Context, Result, ensure};
use polarshard_partition::{
    Class, Placement, Policy, Rank, Route, Stage, Traffic, UpdateGroup, WorldSize,
};
use polarshard_testkit::harness::Seen;
use polarshard_testkit::model::{Draw, Model, Presence, StepGradients};
use polarshard_zero::Config;

use crate::support::{config, same_bits, sharded, trained};

const WORLD: usize = 4;
const F32: usize = 4;

fn steps(model: &Model, accumulate: usize) -> Result<Vec<StepGradients>> {
    let step = |step| Ok(model.gradients(Draw::Gaussian, 9, step, accumulate, WORLD)?);
    (0..3).map(step).collect()
}

fn seen(placement: Placement, route: Route, policy: Policy, stage: Stage) -> Result<Vec<Seen>> {
    let model = Model::everything();
    let (accumulate, bucket_size) = (NonZeroUsize::new(2), NonZeroUsize::new(150));
    let config = Config {
        placement,
        route,
        policy,
        stage,
        accumulate: accumulate.context("two")?,
        bucket_size: bucket_size.context("some")?,
        ..config(&model)
    };
    sharded(
        WORLD,
        &model,
        &model.initial(9)?,
        &config,
        &steps(&model, 2)?,
    )
}

#[test]
fn on_one_route_all_policies_give_the_same_bits() -> Result<()> {
    let model = Model::everything();
    let names = trained(&model, &model.initial(9)?);
    for placement in Placement::ALL {
        for (index, route) in Route::ALL.into_iter().enumerate() {
            let stage = Stage::ALL[index % 2];
            let copied = seen(placement, route, Policy::CopyToOwners, stage)?;
            for policy in [Policy::ExchangeUpdate, Policy::AssignOwner] {
                let other = seen(placement, route, policy, stage)?;
                for (found, expected) in other[0].weights.iter().zip(&copied[0].weights) {
                    same_bits(&names, found, expected)
                        .with_context(|| format!("{placement} {route} {policy}"))?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn without_copies_a_rank_holds_its_shards_alone() -> Result<()> {
    for placement in Placement::ALL {
        for route in [
            Route::BucketAllReduce,
            Route::ReduceToOwner,
            Route::ReduceScatter,
        ] {
            for policy in [Policy::ExchangeUpdate, Policy::AssignOwner] {
                for (rank, seen) in seen(placement, route, policy, Stage::Two)?
                    .iter()
                    .enumerate()
                {
                    let (layout, params) = (seen.plan.layout(), seen.plan.params());
                    let slices = |group| {
                        let those = layout
                            .rank_slices(Rank(rank))
                            .filter(move |slice| params.get(slice.param).group() == group);
                        those.map(|slice| slice.span.len()).sum::<usize>()
                    };
                    let owns = |block: &_| {
                        layout
                            .rank_slices(Rank(rank))
                            .any(|slice| slice.block == *block)
                    };
                    let shards: usize = layout
                        .block_ids()
                        .filter(owns)
                        .map(|block| layout.block(block).shard_len)
                        .sum();
                    let at = format!("{placement} {route} {policy} rank {rank}");
                    assert_eq!(
                        seen.memory.momentum,
                        F32 * slices(UpdateGroup::Muon),
                        "{at}"
                    );
                    assert_eq!(
                        seen.memory.moments,
                        2 * F32 * slices(UpdateGroup::AdamW),
                        "{at}"
                    );
                    assert_eq!(seen.memory.reduced_gradients, F32 * shards, "{at}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn with_copies_an_owner_of_a_part_holds_the_momentum_of_all() -> Result<()> {
    for (rank, seen) in seen(
        Placement::Flat,
        Route::BucketAllReduce,
        Policy::CopyToOwners,
        Stage::Two,
    )?
    .iter()
    .enumerate()
    {
        let (layout, params) = (seen.plan.layout(), seen.plan.params());
        let owned = |id| layout.owners(id).contains(Rank(rank));
        let muon = params
            .iter()
            .filter(|(id, param)| param.group() == UpdateGroup::Muon && owned(*id));
        assert_eq!(
            seen.memory.momentum,
            F32 * muon.map(|(_, param)| param.elems()).sum::<usize>(),
            "rank {rank}"
        );
    }
    Ok(())
}

#[test]
fn what_a_rank_keeps_was_predicted() -> Result<()> {
    for placement in Placement::ALL {
        for route in Route::ALL {
            for policy in Policy::ALL {
                let all = seen(placement, route, policy, Stage::Two)?;
                for (rank, seen) in all.iter().enumerate() {
                    let predicted = seen.plan.predict(Rank(rank), &seen.terms).memory;
                    let kept = &seen.memory;
                    let kept = [
                        kept.masters,
                        kept.momentum,
                        kept.moments,
                        kept.reduced_gradients,
                    ];
                    let predicted = [
                        predicted.masters,
                        predicted.momentum,
                        predicted.moments,
                        predicted.reduced_gradients,
                    ];
                    assert_eq!(
                        kept.map(|bytes| bytes as u64),
                        predicted.map(|bytes| bytes.0),
                        "{placement} {route} {policy} rank {rank}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn under_assign_owner_each_matrix_is_orthogonalized_once() -> Result<()> {
    let model = Model::everything();
    let absent = |name: &str| {
        model
            .trained()
            .any(|param| param.name == name && param.presence == Presence::Never)
    };
    for placement in Placement::ALL {
        for route in Route::ALL {
            let seen = seen(placement, route, Policy::AssignOwner, Stage::Two)?;
            let params = seen[0].plan.params();
            let matrices = params
                .matrices()
                .filter(|(_, param, _)| !absent(&params.get(*param).name))
                .count();
            for step in 0..3 {
                let found: usize = seen
                    .iter()
                    .map(|seen| seen.reports[step].orthogonalized)
                    .sum();
                assert_eq!(found, matrices, "{placement} {route} step {step}");
            }
        }
    }
    Ok(())
}

#[test]
fn reduce_scatter_moves_half_of_an_all_reduce() -> Result<()> {
    for placement in Placement::ALL {
        let traffic = |route| -> Result<(u64, u64)> {
            let seen = seen(placement, route, Policy::AssignOwner, Stage::Two)?;
            let calls: Vec<_> = seen.iter().map(|seen| seen.calls[0].clone()).collect();
            let bytes = Traffic::of(WorldSize::new(WORLD)?, &calls)
                .class(Class::Gradient)
                .bytes;
            // In `Flat` there is no native reduce-scatter, and padding does not travel.
            let padding = if placement == Placement::Flat {
                0
            } else {
                seen[0].plan.layout().padding()
            };
            Ok((bytes, padding as u64))
        };
        let ((scattered, padding), (reduced, _)) = (
            traffic(Route::ReduceScatter)?,
            traffic(Route::BucketAllReduce)?,
        );
        let micro_batches = 2;
        let extra = micro_batches * (WORLD as u64 - 1) * padding * F32 as u64;
        ensure!(
            2 * (scattered - extra) == reduced,
            "{placement}: {scattered} of {reduced} bytes, padding {padding}"
        );
    }
    Ok(())
}
