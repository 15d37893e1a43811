//! Gradients that do not fit, calls that come at the wrong time, and ranks that drift: each is an error that names the
//! thing, after which the optimizer is as before and all ranks go on.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use polarshard_partition::{Placement, Rank, Route, Stage};
use polarshard_testkit::harness::Worker;
use polarshard_testkit::model::{Draw, MicroBatch, Model};
use polarshard_zero::{Config, Error};

use crate::support::{config, count, index, same_bits, trained, unsharded, world};

const WORLD: usize = 3;
const ODD: Rank = Rank(1);
const ACCUMULATE: usize = 2;

/// Spoils the micro-batches of one rank; checks that this rank gets one error with these words, that all ranks drop the
/// step and have changed nothing, and that the next step is right.
fn dropped_on_all(
    spoil: impl Fn(usize, &mut MicroBatch) -> Result<()> + Sync,
    words: &[&str],
) -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(7)?;
    let names = trained(&model, &initial);
    let steps = (0..3)
        .map(|step| Ok(model.gradients(Draw::Integers, 7, step, ACCUMULATE, WORLD)?))
        .collect::<Result<Vec<_>>>()?;
    let mut bad = steps[1].clone();
    for (micro, ranks) in bad.iter_mut().enumerate() {
        spoil(micro, &mut ranks[ODD.0])?;
    }
    for (stage, placement, route, overlap) in [
        (Stage::One, Placement::Flat, Route::BucketAllReduce, false),
        (Stage::Two, Placement::Striped, Route::ReduceScatter, true),
        (Stage::Two, Placement::Whole, Route::AllReduce, false),
    ] {
        let accumulate = count(ACCUMULATE);
        let config = Config {
            stage,
            placement,
            route,
            overlap,
            accumulate,
            bucket_size: count(60),
            ..config(&model)
        };
        let expected = unsharded(&names, &config, &[steps[0].clone(), steps[2].clone()])?;
        world(WORLD, |comm| -> Result<()> {
            let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
            worker.step(&steps[0])?;
            let before = (worker.weights()?, worker.optimizer.memory());
            let rank = worker.optimizer.rank();
            let errors: Vec<_> = bad
                .iter()
                .filter_map(|ranks| worker.hand_in(&ranks[rank.0]).err())
                .collect();
            if rank == ODD {
                let [error] = &errors[..] else {
                    anyhow::bail!("{errors:?}")
                };
                let text = error.to_string();
                ensure!(
                    !error.is_fatal() && words.iter().all(|word| text.contains(word)),
                    "{text}"
                );
            } else {
                ensure!(errors.is_empty(), "rank {rank}: {errors:?}");
            }
            let error = worker
                .optimizer
                .step()
                .err()
                .context("the step was taken")?;
            ensure!(
                matches!(&error, Error::Dropped { step: 2, failed, .. } if *failed == [ODD]),
                "{error}"
            );
            ensure!(
                worker.optimizer.memory() == before.1 && worker.optimizer.steps() == 1,
                "not as before"
            );
            same_bits(&names, &worker.weights()?, &before.0).context("after the dropped step")?;
            worker.step(&steps[2])?;
            same_bits(&names, &worker.weights()?, &expected).context("after the next step")?;
            worker.optimizer.verify_replicas()?;
            Ok(worker.optimizer.shutdown()?)
        })
        .with_context(|| format!("{stage} {placement} {route} {overlap}"))?;
    }
    Ok(())
}

/// Changes the gradient of one parameter.
fn change(
    batch: &mut MicroBatch,
    name: &str,
    change: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
) -> Result<()> {
    let at = index(&Model::everything(), name)?;
    let gradient = batch.gradients[at].as_mut().context("no gradient")?;
    *gradient = change(gradient)?;
    Ok(())
}

#[test]
fn a_gradient_of_another_shape() -> Result<()> {
    let spoil = |micro, batch: &mut MicroBatch| {
        if micro == 0 {
            change(batch, "blocks.0.up.weight", Tensor::t)
        } else {
            Ok(())
        }
    };
    dropped_on_all(
        spoil,
        &["rank 1", "`blocks.0.up.weight`", "[6, 16]", "[16, 6]"],
    )
}

#[test]
fn a_gradient_of_another_dtype() -> Result<()> {
    for dtype in [DType::F64, DType::F16] {
        let spoil = |micro, batch: &mut MicroBatch| {
            if micro == 1 {
                change(batch, "blocks.0.norm.weight", |gradient| {
                    gradient.to_dtype(dtype)
                })
            } else {
                Ok(())
            }
        };
        dropped_on_all(
            spoil,
            &[
                "rank 1",
                "`blocks.0.norm.weight`",
                &format!("{dtype:?}"),
                "F32",
            ],
        )?;
    }
    Ok(())
}

/// The first error is told, once; what comes after it is dropped with it.
#[test]
fn errors_in_several_micro_batches() -> Result<()> {
    dropped_on_all(
        |_, batch| change(batch, "scalar", |gradient| gradient.reshape(1)),
        &["`scalar`", "[1]", "[]"],
    )
}

#[test]
fn gradients_that_are_missing_in_all_micro_batches() -> Result<()> {
    let model = Model::everything();
    let names = ["conv.weight", "blocks.0.qkv.bias"];
    let at = [index(&model, names[0])?, index(&model, names[1])?];
    let spoil = |_, batch: &mut MicroBatch| {
        at.iter().for_each(|at| batch.gradients[*at] = None);
        Ok(())
    };
    dropped_on_all(
        spoil,
        &[
            "no gradient reached `blocks.0.qkv.bias`, `conv.weight`",
            "optional",
        ],
    )
}

#[test]
fn a_micro_batch_with_a_weight_that_makes_no_sense() -> Result<()> {
    for (weight, word) in [
        (0.0, "0"),
        (-1.0, "-1"),
        (f64::NAN, "NaN"),
        (f64::INFINITY, "inf"),
    ] {
        let spoil = |micro, batch: &mut MicroBatch| {
            if micro == 0 {
                batch.weight = weight;
            }
            Ok(())
        };
        dropped_on_all(
            spoil,
            &["rank 1", &format!("weighs {word},"), "positive and finite"],
        )?;
    }
    Ok(())
}

#[test]
fn calls_at_the_wrong_time() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(7)?;
    let names = trained(&model, &initial);
    let step = model.gradients(Draw::Integers, 7, 0, ACCUMULATE, WORLD)?;
    for stage in Stage::ALL {
        let config = Config {
            stage,
            accumulate: count(ACCUMULATE),
            ..config(&model)
        };
        let expected = unsharded(&names, &config, std::slice::from_ref(&step))?;
        world(WORLD, |comm| -> Result<()> {
            let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
            let rank = worker.optimizer.rank();
            worker.hand_in(&step[0][rank.0])?;
            if rank == ODD {
                let error = worker
                    .optimizer
                    .step()
                    .err()
                    .context("a step before its last micro-batch")?;
                ensure!(
                    matches!(
                        error,
                        Error::StepTooEarly {
                            done: 1,
                            accumulate: ACCUMULATE,
                            ..
                        }
                    ),
                    "{error}"
                );
                let loss = Tensor::ones((), DType::F32, &candle_core::Device::Cpu)?;
                let error = worker
                    .optimizer
                    .backward(&loss)
                    .err()
                    .context("a backward pass without a store")?;
                ensure!(matches!(error, Error::NoStore), "{error}");
            }
            worker.hand_in(&step[1][rank.0])?;
            if rank == ODD {
                let error = worker
                    .hand_in(&step[1][rank.0])
                    .err()
                    .context("one micro-batch too many")?;
                ensure!(
                    matches!(
                        error,
                        Error::StepDue {
                            accumulate: ACCUMULATE,
                            ..
                        }
                    ),
                    "{error}"
                );
            }
            worker.optimizer.step()?;
            same_bits(&names, &worker.weights()?, &expected)?;
            Ok(worker.optimizer.shutdown()?)
        })?;
    }
    Ok(())
}

#[test]
fn a_rank_whose_rate_drifted() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(7)?;
    let names = trained(&model, &initial);
    let steps = [
        model.gradients(Draw::Integers, 7, 0, 1, WORLD)?,
        model.gradients(Draw::Integers, 7, 1, 1, WORLD)?,
    ];
    let config = config(&model);
    let expected = unsharded(&names, &config, &steps[1..])?;
    world(WORLD, |comm| -> Result<()> {
        let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
        let rank = worker.optimizer.rank();
        if rank == ODD {
            let (mut muon, adamw) = (config.muon.clone(), config.adamw);
            muon.lr *= 1.5;
            worker.optimizer.set_hyper_parameters(muon, adamw)?;
        }
        let error = worker.step(&steps[0]).err().context("the step was taken")?;
        let others: Vec<_> = if rank == ODD {
            vec![Rank(0), Rank(2)]
        } else {
            vec![ODD]
        };
        ensure!(
            matches!(&error, Error::Drifted { step: 1, drifted, .. } if *drifted == others),
            "{error}"
        );
        let initial: Vec<_> = names.iter().map(|(_, tensor)| tensor.clone()).collect();
        same_bits(&names, &worker.weights()?, &initial)?;
        worker
            .optimizer
            .set_hyper_parameters(config.muon.clone(), config.adamw)?;
        worker.step(&steps[1])?;
        same_bits(&names, &worker.weights()?, &expected)?;
        Ok(worker.optimizer.shutdown()?)
    })?;
    Ok(())
}

/// A rank that writes to its own weights is found, and named with the weight.
#[test]
fn a_replica_that_differs() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(7)?;
    world(WORLD, |comm| -> Result<()> {
        let mut worker = Worker::new(comm, &initial, &model.roles, config(&model))?;
        worker.optimizer.verify_replicas()?;
        let at = index(&model, "conv.weight")?;
        if worker.optimizer.rank() == ODD {
            let variable = &worker.variables()[at];
            variable.set(&(variable.as_tensor() * 2.0)?)?;
        }
        let error = worker
            .optimizer
            .verify_replicas()
            .err()
            .context("the difference was not found")?;
        let is_named = matches!(&error, Error::ReplicasDiffer { name, differing, .. } if name == "conv.weight" && *differing == [ODD]);
        ensure!(is_named && !error.is_fatal(), "{error}");
        Ok(worker.optimizer.shutdown()?)
    })?;
    Ok(())
}
