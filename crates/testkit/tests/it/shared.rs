//! Several optimizers in one world.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use polarshard_comm::{Communicator, Loopback, Shared};
use polarshard_partition::Rank;
use polarshard_testkit::harness::Worker;
use polarshard_testkit::model::{Draw, Model, StepGradients};
use polarshard_zero::{Config, Error, Roles};

use crate::support::{config, same_bits, trained, unsharded, world};

const WORLD: usize = 2;

struct Fixture {
    model: Model,
    steps: Vec<StepGradients>,
}

fn fixture() -> Result<Fixture> {
    let model = Model::everything();
    let step = |step| model.gradients(Draw::Integers, 17, step, 1, WORLD);
    let steps = (0..3).map(step).collect::<candle_core::Result<_>>()?;
    Ok(Fixture { model, steps })
}

#[test]
fn two_models_side_by_side_train_as_each_by_itself() -> Result<()> {
    let Fixture { model, steps } = fixture()?;
    let config = config(&model);
    let initial = [model.initial(1)?, model.initial(2)?];
    let expected = initial
        .iter()
        .map(|initial| unsharded(&trained(&model, initial), &config, &steps))
        .collect::<Result<Vec<_>>>()?;
    world(WORLD, |comm: Loopback| -> Result<()> {
        let comm = Shared::new(comm);
        let mut workers = initial
            .iter()
            .map(|initial| {
                Ok(Worker::new(
                    comm.clone(),
                    initial,
                    &model.roles,
                    config.clone(),
                )?)
            })
            .collect::<Result<Vec<_>>>()?;
        for gradients in &steps {
            for worker in &mut workers {
                worker.step(gradients)?;
            }
        }
        for ((worker, expected), initial) in workers.iter().zip(&expected).zip(&initial) {
            same_bits(&trained(&model, initial), &worker.weights()?, expected)?;
        }
        for worker in workers {
            worker.optimizer.shutdown()?;
        }
        let comm = comm.into_inner().context("an optimizer has not ended")?;
        Ok(Box::new(comm).shutdown()?)
    })?;
    Ok(())
}

/// Two models of the same shapes: nothing but the handle tells their requests apart.
fn twins(comm: Loopback) -> Result<[Worker; 2]> {
    let comm = Shared::new(comm);
    let worker = |value: f64| -> Result<Worker> {
        let weight = (Tensor::ones((4, 5), DType::F32, &Device::Cpu)? * value)?;
        let named = [("weight".to_owned(), weight)];
        Ok(Worker::new(
            comm.clone(),
            &named,
            &Roles::default(),
            Config::default(),
        )?)
    };
    Ok([worker(1.0)?, worker(2.0)?])
}

#[test]
fn a_step_of_another_optimizer_on_another_rank_changes_nothing() -> Result<()> {
    let gradient = Tensor::ones((4, 5), DType::F32, &Device::Cpu)?;
    world(WORLD, |comm| -> Result<()> {
        let odd = comm.rank() == Rank(1);
        let mut workers = twins(comm)?;
        if odd {
            workers.reverse();
        }
        let gradients = vec![vec![
            polarshard_testkit::model::MicroBatch {
                weight: 1.0,
                gradients: vec![Some(gradient.clone())],
            };
            WORLD
        ]];
        for worker in &mut workers {
            let before = worker.weights()?;
            let error = worker
                .step(&gradients)
                .err()
                .context("the step was taken")?;
            ensure!(matches!(error, Error::Drifted { .. }), "{error}");
            let names = [("weight".to_owned(), before[0].clone())];
            same_bits(&names, &worker.weights()?, &before)?;
            let error = worker.optimizer.verify_replicas().err();
            ensure!(error.is_some(), "replicas of different models are alike");
        }
        Ok(())
    })?;
    Ok(())
}

#[test]
fn optimizers_made_in_another_order_are_refused() -> Result<()> {
    world(WORLD, |comm| -> Result<()> {
        let comm = Shared::new(comm);
        let mut handles = [comm.clone(), comm.clone()];
        if comm.rank() == Rank(1) {
            handles.reverse();
        }
        let [first, _] = handles;
        let named = [(
            "weight".to_owned(),
            Tensor::ones((4, 5), DType::F32, &Device::Cpu)?,
        )];
        let made = Worker::new(first, &named, &Roles::default(), Config::default());
        let error = made.err().context("it was made")?;
        ensure!(
            error.to_string().contains("the handle on their world"),
            "{error}"
        );
        Ok(())
    })?;
    Ok(())
}
