//! Gradients that are not finite, and scales that keep them so.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use polarshard_muon::{AdamWConfig, survey};
use polarshard_partition::{Placement, Route, Stage};
use polarshard_testkit::harness::Worker;
use polarshard_testkit::model::{Draw, Model, StepGradients};
use polarshard_zero::{Config, Error, Outcome, StepReport};

use crate::support::{config, count, index, same_bits, sharded, trained, unsharded, world};

const WORLD: usize = 4;
const BAD: [f32; 3] = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];

/// A step in which one element on one rank is `bad`.
fn spoiled(model: &Model, name: &str, bad: f32) -> Result<StepGradients> {
    const RANK: usize = 2;
    let mut step = model.gradients(Draw::Integers, 8, 1, 1, WORLD)?;
    let at = index(model, name)?;
    let Some(gradient) = &mut step[0][RANK].gradients[at] else {
        anyhow::bail!("no gradient")
    };
    let mut values = polarshard_testkit::compare::values(gradient)?;
    let last = values.len() - 1;
    values[last] = bad;
    *gradient = Tensor::from_vec(values, gradient.shape(), gradient.device())?;
    Ok(step)
}

#[test]
fn one_rank_skips_the_step_on_all() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(8)?;
    let names = trained(&model, &initial);
    let good = [
        model.gradients(Draw::Integers, 8, 0, 1, WORLD)?,
        model.gradients(Draw::Integers, 8, 2, 1, WORLD)?,
    ];
    for (placement, bad) in Placement::ALL.into_iter().zip(BAD) {
        for (index, route) in Route::ALL.into_iter().enumerate() {
            // In a matrix, and in a vector.
            let name = ["blocks.1.wide.weight", "blocks.0.norm.weight"][index % 2];
            let (stage, bad) = (Stage::ALL[index / 2], spoiled(&model, name, bad)?);
            let config = Config {
                placement,
                route,
                stage,
                bucket_size: count(60),
                ..config(&model)
            };
            let expected = unsharded(&names, &config, &good)?;
            world(WORLD, |comm| -> Result<()> {
                let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
                worker.step(&good[0])?;
                let before = worker.weights()?;
                let report = worker.step(&bad)?;
                ensure!(
                    matches!(report.outcome, Outcome::Skipped { non_finite: 1 }),
                    "{report:?}"
                );
                ensure!(
                    report.step == 1 && worker.optimizer.steps() == 1,
                    "a skipped step counts as none"
                );
                same_bits(&names, &worker.weights()?, &before)?;
                // Momentum, moments and step counts are as before, too: the next step is the second.
                let report = worker.step(&good[1])?;
                ensure!(
                    matches!(
                        report,
                        StepReport {
                            step: 2,
                            outcome: Outcome::Applied,
                            ..
                        }
                    ),
                    "{report:?}"
                );
                same_bits(&names, &worker.weights()?, &expected)?;
                worker.optimizer.verify_replicas()?;
                Ok(worker.optimizer.shutdown()?)
            })?;
        }
    }
    Ok(())
}

/// Each gradient fits the f16 wire, the sum of four does not.
#[test]
fn an_f16_wire_has_room_for_the_sum() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(8)?;
    let names = trained(&model, &initial);
    let mut steps = [model.gradients(Draw::Integers, 8, 0, 1, WORLD)?];
    for gradient in steps[0]
        .iter_mut()
        .flatten()
        .flat_map(|micro_batch| micro_batch.gradients.iter_mut().flatten())
    {
        // From -2¹⁵ to 2¹⁵, exact in f16 before and after the sum.
        *gradient = gradient.sign()?.affine(32768.0, 0.0)?;
    }
    for route in Route::ALL {
        let config = Config {
            route,
            gradient_wire: Some(DType::F16),
            ..config(&model)
        };
        let seen = sharded(WORLD, &model, &initial, &config, &steps)?;
        ensure!(
            seen[0].reports[0].outcome == Outcome::Applied,
            "{:?}",
            seen[0].reports[0]
        );
        same_bits(
            &names,
            &seen[0].weights[0],
            &unsharded(&names, &config, &steps)?,
        )?;
        let norm = seen[0].reports[0].gradient_norm;
        let expected = sharded(
            WORLD,
            &model,
            &initial,
            &Config {
                gradient_wire: None,
                ..config
            },
            &steps,
        )?;
        ensure!(
            norm == expected[0].reports[0].gradient_norm,
            "the norm is {norm} over an f16 wire"
        );
    }
    Ok(())
}

#[test]
fn a_gradient_too_large_for_the_wire_skips_the_step() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(8)?;
    let names = trained(&model, &initial);
    let step = spoiled(&model, "blocks.0.up.weight", 1e6)?;
    let config = Config {
        gradient_wire: Some(DType::F16),
        ..config(&model)
    };
    for seen in sharded(WORLD, &model, &initial, &config, &[step])? {
        ensure!(
            seen.reports[0].outcome == Outcome::Skipped { non_finite: 1 },
            "{:?}",
            seen.reports[0]
        );
        let before: Vec<_> = names.iter().map(|(_, tensor)| tensor.clone()).collect();
        same_bits(&names, &seen.weights[0], &before)?;
    }
    Ok(())
}

/// Gradients of a scaled loss are divided by the scale that they were made with.
#[test]
fn the_loss_scale_leaves_no_trace() -> Result<()> {
    const SCALES: [f64; 3] = [1024.0, 2048.0, 512.0];
    let model = Model::everything();
    let initial = model.initial(8)?;
    let names = trained(&model, &initial);
    let steps = (0..3)
        .map(|step| Ok(model.gradients(Draw::Gaussian, 8, step, 1, WORLD)?))
        .collect::<Result<Vec<_>>>()?;
    let config = Config {
        clip: Some(1.0),
        loss_scale: SCALES[0],
        ..config(&model)
    };
    let expected = sharded(
        WORLD,
        &model,
        &initial,
        &Config {
            loss_scale: 1.0,
            ..config.clone()
        },
        &steps,
    )?;
    world(WORLD, |comm| -> Result<()> {
        let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
        for (index, (scale, step)) in SCALES.into_iter().zip(&steps).enumerate() {
            worker.optimizer.set_loss_scale(scale)?;
            let mut step = step.clone();
            for gradient in step
                .iter_mut()
                .flatten()
                .flat_map(|micro_batch| micro_batch.gradients.iter_mut().flatten())
            {
                *gradient = (&*gradient * scale)?;
            }
            let report = worker.step(&step)?;
            ensure!(
                report.gradient_norm == expected[0].reports[index].gradient_norm,
                "{report:?}"
            );
            ensure!(report.clip_factor < 1.0, "nothing was clipped");
            same_bits(&names, &worker.weights()?, &expected[0].weights[index])?;
        }
        Ok(worker.optimizer.shutdown()?)
    })?;
    Ok(())
}

/// Each of them is fine in f32, what they make together, or its squares, is not.
#[test]
fn a_mean_that_f32_cannot_hold_changes_nothing() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(8)?;
    let names = trained(&model, &initial);
    let step = model.gradients(Draw::Integers, 8, 0, 1, WORLD)?;
    // The loss scale, the weight of each micro-batch, and the greatest norm. The gradients are not those of a scaled loss.
    let cases = [
        (1e-30, 1e-30, None),
        (1e-37, 1.0, None),
        (1e30, 1e30, None),
        (1e-22, 1.0, None),
        (1e-20, 1.0, Some(1e-30)),
    ];
    let expected = unsharded(&names, &config(&model), std::slice::from_ref(&step))?;
    for (loss_scale, weight, clip) in cases {
        let config = Config {
            loss_scale,
            clip,
            ..config(&model)
        };
        let mut odd = step.clone();
        for micro_batch in odd.iter_mut().flatten() {
            micro_batch.weight = weight;
            // So that the sum is far from the ends of f32 where the weight is not.
            for gradient in micro_batch.gradients.iter_mut().flatten() {
                *gradient = gradient.affine(if weight > 1.0 { 1e-30 } else { 8.0 }, 0.0)?;
            }
        }
        world(WORLD, |comm| -> Result<()> {
            let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
            let before = worker.weights()?;
            let error = worker.step(&odd).err().context("the step was taken")?;
            let text = error.to_string();
            ensure!(
                matches!(error, Error::MeanOutOfRange { step: 1, .. })
                    && text.contains("the loss scale"),
                "{text}"
            );
            same_bits(&names, &worker.weights()?, &before)?;
            ensure!(worker.optimizer.steps() == 0, "a step was counted");
            if clip.is_none() {
                worker.optimizer.set_loss_scale(1.0)?;
                worker.step(&step)?;
                same_bits(&names, &worker.weights()?, &expected)?;
            }
            Ok(worker.optimizer.shutdown()?)
        })
        .with_context(|| format!("{loss_scale:e}, {weight:e}, {clip:?}"))?;
    }
    Ok(())
}

/// What matters is what AdamW squares: a mean of 1e22 that is clipped is fine, and so is one of a matrix of Muon's.
#[test]
fn a_mean_whose_squares_are_not_kept_is_taken() -> Result<()> {
    let everything = Model::everything();
    let mut muons = Model::nearly_nothing();
    muons.params.retain(|param| param.shape.len() == 2);
    // By the loss scale all means are large, by the last column those of one matrix.
    for (model, loss_scale, clip, one) in [
        (&everything, 1e-22, Some(1.0), 1.0),
        (&muons, 1e-22, None, 1.0),
        (&everything, 1.0, None, 1e22),
    ] {
        let initial = model.initial(8)?;
        let mut step = model.gradients(Draw::Integers, 8, 0, 1, WORLD)?;
        let square = index(model, "blocks.1.square.weight").unwrap_or(0);
        for micro_batch in step.iter_mut().flatten() {
            if let Some(gradient) = &mut micro_batch.gradients[square] {
                *gradient = (&*gradient * one)?;
            }
        }
        let config = Config {
            loss_scale,
            clip,
            ..config(model)
        };
        world(WORLD, |comm| -> Result<()> {
            let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
            let report = worker.step(&step)?;
            ensure!(
                report.outcome == Outcome::Applied && report.gradient_norm > 1e22,
                "{report:?}"
            );
            for weights in worker.weights()? {
                let survey = survey(&weights)?;
                ensure!(survey.non_finite == 0, "a weight is not finite");
            }
            Ok(worker.optimizer.shutdown()?)
        })?;
    }
    Ok(())
}

/// Just below the limit for AdamW's parameters squares are kept, and saved, which wants them finite; above it nothing is.
#[test]
fn a_gradient_of_adamws_is_taken_up_to_its_limit() -> Result<()> {
    let model = Model::nearly_nothing();
    let initial = model.initial(8)?;
    let bias = index(&model, "b")?;
    let folder = tempfile::tempdir()?;
    for (norm, is_taken) in [(0.99, true), (1.01, false)] {
        let norm = norm * AdamWConfig::LARGEST_NORM;
        let mut step = model.gradients(Draw::Integers, 8, 0, 1, WORLD)?;
        for micro_batch in step.iter_mut().flatten() {
            if let Some(gradient) = &mut micro_batch.gradients[bias] {
                *gradient = gradient.ones_like()?.affine(norm / 3f64.sqrt(), 0.0)?;
            }
        }
        world(WORLD, |comm| -> Result<()> {
            let mut worker = Worker::new(comm, &initial, &model.roles, config(&model))?;
            for _ in 0..3 {
                match worker.step(&step) {
                    Ok(_) => ensure!(is_taken, "{norm:e} was taken"),
                    Err(error) => ensure!(
                        !is_taken
                            && matches!(error, Error::MeanOutOfRange { adamw_norm, .. }
                            if (adamw_norm / norm - 1.0).abs() < 1e-6),
                        "{error}"
                    ),
                }
            }
            worker.optimizer.save(folder.path())?;
            Ok(worker.optimizer.shutdown()?)
        })?;
    }
    Ok(())
}

/// The gradients before it would be divided by the scale of those after it.
#[test]
fn the_loss_scale_is_that_of_a_whole_step() -> Result<()> {
    let model = Model::nearly_nothing();
    let initial = model.initial(8)?;
    let step = model.gradients(Draw::Integers, 8, 0, 2, WORLD)?;
    let config = Config {
        accumulate: count(2),
        ..config(&model)
    };
    world(WORLD, |comm| -> Result<()> {
        let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
        let rank = worker.optimizer.rank().0;
        for (done, ranks) in (1..).zip(&step) {
            worker.hand_in(&ranks[rank])?;
            let error = worker.optimizer.set_loss_scale(2.0).err();
            let error = error.context("the scale was set")?;
            ensure!(
                matches!(error, Error::WithinStep { done: found, .. } if found == done)
                    && worker.optimizer.loss_scale() == 1.0,
                "{error}"
            );
        }
        worker.optimizer.step()?;
        worker.optimizer.set_loss_scale(2.0)?;
        Ok(worker.optimizer.shutdown()?)
    })?;
    Ok(())
}
