//! One rank's training, on its own micro-batches.

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};
use polarshard_comm::{CallLog, Communicator, Recording, Shared};
use polarshard_partition::{Plan, Rank};
use polarshard_zero::{Error, Outcome, ParamStore, Roles, ZeroOptimizer};

use crate::account::{Account, gather};
use crate::curve::Curve;
use crate::model::Gpt;
use crate::options::Options;
use crate::progress;
use crate::table;
use crate::tallies::Tallies;
use crate::text::Text;

/// What rank 0 has after training.
pub(crate) struct Run {
    /// What each rank tells.
    pub(crate) accounts: Vec<Account>,
    pub(crate) plan: Plan,
    /// The weights after the last step, in registration order.
    pub(crate) weights: Vec<(String, Tensor)>,
}

/// Trains as one rank, and ends the world; rank 0 gets the run.
pub(crate) fn train(
    comm: Box<dyn Communicator>,
    device: &Device,
    options: &Options,
    text: &Text,
) -> Result<Option<Run>> {
    let rank = comm.rank();
    // The ranks have something to say to each other after the optimizer has ended.
    let mut comm = Shared::new(comm);
    let recording = Recording::new(comm.clone());
    let log = recording.log();
    let store = ParamStore::new(options.seed, Roles::default());
    let model = Gpt::new(options, &store.var_builder(DType::F32, device))?;
    let mut optimizer = store.optimizer(Box::new(recording), options.config())?;
    if rank == Rank(0) {
        println!("{}", table::model(optimizer.plan()));
    }

    let account = all_steps(&model, &mut optimizer, &log, options, text)?;
    let plan = optimizer.plan().clone();
    optimizer.shutdown()?;
    let accounts = gather(&mut comm, &account)?;
    let comm = comm.into_inner();
    comm.context("the optimizer still holds its communicator")?
        .shutdown()?;
    if rank != Rank(0) {
        return Ok(None);
    }
    Ok(Some(Run {
        accounts,
        plan,
        weights: weights(&store)?,
    }))
}

fn all_steps(
    model: &Gpt,
    optimizer: &mut ZeroOptimizer,
    log: &CallLog,
    options: &Options,
    text: &Text,
) -> Result<Account> {
    let (rank, world) = (optimizer.rank(), optimizer.world());
    // What ranks said to agree on the optimizer belongs to no step.
    log.take();
    let held_out = text.held_out(rank, world.get(), model.device())?;
    let bar = progress::bar(options, rank == Rank(0));
    let mut curve = Curve::default();
    let mut recorded = Tallies::default();
    let (mut unreduced_peak, mut orthogonalized) = (0, 0);
    let steps = options.steps.get();
    for step in 0..steps {
        curve.evaluate(model, held_out.as_ref(), step, steps)?;
        optimizer.set_learning_rate(options.learning_rate(step))?;
        let mut sum = 0.0;
        for micro in 0..options.accumulate.get() {
            let batch = text.batch(step, micro, rank, model.device())?;
            let loss = model.loss(&batch.inputs, &batch.targets)?;
            optimizer.backward(&loss)?;
            sum += f64::from(loss.to_scalar::<f32>()?);
        }
        let report = optimizer.step()?;
        if let Outcome::Skipped { non_finite } = report.outcome {
            bail!("step {step} was skipped: {non_finite} elements of its gradients are not finite");
        }
        recorded.add(world, &log.take(), 1);
        unreduced_peak = unreduced_peak.max(report.unreduced_peak);
        orthogonalized = report.orthogonalized;
        let loss = sum / options.accumulate.get() as f64;
        curve.training.push(loss);
        if options.verifies_after(step) {
            optimizer
                .verify_replicas()
                .with_context(|| format!("after step {step}"))?;
            // The proof is no part of the step.
            log.take();
        }
        progress::advance(&bar, loss);
    }
    curve.evaluate(model, held_out.as_ref(), steps, steps)?;
    bar.finish_and_clear();

    let foreseen = optimizer.plan().predict(rank, &optimizer.terms()).calls;
    let mut predicted = Tallies::default();
    predicted.add(world, &foreseen, steps as u64);
    let identical = match optimizer.verify_replicas() {
        Ok(()) => true,
        Err(Error::ReplicasDiffer { .. }) => false,
        Err(error) => return Err(error.into()),
    };
    Ok(Account {
        curve,
        memory: optimizer.memory(),
        unreduced_peak,
        orthogonalized,
        recorded,
        predicted,
        identical,
    })
}

fn weights(store: &ParamStore) -> Result<Vec<(String, Tensor)>> {
    let names = store.names().into_iter();
    names
        .map(|(name, _)| Ok((name.clone(), store.get(&name)?.detach().copy()?)))
        .collect()
}
