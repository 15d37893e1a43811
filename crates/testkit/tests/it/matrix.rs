//! Sharded runs over a covering set of all settings: each has the bits of the unsharded run wherever sums are exact,
//! the same bits on all ranks, and exactly the calls that its plan predicts.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;

use anyhow::{Context, Result, ensure};
use polarshard_muon::Method;
use polarshard_partition::{Placement, Policy, Rank, Route, Stage};
use polarshard_testkit::model::{Draw, Model};
use polarshard_testkit::reference::{Exact, Settings, Single};
use polarshard_zero::Config;

use crate::support::{all_values64, close, config, same_bits, sharded, trained};

const WORLDS: [usize; 5] = [1, 2, 3, 4, 8];
/// Where every placement, route and policy is run in both stages.
const FULL_WORLD: usize = 4;
const STEPS: usize = 4;
const SEED: u64 = 20;

/// The settings of one run, but for the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Case {
    world: usize,
    placement: Placement,
    route: Route,
    policy: Policy,
    stage: Stage,
    method: Method,
    accumulate: usize,
    overlap: bool,
    bucket_size: usize,
    draw: Draw,
}

/// How many settings [`Case::choices`] tells apart.
const FACTORS: usize = 10;

impl Case {
    /// The case of which the free settings are the bits of a number.
    fn new(
        world: usize,
        placement: Placement,
        route: Route,
        policy: Policy,
        stage: Stage,
        bits: usize,
    ) -> Self {
        let bit = |index: usize| bits >> index & 1 == 1;
        Self {
            world,
            placement,
            route,
            policy,
            stage,
            method: if bit(0) {
                Method::Standard
            } else {
                Method::Gram
            },
            accumulate: if bit(1) { 3 } else { 1 },
            overlap: bit(2),
            // Below the larger parameters, and above all of them together.
            bucket_size: if bit(3) { 100 } else { 100_000 },
            draw: if bit(4) {
                Draw::Gaussian
            } else {
                Draw::Integers
            },
        }
    }

    /// The value of each setting, as a number.
    fn choices(&self) -> [usize; FACTORS] {
        [
            self.world,
            self.placement as usize,
            self.route as usize,
            self.policy as usize,
            self.stage as usize,
            usize::from(self.method == Method::Gram),
            self.accumulate,
            usize::from(self.overlap),
            self.bucket_size,
            usize::from(self.draw == Draw::Gaussian),
        ]
    }

    /// Every three settings with their values.
    fn triples(&self) -> impl Iterator<Item = [(usize, usize); 3]> {
        let at: Vec<_> = self.choices().into_iter().enumerate().collect();
        let numbers = (0..FACTORS).flat_map(|a| {
            (a + 1..FACTORS).flat_map(move |b| (b + 1..FACTORS).map(move |c| [a, b, c]))
        });
        numbers.map(move |numbers| numbers.map(|number| at[number]))
    }
}

/// Every placement, route and policy in every world, in one of them in both stages; the other settings are chosen one
/// after the other, each time the ones that show most triples of settings that were not there yet.
fn cases() -> Vec<Case> {
    const FREE_BITS: usize = 5;
    let mut cases = Vec::new();
    let mut seen = BTreeSet::new();
    for world in WORLDS {
        for placement in Placement::ALL {
            for route in Route::ALL {
                for policy in Policy::ALL {
                    let stages: Vec<&[Stage]> = if world == FULL_WORLD {
                        vec![&[Stage::One], &[Stage::Two]]
                    } else {
                        vec![&Stage::ALL]
                    };
                    for stages in stages {
                        let candidates = stages.iter().flat_map(|stage| {
                            (0..1 << FREE_BITS).map(|bits| {
                                Case::new(world, placement, route, policy, *stage, bits)
                            })
                        });
                        let news = |case: &Case| {
                            case.triples()
                                .filter(|triple| !seen.contains(triple))
                                .count()
                        };
                        let best = candidates
                            .rev()
                            .max_by_key(news)
                            .expect("there are candidates");
                        seen.extend(best.triples());
                        cases.push(best);
                    }
                }
            }
        }
    }
    cases
}

/// `cargo test -- --nocapture` prints the table.
#[test]
fn the_cases_cover_every_pair_and_triple_of_settings() {
    let cases = cases();
    println!(
        "world  placement  route              policy           stage  method    accumulate  overlap  bucket  draw"
    );
    for Case {
        world,
        placement,
        route,
        policy,
        stage,
        method,
        accumulate,
        overlap,
        bucket_size,
        draw,
    } in &cases
    {
        println!(
            "{world:5}  {placement:9}  {route:17}  {policy:15}  {stage:5}  {method:8}  {accumulate:10}  {overlap:7}  \
             {bucket_size:6}  {draw:?}"
        );
    }
    let covered: BTreeSet<_> = cases.iter().flat_map(Case::triples).collect();
    let values: Vec<BTreeSet<usize>> = (0..FACTORS)
        .map(|factor| cases.iter().map(|case| case.choices()[factor]).collect())
        .collect();
    assert_eq!(
        values.iter().map(BTreeSet::len).collect::<Vec<_>>(),
        [5, 3, 4, 3, 2, 2, 2, 2, 2, 2]
    );
    for a in 0..FACTORS {
        for b in a + 1..FACTORS {
            for c in b + 1..FACTORS {
                let all = values[a].len() * values[b].len() * values[c].len();
                let found = covered
                    .iter()
                    .filter(|triple| triple.map(|(factor, _)| factor) == [a, b, c])
                    .count();
                assert_eq!(found, all, "factors {a}, {b} and {c}");
            }
        }
    }
    for placement in Placement::ALL {
        for route in Route::ALL {
            for policy in Policy::ALL {
                for stage in Stage::ALL {
                    let wanted = |case: &&Case| {
                        (case.world, case.placement, case.route) == (FULL_WORLD, placement, route)
                            && (case.policy, case.stage) == (policy, stage)
                    };
                    assert_eq!(
                        cases.iter().filter(wanted).count(),
                        1,
                        "{placement} {route} {policy} {stage}"
                    );
                }
            }
        }
    }
}

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
    let mut config = Config {
        stage: case.stage,
        placement: case.placement,
        route: case.route,
        policy: case.policy,
        accumulate: NonZeroUsize::new(case.accumulate).context("a case without micro-batches")?,
        overlap: case.overlap,
        bucket_size: NonZeroUsize::new(case.bucket_size).context("a case without buckets")?,
        ..config(model)
    };
    config.muon.newton_schulz.method = case.method;
    let initial = model.initial(SEED)?;
    let names = trained(model, &initial);
    let steps = (0..STEPS)
        .map(|step| model.gradients(case.draw, SEED, step, case.accumulate, case.world))
        .collect::<candle_core::Result<Vec<_>>>()?;
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
