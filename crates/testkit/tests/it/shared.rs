//! Several optimizers in one world.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use polarshard_comm::{Communicator, Loopback, Shared};
use polarshard_partition::Rank;
use polarshard_testkit::harness::Worker;
use polarshard_testkit::model::{Draw, MicroBatch, Model, StepGradients};
use polarshard_zero::{Config, Error, Roles, StepReport};

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

fn gradients() -> Result<StepGradients> {
    let gradient = Tensor::ones((4, 5), DType::F32, &Device::Cpu)?;
    let micro_batch = MicroBatch {
        weight: 1.0,
        gradients: vec![Some(gradient)],
    };
    Ok(vec![vec![micro_batch; WORLD]])
}

/// Runs `rank` with the twins, which are the other way round on rank 1.
fn swapped(rank: impl Fn(&mut [Worker; 2]) -> Result<()> + Sync) -> Result<()> {
    world(WORLD, |comm| -> Result<()> {
        let odd = comm.rank() == Rank(1);
        let mut workers = twins(comm)?;
        if odd {
            workers.reverse();
        }
        rank(&mut workers)
    })
    .map(drop)
}

/// A step is refused, and nothing has changed.
fn drifted(
    worker: &mut Worker,
    step: impl FnOnce(&mut Worker) -> polarshard_zero::Result<StepReport>,
) -> Result<()> {
    let before = worker.weights()?;
    let error = step(worker).err().context("the step was taken")?;
    ensure!(matches!(error, Error::Drifted { .. }), "{error}");
    unchanged(worker, &before)
}

fn unchanged(worker: &Worker, before: &[Tensor]) -> Result<()> {
    let names = [("weight".to_owned(), before[0].clone())];
    same_bits(&names, &worker.weights()?, before)
}

#[test]
fn a_step_of_another_optimizer_on_another_rank_changes_nothing() -> Result<()> {
    let gradients = gradients()?;
    swapped(|workers| {
        let mut workers = workers.iter_mut();
        workers.try_for_each(|worker| drifted(worker, |worker| worker.step(&gradients)))
    })
}

/// The gradients are mixed before the steps, which are then taken in one order.
#[test]
fn gradients_reduced_with_those_of_another_model_are_dropped() -> Result<()> {
    let gradients = gradients()?;
    swapped(|workers| {
        let rank = workers[0].optimizer.rank().0;
        for worker in &mut *workers {
            worker.hand_in(&gradients[0][rank])?;
        }
        if rank == 1 {
            workers.reverse();
        }
        let mut workers = workers.iter_mut();
        workers.try_for_each(|worker| drifted(worker, |worker| worker.optimizer.step()))
    })
}

#[test]
fn another_optimizer_is_not_compared_nor_saved_nor_loaded() -> Result<()> {
    let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
    world(WORLD, |comm| -> Result<()> {
        let odd = comm.rank() == Rank(1);
        let mut workers = twins(comm)?;
        for (worker, folder) in workers.iter_mut().zip(&folders) {
            worker.optimizer.save(folder.path())?;
        }
        let weights = [workers[0].weights()?, workers[1].weights()?];
        let mut order = [0, 1];
        if odd {
            order.reverse();
        }
        for index in order {
            let (optimizer, folder) = (&mut workers[index].optimizer, folders[index].path());
            for result in [
                optimizer.verify_replicas(),
                optimizer.save(folder),
                optimizer.load(folder),
            ] {
                let error = result.err().context("it was done with another model")?;
                ensure!(matches!(error, Error::OtherOrder { .. }), "{error}");
            }
        }
        for (worker, before) in workers.iter().zip(&weights) {
            unchanged(worker, before)?;
        }
        Ok(())
    })?;
    // What was saved before is whole.
    world(WORLD, |comm| -> Result<()> {
        for (worker, folder) in twins(comm)?.iter_mut().zip(&folders) {
            let before = worker.weights()?;
            worker.optimizer.load(folder.path())?;
            unchanged(worker, &before)?;
        }
        Ok(())
    })
    .map(drop)
}

/// Handles are told apart by their first use, so one more of them on one rank does no harm.
#[test]
fn a_handle_that_is_not_used_does_not_count() -> Result<()> {
    let gradients = gradients()?;
    world(WORLD, |comm| -> Result<()> {
        let comm = Shared::new(comm);
        let _unused = (comm.rank() == Rank(0)).then(|| comm.clone());
        let named = [(
            "weight".to_owned(),
            Tensor::ones((4, 5), DType::F32, &Device::Cpu)?,
        )];
        let mut worker = Worker::new(comm.clone(), &named, &Roles::default(), Config::default())?;
        worker.step(&gradients)?;
        worker.optimizer.verify_replicas()?;
        Ok(())
    })
    .map(drop)
}
