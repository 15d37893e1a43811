//! The sharded run: every rank trains on its own micro-batches.

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use candle_core::{DType, Tensor};
use polarshard_comm::{Communicator, Loopback, Recording, ranks};
use polarshard_partition::{Call, Plan, Rank};
use polarshard_zero::{Error, MemoryUse, Outcome, ParamStore, Roles};

use crate::curve::{self, Curve, HeldOut};
use crate::model::{DEVICE, Gpt};
use crate::options::Options;
use crate::progress;
use crate::table;
use crate::text::Text;

/// How long a rank may be behind the others: they share the cores of one machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// What a rank tells after training.
pub(crate) struct Trained {
    pub(crate) curve: Curve,
    pub(crate) plan: Plan,
    pub(crate) memory: MemoryUse,
    /// The most bytes of unreduced gradients that it held at once in any step.
    pub(crate) unreduced_peak: usize,
    /// Matrices that it orthogonalized in a step.
    pub(crate) orthogonalized: usize,
    /// The calls of all steps.
    pub(crate) recorded: Vec<Call>,
    /// The calls that the plan foresees for one step.
    pub(crate) predicted: Vec<Call>,
    /// Whether its weights have the bits of rank 0's.
    pub(crate) identical: bool,
    /// The weights after the last step, in registration order.
    pub(crate) weights: Vec<(String, Tensor)>,
}

/// Trains on all ranks, each a thread.
pub(crate) fn train(options: &Options, text: &Text) -> Result<Vec<Trained>> {
    let world = Loopback::world(options.world()?, DEADLINE);
    let outcomes = ranks::run(world, |comm| train_rank(comm, options, text));
    let results = outcomes
        .into_iter()
        .enumerate()
        .map(|(rank, outcome)| match outcome {
            ranks::Outcome::Done(trained) => Ok(trained),
            ranks::Outcome::Failed(error) => Err(error.context(format!("rank {rank} failed"))),
            ranks::Outcome::Panicked(message) => Err(anyhow!("rank {rank} panicked: {message}")),
        });
    results.collect()
}

fn train_rank(comm: Loopback, options: &Options, text: &Text) -> Result<Trained> {
    let (rank, world) = (comm.rank(), comm.world().get());
    let comm = Recording::new(comm);
    let log = comm.log();
    let store = ParamStore::new(options.seed, Roles::default());
    let model = Gpt::new(options, &store.var_builder(DType::F32, &DEVICE))?;
    let mut optimizer = store.optimizer(Box::new(comm), options.config())?;
    if rank == Rank(0) {
        println!("{}", table::model(optimizer.plan()));
    }
    // What ranks said to agree on all this belongs to no step.
    log.take();

    let held_out = text.held_out(rank, world)?;
    let bar = progress::bar(options, rank == Rank(0));
    let mut curve = Curve::default();
    let (mut unreduced_peak, mut orthogonalized) = (0, 0);
    for step in 0..options.steps.get() {
        if curve::is_due(step, options.steps.get()) {
            curve
                .held_out
                .push(HeldOut::of(&model, held_out.as_ref(), step)?);
        }
        optimizer.set_learning_rate(options.learning_rate(step))?;
        let mut sum = 0.0;
        for micro in 0..options.accumulate.get() {
            let batch = text.batch(step, micro, rank)?;
            let loss = model.loss(&batch.inputs, &batch.targets)?;
            optimizer.backward(&loss)?;
            sum += f64::from(loss.to_scalar::<f32>()?);
        }
        let report = optimizer.step()?;
        if let Outcome::Skipped { non_finite } = report.outcome {
            bail!("step {step} was skipped: {non_finite} elements of its gradients are not finite");
        }
        unreduced_peak = unreduced_peak.max(report.unreduced_peak);
        orthogonalized = report.orthogonalized;
        let loss = sum / options.accumulate.get() as f64;
        curve.training.push(loss);
        progress::advance(&bar, loss);
    }
    curve
        .held_out
        .push(HeldOut::of(&model, held_out.as_ref(), options.steps.get())?);
    bar.finish_and_clear();

    let recorded = log.take();
    let identical = match optimizer.verify_replicas() {
        Ok(()) => true,
        Err(Error::ReplicasDiffer { .. }) => false,
        Err(error) => return Err(error.into()),
    };
    let trained = Trained {
        curve,
        plan: optimizer.plan().clone(),
        memory: optimizer.memory(),
        unreduced_peak,
        orthogonalized,
        recorded,
        predicted: optimizer.plan().predict(rank, &optimizer.terms()).calls,
        identical,
        weights: weights(&store)?,
    };
    optimizer.shutdown()?;
    Ok(trained)
}

fn weights(store: &ParamStore) -> Result<Vec<(String, Tensor)>> {
    let names = store.names().into_iter();
    names
        .map(|(name, _)| Ok((name.clone(), store.get(&name)?.detach().copy()?)))
        .collect()
}
