//! Sharded runs over a covering set of all settings.

mod loopback;
#[cfg(feature = "nccl")]
mod nccl;

use std::collections::BTreeSet;
use std::num::NonZeroUsize;

use anyhow::{Context, Result};
use polarshard_muon::Method;
use polarshard_partition::{Placement, Policy, Route, Stage};
use polarshard_testkit::model::{Draw, Model, StepGradients};
use polarshard_zero::Config;

use crate::support::config;

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

impl Case {
    /// The settings of its run on a model.
    fn config(&self, model: &Model) -> Result<Config> {
        let mut config = Config {
            stage: self.stage,
            placement: self.placement,
            route: self.route,
            policy: self.policy,
            accumulate: NonZeroUsize::new(self.accumulate)
                .context("a case without micro-batches")?,
            overlap: self.overlap,
            bucket_size: NonZeroUsize::new(self.bucket_size).context("a case without buckets")?,
            ..config(model)
        };
        config.muon.newton_schulz.method = self.method;
        Ok(config)
    }

    /// The gradients of all steps.
    fn gradients(&self, model: &Model) -> candle_core::Result<Vec<StepGradients>> {
        (0..STEPS)
            .map(|step| model.gradients(self.draw, SEED, step, self.accumulate, self.world))
            .collect()
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
