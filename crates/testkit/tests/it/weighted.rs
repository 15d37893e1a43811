//! Micro-batches that weigh differently, and steps on fewer of them.

use anyhow::{Context, Result, ensure};
use polarshard_partition::{Rank, Stage};
use polarshard_testkit::harness::Worker;
use polarshard_testkit::model::{Draw, Model, StepGradients};
use polarshard_testkit::reference::{Exact, Settings};
use polarshard_zero::{Config, Error};

use crate::support::{close, config, count, same_bits, sharded, trained, unsharded, world};

const WORLD: usize = 2;

/// Integer weights, so that sums stay exact.
fn weighted(model: &Model, step: usize) -> Result<StepGradients> {
    let mut gradients = model.gradients(Draw::Integers, 5, step, 2, WORLD)?;
    for (micro_batch, weight) in gradients.iter_mut().flatten().zip([3.0, 1.0, 2.0, 7.0]) {
        micro_batch.weight = weight;
    }
    Ok(gradients)
}

#[test]
fn the_mean_is_by_weight() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(5)?;
    let names = trained(&model, &initial);
    let steps = [weighted(&model, 0)?, weighted(&model, 1)?];
    for stage in Stage::ALL {
        let config = Config {
            stage,
            accumulate: count(2),
            bucket_size: count(60),
            ..config(&model)
        };
        let seen = sharded(WORLD, &model, &initial, &config, &steps)?;
        let mut exact = Exact::new(&names, Settings::of(&config))?;
        for step in &steps {
            exact.step(step)?;
        }
        close(&names, &seen[0].weights[1], &exact.weights, 1e-5)?;
        same_bits(
            &names,
            &seen[0].weights[1],
            &unsharded(&names, &config, &steps)?,
        )?;
    }
    Ok(())
}

#[test]
fn a_partial_step_is_the_mean_of_what_came() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(5)?;
    let names = trained(&model, &initial);
    let full = |step| model.gradients(Draw::Integers, 5, step, 4, WORLD);
    let (short, next) = (model.gradients(Draw::Integers, 5, 0, 2, WORLD)?, full(1)?);
    for stage in Stage::ALL {
        let config = Config {
            stage,
            accumulate: count(4),
            bucket_size: count(60),
            ..config(&model)
        };
        let expected = unsharded(&names, &config, &[short.clone(), next.clone()])?;
        world(WORLD, |comm| -> Result<()> {
            let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
            let rank = worker.optimizer.rank().0;
            let error = worker.optimizer.step_partial().expect_err("nothing came");
            ensure!(
                matches!(
                    error,
                    Error::StepTooEarly {
                        done: 0,
                        accumulate: 4,
                        ..
                    }
                ),
                "{error}"
            );
            for ranks in &short {
                worker.hand_in(&ranks[rank])?;
            }
            let error = worker.optimizer.step().expect_err("two of four came");
            ensure!(
                matches!(
                    error,
                    Error::StepTooEarly {
                        done: 2,
                        accumulate: 4,
                        ..
                    }
                ),
                "{error}"
            );
            worker.optimizer.step_partial()?;
            worker.step(&next)?;
            same_bits(&names, &worker.weights()?, &expected)
                .with_context(|| format!("stage {stage}"))?;
            Ok(worker.optimizer.shutdown()?)
        })?;
    }
    Ok(())
}

/// Under stage 1 nothing of the missing micro-batch is on the wire: only the count tells.
#[test]
fn ranks_with_different_numbers_of_micro_batches_are_named() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(5)?;
    let names = trained(&model, &initial);
    let config = Config {
        stage: Stage::One,
        accumulate: count(4),
        ..config(&model)
    };
    let (short, next) = (
        model.gradients(Draw::Integers, 5, 0, 2, WORLD)?,
        model.gradients(Draw::Integers, 5, 1, 4, WORLD)?,
    );
    let expected = unsharded(&names, &config, std::slice::from_ref(&next))?;
    world(WORLD, |comm| -> Result<()> {
        let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
        let rank = worker.optimizer.rank().0;
        for ranks in &short[..=rank] {
            worker.hand_in(&ranks[rank])?;
        }
        let error = worker
            .optimizer
            .step_partial()
            .err()
            .context("one and two micro-batches made a step")?;
        ensure!(
            matches!(&error, Error::Drifted { drifted, .. } if *drifted == [Rank(1 - rank)]),
            "{error}"
        );
        worker.step(&next)?;
        same_bits(&names, &worker.weights()?, &expected)?;
        Ok(worker.optimizer.shutdown()?)
    })?;
    Ok(())
}
