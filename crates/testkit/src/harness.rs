//! Sharded runs on ranks that are threads of this process.

use std::time::Duration;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use polarshard_comm::{CallLog, Communicator, Loopback, Recording, ranks};
use polarshard_partition::{Call, Error as PartitionError, Plan, Terms, WorldSize};
use polarshard_zero::{Config, MemoryUse, Result, Role, Roles, StepReport, ZeroOptimizer};

use crate::model::{MicroBatch, StepGradients};

/// How long a rank waits for another: far longer than any test takes.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Runs `rank` on every rank of a world of `Loopback`, each on a thread of its own, and returns what they return, by rank.
///
/// # Errors
/// If the world has no rank.
pub fn on_ranks<T, E>(
    world: usize,
    rank: impl Fn(Loopback) -> std::result::Result<T, E> + Sync,
) -> std::result::Result<Vec<ranks::Outcome<T, E>>, PartitionError>
where
    T: Send,
    E: Send,
{
    Ok(ranks::run(
        Loopback::world(WorldSize::new(world)?, DEADLINE),
        rank,
    ))
}

/// One rank of a sharded run: its variables, its optimizer, and the record of its calls.
#[derive(Debug)]
pub struct Worker {
    /// The optimizer.
    pub optimizer: ZeroOptimizer,
    /// All calls since [`Worker::new`] began, until they are taken.
    pub log: CallLog,
    /// The trained variables, in registration order.
    variables: Vec<Var>,
}

impl Worker {
    /// Variables of its own with these values, and their optimizer.
    ///
    /// # Errors
    /// Those of [`ZeroOptimizer::from_named`].
    pub fn new(
        comm: impl Communicator + 'static,
        parameters: &[(String, Tensor)],
        roles: &Roles,
        config: Config,
    ) -> Result<Self> {
        let comm = Recording::new(comm);
        let log = comm.log();
        let named = parameters
            .iter()
            .map(|(name, tensor)| Ok((name.clone(), Var::from_tensor(&tensor.copy()?)?)))
            .collect::<Result<Vec<_>>>()?;
        let trained = named
            .iter()
            .filter(|(name, _)| matches!(roles.of(name), Role::Required | Role::Optional));
        let variables = trained.map(|(_, variable)| variable.clone()).collect();
        let optimizer = ZeroOptimizer::from_named(named, roles, Box::new(comm), config)?;
        Ok(Self {
            optimizer,
            log,
            variables,
        })
    }

    /// Hands in the gradients of one micro-batch.
    ///
    /// # Errors
    /// Those of [`ZeroOptimizer::hand_in_weighted`].
    pub fn hand_in(&mut self, micro_batch: &MicroBatch) -> Result<()> {
        let given = self.variables.iter().zip(&micro_batch.gradients);
        let store = grad_store(
            given.filter_map(|(variable, gradient)| Some((variable, gradient.clone()?))),
        )?;
        self.optimizer.hand_in_weighted(&store, micro_batch.weight)
    }

    /// Hands in this rank's gradients of a whole step, and steps.
    ///
    /// # Errors
    /// Those of [`ZeroOptimizer::hand_in_weighted`] and [`ZeroOptimizer::step`].
    pub fn step(&mut self, gradients: &StepGradients) -> Result<StepReport> {
        let rank = self.optimizer.rank();
        for ranks in gradients {
            self.hand_in(&ranks[rank.0])?;
        }
        self.optimizer.step()
    }

    /// Copies of the trained weights, in registration order.
    ///
    /// # Errors
    /// Of making tensors.
    pub fn weights(&self) -> Result<Vec<Tensor>> {
        self.variables
            .iter()
            .map(|variable| Ok(variable.as_tensor().detach().copy()?))
            .collect()
    }

    /// The trained variables, in registration order.
    pub fn variables(&self) -> &[Var] {
        &self.variables
    }
}

/// What was seen of a sharded run on one rank.
#[derive(Debug)]
pub struct Seen {
    /// The trained weights after each step, in registration order.
    pub weights: Vec<Vec<Tensor>>,
    /// The calls of each step.
    pub calls: Vec<Vec<Call>>,
    /// What each step told.
    pub reports: Vec<StepReport>,
    /// What the optimizer held after the last step.
    pub memory: MemoryUse,
    /// The plan of the run.
    pub plan: Plan,
    /// What the plan's predictions depend on.
    pub terms: Terms,
}

/// Trains on given gradients, proves at the end that all ranks have the same weights, and shuts down.
///
/// # Errors
/// Those of the optimizer.
pub fn train(
    comm: impl Communicator + 'static,
    parameters: &[(String, Tensor)],
    roles: &Roles,
    config: Config,
    steps: &[StepGradients],
) -> Result<Seen> {
    let worker = Worker::new(comm, parameters, roles, config)?;
    run(worker, steps)
}

/// The same for a worker that is there already.
///
/// # Errors
/// Those of the optimizer.
pub fn run(mut worker: Worker, steps: &[StepGradients]) -> Result<Seen> {
    let (mut weights, mut calls, mut reports) = (Vec::new(), Vec::new(), Vec::new());
    worker.log.take();
    for gradients in steps {
        reports.push(worker.step(gradients)?);
        calls.push(worker.log.take());
        weights.push(worker.weights()?);
    }
    worker.optimizer.verify_replicas()?;
    let memory = worker.optimizer.memory();
    let plan = worker.optimizer.plan().clone();
    let terms = worker.optimizer.terms();
    worker.optimizer.shutdown()?;
    Ok(Seen {
        weights,
        calls,
        reports,
        memory,
        plan,
        terms,
    })
}

/// A `GradStore` with these gradients; candle makes an empty one only by a backward pass.
///
/// # Errors
/// Of candle.
pub fn grad_store<'a>(
    gradients: impl IntoIterator<Item = (&'a Var, Tensor)>,
) -> candle_core::Result<GradStore> {
    let unit = Var::zeros(1, DType::F32, &Device::Cpu)?;
    let mut store = unit.sum_all()?.backward()?;
    store.remove(&unit);
    for (variable, gradient) in gradients {
        store.insert(variable, gradient);
    }
    Ok(store)
}
