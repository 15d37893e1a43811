//! On ranks that are threads: each run has the bits of the unsharded one wherever sums are exact, the same bits on all
//! ranks, and exactly the calls that its plan predicts.

use anyhow::{Context, Result, ensure};
use polarshard_partition::{Placement, Policy, Rank, Route, Stage};
use polarshard_testkit::model::{Draw, Model};
use polarshard_testkit::reference::{Exact, Settings, Single};

use super::{Case, SEED, cases};
use crate::support::{all_values64, close, same_bits, sharded, trained};

#[test]
fn world_1() -> Result<()> {
    all_of(1)
}

#[test]
fn world_2() -> Result<()> {
    all_of(2)
}

#[test]
fn world_3() -> Result<()> {
    all_of(3)
}

#[test]
fn world_4() -> Result<()> {
    all_of(4)
}

#[test]
fn world_8() -> Result<()> {
    all_of(8)
}

/// Ranks that own nothing, and padding on several of them.
#[test]
fn ranks_without_elements() -> Result<()> {
    let model = Model::nearly_nothing();
    for world in [3, 8] {
        for placement in Placement::ALL {
            for route in Route::ALL {
                for policy in Policy::ALL {
                    let case = Case::new(world, placement, route, policy, Stage::Two, world);
                    let owners = run(&case, &model)?;
                    assert!(owners < world, "{case:?}: every rank owns something");
                }
            }
        }
    }
    Ok(())
}

fn all_of(world: usize) -> Result<()> {
    let model = Model::everything();
    for case in cases().iter().filter(|case| case.world == world) {
        run(case, &model)?;
    }
    Ok(())
}

/// Runs a case and checks everything. Returns how many ranks own an element.
fn run(case: &Case, model: &Model) -> Result<usize> {
    check(case, model).with_context(|| format!("{case:?}"))
}

fn check(case: &Case, model: &Model) -> Result<usize> {
    let config = case.config(model)?;
    let initial = model.initial(SEED)?;
    let names = trained(model, &initial);
    let steps = case.gradients(model)?;
    let seen = sharded(case.world, model, &initial, &config, &steps)?;

    let mut single = Single::new(&names, Settings::of(&config))?;
    let mut exact = Exact::new(&names, Settings::of(&config))?;
    for (step, gradients) in steps.iter().enumerate() {
        single.step(gradients)?;
        exact.step(gradients)?;
        let (found, expected) = (&seen[0].weights[step], single.weights()?);
        let at = || format!("after step {step}");
        // Ranks are added in their order in both, so that stage 2 adds in the very order of the unsharded run.
        if case.draw == Draw::Integers || case.stage == Stage::Two || case.accumulate == 1 {
            same_bits(&names, found, &expected).with_context(at)?;
        } else {
            close(&names, found, &all_values64(&expected)?, 1e-5).with_context(at)?;
        }
        close(&names, found, &exact.weights, 1e-3)
            .context("against f64")
            .with_context(at)?;
        for other in &seen[1..] {
            same_bits(&names, &other.weights[step], found).with_context(at)?;
        }
    }
    for (rank, seen) in seen.iter().enumerate() {
        let predicted = seen.plan.predict(Rank(rank), &seen.terms).calls;
        for (step, calls) in seen.calls.iter().enumerate() {
            ensure!(
                *calls == predicted,
                "rank {rank}, step {step}: {calls:?} instead of {predicted:?}"
            );
        }
    }
    let layout = seen[0].plan.layout();
    Ok(layout
        .world()
        .ranks()
        .filter(|rank| layout.rank_slices(*rank).next().is_some())
        .count())
}
