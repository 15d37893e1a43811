//! The step at the boundary: one decision, one update of the shard, one all-gather.

mod decision;
mod exchange;
mod fragments;
mod owned;
mod publish;
mod shard;
mod stretches;
mod update;

use std::sync::Arc;

use polarshard_muon::{AdamWConfig, survey_all};
use polarshard_partition::{BlockId, DigestWriter, Params, Plan, UpdateGroup, WorldSize};

use crate::agreement;
use crate::channel::Channel;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::gradients::Intake;
use crate::report::{Outcome, StepReport};
use crate::setup::Setup;
use crate::weights::Weight;

use self::decision::{Census, Decision, Verdict};
use self::publish::Publisher;
use self::update::Factors;

pub(crate) use self::fragments::Fragments;
pub(crate) use self::owned::OwnedSlice;
pub(crate) use self::shard::{Shard, SliceState};
pub(crate) use self::stretches::Section;

/// Elements of the control sum at the boundary.
pub(crate) fn control_elems(params: &Params, world: WorldSize) -> usize {
    Census::len(params.matrices().count(), params.len(), world.get())
}

/// Takes the steps of one rank.
#[derive(Debug)]
pub(crate) struct Stepper {
    pub(crate) shard: Shard,
    publisher: Publisher,
    plan: Arc<Plan>,
    weights: Arc<Vec<Weight>>,
}

impl Stepper {
    pub(crate) fn new(
        channel: &Channel,
        setup: &Setup,
        weights: &Arc<Vec<Weight>>,
    ) -> Result<Self> {
        let plan = &setup.plan;
        Ok(Self {
            shard: Shard::new(plan, channel.rank(), weights, &setup.device)?,
            publisher: Publisher::new(plan, channel.world().get(), &setup.device),
            plan: Arc::clone(plan),
            weights: Arc::clone(weights),
        })
    }

    /// Decides with all ranks, and does what was decided. The gradients are used up whatever comes of it.
    pub(crate) fn step(
        &mut self,
        intake: &mut Intake,
        config: &Config,
        steps: u64,
    ) -> Result<StepReport> {
        let (unreduced_peak, unreduced_excess) = (intake.held.peak(), intake.held.excess());
        let decision = self.decide(intake, config, steps);
        let (rank, step) = (intake.channel.rank(), steps + 1);
        let report = match decision {
            Err(error) => Err(error),
            Ok(Decision::Drop(failed)) => Err(Error::Dropped {
                rank,
                step,
                failed,
                cause: intake.cycle().error().cloned().map(Arc::new),
            }),
            Ok(Decision::Refuse(drifted)) => Err(Error::Drifted {
                rank,
                step,
                drifted,
            }),
            Ok(Decision::Skip(non_finite)) => Ok(StepReport {
                step: steps,
                outcome: Outcome::Skipped { non_finite },
                gradient_norm: f64::INFINITY,
                clip_factor: 1.0,
                orthogonalized: 0,
                unreduced_peak,
                unreduced_excess,
            }),
            Ok(Decision::Apply(verdict)) => {
                let (gradient_norm, clip_factor) = norm(&verdict, config);
                let adamw_norm = norm_of_adamw(&verdict, config) * clip_factor;
                let factors = self.factors(intake, config, &verdict, clip_factor);
                if factors.iter().all(Factors::are_usable)
                    && (gradient_norm as f32).is_finite()
                    && adamw_norm < AdamWConfig::LARGEST_NORM
                {
                    // Half of the state may be new when an error comes: it cannot be survived.
                    let orthogonalized = self
                        .apply(intake, config, &verdict, &factors)
                        .map_err(Error::ending)?;
                    Ok(StepReport {
                        step,
                        outcome: Outcome::Applied,
                        gradient_norm,
                        clip_factor,
                        orthogonalized,
                        unreduced_peak,
                        unreduced_excess,
                    })
                } else {
                    Err(Error::MeanOutOfRange {
                        rank,
                        step,
                        norm: gradient_norm,
                        adamw_norm,
                        divisor: divisor(&verdict, config),
                        clip_factor,
                    })
                }
            }
        };
        intake.clear();
        report
    }

    /// Sends every rank's masters to all models.
    pub(crate) fn publish(&mut self, channel: &mut Channel) -> Result<()> {
        self.publish_after(channel, |_, _| Ok(()))
    }

    /// The same, each block after an update of it.
    fn publish_after(
        &mut self,
        channel: &mut Channel,
        update: impl Fn(&Shard, BlockId) -> Result<()>,
    ) -> Result<()> {
        let Self {
            shard,
            publisher,
            plan,
            weights,
        } = self;
        publisher.publish(channel, plan, &shard.masters, weights, |block| {
            update(shard, block)
        })
    }

    fn decide(&self, intake: &mut Intake, config: &Config, steps: u64) -> Result<Decision> {
        let census = census(intake, &self.shard, config, steps).or_else(|error| {
            // The other ranks wait for this one: it says that it failed.
            intake.fail(&error);
            census(intake, &self.shard, config, steps)
        })?;
        let (rank, world) = (intake.channel.rank(), intake.channel.world().get());
        let sums = intake.channel.sum(census.encode(rank, world))?;
        Ok(census.decide(&sums, rank))
    }

    fn apply(
        &mut self,
        intake: &mut Intake,
        config: &Config,
        verdict: &Verdict,
        factors: &[Factors],
    ) -> Result<usize> {
        let (channel, reduced) = (&mut intake.channel, &intake.reduced);
        let orthogonal = self.shard.begin_update(
            channel,
            reduced,
            |param| factors[param.index()],
            verdict,
            &config.muon,
            &config.adamw,
        )?;
        self.publish_after(channel, |shard, block| {
            shard.finish_update(block, &orthogonal, verdict, &config.muon)
        })?;
        Ok(orthogonal.computed)
    }

    /// By parameter.
    fn factors(
        &self,
        intake: &Intake,
        config: &Config,
        verdict: &Verdict,
        clip: f64,
    ) -> Vec<Factors> {
        let divisor = divisor(verdict, config);
        let params = self.plan.params().iter();
        params
            .map(|(param, _)| Factors {
                mean: 1.0 / (divisor * intake.prescale(param)),
                clip,
            })
            .collect()
    }
}

/// What this rank says at the boundary.
fn census(intake: &Intake, shard: &Shard, config: &Config, steps: u64) -> Result<Census> {
    let (cycle, params) = (intake.cycle(), shard.plan().params());
    let mut census = Census {
        sum_of_squares: 0.0,
        squares_of_adamw: 0.0,
        non_finite: 0,
        weight: cycle.weight,
        non_zero: vec![false; params.matrices().count()],
        present: cycle.present.clone(),
        state: None,
    };
    if cycle.has_failed() {
        return Ok(census);
    }
    let gradients = shard
        .owned
        .iter()
        .map(|slice| {
            let reduced = &intake.reduced;
            reduced.slice(slice)
        })
        .collect::<Result<Vec<_>>>()?;
    for (slice, survey) in shard.owned.iter().zip(survey_all(&gradients)?) {
        let squares = survey.sum_of_squares / intake.prescale(slice.param).powi(2);
        census.sum_of_squares += squares;
        if params.get(slice.param).group() == UpdateGroup::AdamW {
            census.squares_of_adamw += squares;
        }
        census.non_finite += survey.non_finite;
        if let Some(matrix) = slice.matrix {
            census.non_zero[matrix.index()] |= survey.non_zero;
        }
    }
    let hyper_parameters = agreement::hyper_parameters(config, shard.device());
    let state = DigestWriter::new()
        .u64(steps)
        .u64(cycle.done as u64)
        .u64(hyper_parameters.0)
        .u64(intake.channel.issued())
        .u64(intake.channel.history());
    census.state = Some(state.finish().0);
    Ok(census)
}

/// What the sum of all gradients is divided by.
fn divisor(verdict: &Verdict, config: &Config) -> f64 {
    verdict.weight * config.loss_scale
}

/// The global norm of the mean gradient, and what clips it.
fn norm(verdict: &Verdict, config: &Config) -> (f64, f64) {
    let norm = verdict.sum_of_squares.sqrt() / divisor(verdict, config);
    match config.clip {
        Some(most) if norm > most => (norm, most / norm),
        _ => (norm, 1.0),
    }
}

/// The norm of the mean gradient of AdamW's parameters.
fn norm_of_adamw(verdict: &Verdict, config: &Config) -> f64 {
    verdict.squares_of_adamw.sqrt() / divisor(verdict, config)
}
