//! The optimizer: micro-batches in, steps out.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use candle_nn::VarMap;
use polarshard_comm::{Communicator, Pause, Request};
use polarshard_muon::{AdamWConfig, Decision as Routed, MuonConfig, RoutingTable};
use polarshard_partition::{
    Class, DigestWriter, Layout, Matrix, Param, ParamId, Params, Plan, Rank, Terms, Wire,
    WorldSize, plan_best,
};

use crate::agreement;
use crate::channel::Channel;
use crate::checkpoint;
use crate::config::{Config, positive};
use crate::decision::{Census, Decision, Verdict};
use crate::dtypes;
use crate::error::{Error, Result};
use crate::flat;
use crate::inbox::{Inbox, Socket};
use crate::intake::{self, Intake};
use crate::publish::Publisher;
use crate::replicas;
use crate::report::{MemoryUse, Outcome, StepReport};
use crate::roles::{Role, Roles};
use crate::store::StaleCheck;
use crate::update::{Factors, Shard, SliceState};
use crate::weights::Weight;

/// A ZeRO optimizer with Muon and AdamW on one rank.
///
/// A step is `accumulate` micro-batches and one [`step`](Self::step). Every rank makes the same calls in the same
/// order. It is made by [`ParamStore::optimizer`](crate::ParamStore::optimizer), or from variables whose gradients are
/// handed in.
#[derive(Debug)]
pub struct ZeroOptimizer {
    inbox: Arc<Inbox>,
    source: Source,
    weights: Arc<Vec<Weight>>,
    plan: Arc<Plan>,
    routing: RoutingTable,
    shard: Shard,
    publisher: Publisher,
    config: Config,
    steps: u64,
    ended: Option<Arc<Error>>,
}

/// Where gradients come from.
#[derive(Debug)]
enum Source {
    /// The weights' hooks, during the backward pass.
    Store(StaleCheck),
    /// `GradStore`s that are handed in.
    Variables(Vec<Var>),
}

impl ZeroOptimizer {
    /// Makes an optimizer of named variables, in list order. Frozen ones and buffers are left alone.
    ///
    /// # Errors
    /// [`Error::NoParameters`], [`Error::DuplicateName`], [`Error::SharedVariable`], [`Error::UnmatchedPattern`],
    /// [`Error::Offload`], an invalid [`Config`], and [`Error::Disagreement`] if ranks differ.
    pub fn from_named(
        variables: Vec<(String, Var)>,
        roles: &Roles,
        comm: Box<dyn Communicator>,
        config: Config,
    ) -> Result<Self> {
        roles.check(&variables.iter().map(|(name, _)| name.as_str()))?;
        let (mut names, mut storages) = (BTreeSet::new(), BTreeMap::new());
        for (name, variable) in &variables {
            if !names.insert(name) {
                return Err(Error::DuplicateName { name: name.clone() });
            }
            if let Some(first) = storages.insert(flat::address(variable), name) {
                return Err(Error::SharedVariable {
                    first: first.clone(),
                    second: name.clone(),
                });
            }
        }
        let mut weights = Vec::new();
        let mut sources = Vec::new();
        for (name, variable) in variables {
            let role = roles.of(&name);
            if matches!(role, Role::Required | Role::Optional) {
                weights.push(Weight::new(
                    name,
                    variable.as_tensor(),
                    role == Role::Optional,
                )?);
                sources.push(variable);
            }
        }
        Self::new(weights, Source::Variables(sources), comm, config)
    }

    /// Makes an optimizer of a `VarMap`'s variables, sorted by name.
    ///
    /// # Errors
    /// As [`from_named`](Self::from_named).
    pub fn from_var_map(
        map: &VarMap,
        roles: &Roles,
        comm: Box<dyn Communicator>,
        config: Config,
    ) -> Result<Self> {
        let mut variables: Vec<_> = {
            let data = map
                .data()
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            data.iter()
                .map(|(name, variable)| (name.clone(), variable.clone()))
                .collect()
        };
        variables.sort_by(|(left, _), (right, _)| left.cmp(right));
        Self::from_named(variables, roles, comm, config)
    }

    pub(crate) fn with_store(
        weights: Vec<Weight>,
        stale: StaleCheck,
        socket: &Socket,
        comm: Box<dyn Communicator>,
        config: Config,
    ) -> Result<Self> {
        let optimizer = Self::new(weights, Source::Store(stale), comm, config)?;
        socket.connect(&optimizer.inbox);
        Ok(optimizer)
    }

    fn new(
        weights: Vec<Weight>,
        source: Source,
        comm: Box<dyn Communicator>,
        mut config: Config,
    ) -> Result<Self> {
        let device = device_of(&weights, &config)?;
        let mut channel = Channel::new(comm);
        let (rank, world) = (channel.rank(), channel.world());
        config.validate(world.get())?;
        let routing = routing(&weights, &config)?;
        let params = parameters(&weights, &routing, &config)?;
        if let Some(costs) = config.planned {
            let terms = terms(&params, world, &config);
            let best =
                plan_best(&params, world, config.bucket_size, &terms, &costs)?.swap_remove(0);
            (config.placement, config.route, config.policy) =
                (best.placement, best.route, best.policy);
        }
        let layout = Layout::new(&params, world, config.placement, config.bucket_size)?;
        let plan = Arc::new(Plan::new(&params, layout, config.route, config.policy));

        agreement::agree(&mut channel, &config, &weights, &plan)?;
        match config.broadcast_from {
            Some(root) => broadcast(&mut channel, &weights, Rank(root))?,
            None => agreement::same_weights(&mut channel, &weights)?,
        }

        let weights = Arc::new(weights);
        let shard = Shard::new(&plan, rank, &weights, &device)?;
        let publisher = Publisher::new(&plan, world.get(), &device);
        let terms = intake::Terms {
            stage: config.stage,
            accumulate: config.accumulate.get(),
            overlap: config.overlap,
        };
        let gradient_wire = config.gradient_wire.and_then(dtypes::wire);
        let intake = Intake::new(
            channel,
            Arc::clone(&plan),
            Arc::clone(&weights),
            gradient_wire,
            terms,
            &device,
        )?;
        let inbox = Inbox::new(intake);
        Ok(Self {
            inbox,
            source,
            weights,
            plan,
            routing,
            shard,
            publisher,
            config,
            steps: 0,
            ended: None,
        })
    }

    /// Differentiates the mean loss of one micro-batch and reduces its gradients (stage 2: now; stage 1: with the last
    /// micro-batch of the step), while the pass goes on if the settings say so.
    ///
    /// # Errors
    /// A gradient that is missing, comes twice or does not fit, a stale tensor, a failed backward pass. The micro-batch
    /// counts even so: this rank goes on, and [`step`](Self::step) drops the step's micro-batches on all ranks.
    /// [`Error::StepDue`] after the last micro-batch, which does not count.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.backward_weighted(loss, 1.0)
    }

    /// The same for a micro-batch with a weight, such as its number of tokens: gradients are averaged by weight over
    /// micro-batches and ranks.
    ///
    /// # Errors
    /// As [`backward`](Self::backward), and [`Error::MicroBatchWeight`].
    pub fn backward_weighted(&mut self, loss: &Tensor, weight: f64) -> Result<()> {
        self.alive()?;
        let Source::Store(stale) = &mut self.source else {
            return Err(Error::NoStore);
        };
        self.inbox.intake().begin(weight)?;
        let rank = self.inbox.intake().channel.rank();
        let passed = stale.check(loss, self.steps).and_then(|()| {
            let loss = flat::scaled(loss, self.config.loss_scale)?;
            self.inbox.while_open(|| differentiate(&loss, rank))
        });
        let mut intake = self.inbox.intake();
        if let Err(error) = passed {
            // An error of a hook is there already, and is the reason for this one.
            intake.fail(&error);
        }
        let ended = intake.end();
        drop(intake);
        self.guard(ended)
    }

    /// Hands in the gradients of one micro-batch, those of the mean loss times the loss scale.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn hand_in(&mut self, gradients: &GradStore) -> Result<()> {
        self.hand_in_weighted(gradients, 1.0)
    }

    /// The same for a micro-batch with a weight.
    ///
    /// # Errors
    /// As [`backward_weighted`](Self::backward_weighted).
    pub fn hand_in_weighted(&mut self, gradients: &GradStore, weight: f64) -> Result<()> {
        self.alive()?;
        let Source::Variables(variables) = &self.source else {
            return Err(Error::HandInWithStore);
        };
        let mut intake = self.inbox.intake();
        intake.begin(weight)?;
        for param in self.plan.params().plan_order() {
            if let Some(gradient) = gradients.get(&variables[param.index()])
                && intake.accept(param, gradient).is_err()
            {
                // Remembered by the intake; the micro-batch goes on without what follows.
                break;
            }
        }
        let ended = intake.end();
        drop(intake);
        self.guard(ended)
    }

    /// Updates the weights, after the last micro-batch of the step. All ranks then have the same weights.
    ///
    /// # Errors
    /// [`Error::StepTooEarly`]; [`Error::Dropped`] and [`Error::Drifted`], after which training can go on with the next
    /// step; errors of a collective, which are fatal.
    pub fn step(&mut self) -> Result<StepReport> {
        self.alive()?;
        let intake = self.inbox.intake();
        if !intake.at_boundary() {
            let (rank, done) = (intake.channel.rank(), intake.cycle().done);
            return Err(Error::StepTooEarly {
                rank,
                done,
                accumulate: self.config.accumulate.get(),
            });
        }
        drop(intake);
        let stepped = self.boundary();
        self.guard(stepped)
    }

    /// Steps on the micro-batches so far, as at the end of an epoch. All ranks must have done the same number.
    ///
    /// # Errors
    /// As [`step`](Self::step); [`Error::StepTooEarly`] only before the first micro-batch.
    pub fn step_partial(&mut self) -> Result<StepReport> {
        self.alive()?;
        let mut intake = self.inbox.intake();
        if intake.cycle().done == 0 {
            let rank = intake.channel.rank();
            return Err(Error::StepTooEarly {
                rank,
                done: 0,
                accumulate: self.config.accumulate.get(),
            });
        }
        let closed = intake.close_early();
        drop(intake);
        self.guard(closed)?;
        let stepped = self.boundary();
        self.guard(stepped)
    }

    /// Compares the bits of all weights over ranks. A collective: all ranks call it.
    ///
    /// # Errors
    /// [`Error::ReplicasDiffer`].
    pub fn verify_replicas(&mut self) -> Result<()> {
        self.alive()?;
        let verified = replicas::verify(&mut self.inbox.intake().channel, &self.weights);
        self.guard(verified)
    }

    /// Saves masters, momentum, moments and step counts to a folder that all ranks see. A collective: all ranks call it
    /// with the same folder, between steps. A checkpoint in the folder is replaced when the new one is whole.
    ///
    /// Frozen tensors and buffers belong to the model and are not saved.
    ///
    /// # Errors
    /// [`Error::WithinStep`], [`Error::Checkpoint`] naming the file on the rank that met it and
    /// [`Error::CheckpointFailed`] on the others: the earlier checkpoint is whole.
    pub fn save(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        self.between_steps()?;
        let saved = checkpoint::save(
            &mut self.inbox.intake().channel,
            &self.shard,
            self.steps,
            folder.as_ref(),
        );
        self.guard(saved)
    }

    /// Loads what [`save`](Self::save) wrote, at any world size, stage, placement, route and policy, into the same
    /// parameters by name. A collective. Training goes on bit for bit where all of these are the same.
    ///
    /// # Errors
    /// [`Error::WithinStep`]; [`Error::NotInCheckpoint`], [`Error::NotInModel`], [`Error::CheckpointShape`] and
    /// [`Error::Checkpoint`], naming the parameter or file, and [`Error::CheckpointFailed`] on the other ranks: nothing
    /// has changed then, on any rank.
    pub fn load(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        self.between_steps()?;
        let loaded = checkpoint::load(
            &mut self.inbox.intake().channel,
            &self.shard,
            folder.as_ref(),
        );
        let loaded = self.guard(loaded)?;
        let step = loaded.step;
        let published = loaded.put_in(&mut self.shard).and_then(|()| {
            let channel = &mut self.inbox.intake().channel;
            self.publisher
                .publish(channel, &self.plan, &self.shard.masters, &self.weights)
        });
        published.map_err(|error| self.end(error))?;
        self.steps = step;
        Ok(())
    }

    /// The learning rate of the group `muon`.
    pub fn learning_rate(&self) -> f64 {
        self.config.muon.lr
    }

    /// Sets the learning rate of the group `muon`; that of `adamw` keeps its ratio to it.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a rate that is not positive and finite: with zero the ratio would be lost.
    pub fn set_learning_rate(&mut self, lr: f64) -> Result<()> {
        positive("lr", lr)?;
        self.config.adamw.lr *= lr / self.config.muon.lr;
        self.config.muon.lr = lr;
        Ok(())
    }

    /// The hyper-parameters of both groups.
    pub fn hyper_parameters(&self) -> (&MuonConfig, &AdamWConfig) {
        (&self.config.muon, &self.config.adamw)
    }

    /// Replaces the hyper-parameters of both groups.
    ///
    /// # Errors
    /// A value out of its range; nothing is replaced then.
    pub fn set_hyper_parameters(&mut self, muon: MuonConfig, adamw: AdamWConfig) -> Result<()> {
        muon.validate()?;
        adamw.validate()?;
        (self.config.muon, self.config.adamw) = (muon, adamw);
        Ok(())
    }

    /// What losses are multiplied with before they are differentiated.
    pub fn loss_scale(&self) -> f64 {
        self.config.loss_scale
    }

    /// Sets the loss scale, between steps.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a scale that is not positive and finite.
    pub fn set_loss_scale(&mut self, scale: f64) -> Result<()> {
        positive("loss_scale", scale)?;
        self.config.loss_scale = scale;
        Ok(())
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.inbox.intake().channel.rank()
    }

    /// How many ranks there are.
    pub fn world(&self) -> WorldSize {
        self.inbox.intake().channel.world()
    }

    /// Steps applied so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Which parameter is in which group, and why.
    pub fn routing(&self) -> &RoutingTable {
        &self.routing
    }

    /// Layout, buckets and exchanges.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Elements of the control sum at the boundary.
    pub fn control_elems(&self) -> usize {
        Census::len(
            self.plan.params().matrices().count(),
            self.weights.len(),
            self.plan.layout().world().get(),
        )
    }

    /// What a prediction of this optimizer's steps depends on beside its plan.
    pub fn terms(&self) -> Terms {
        terms(self.plan.params(), self.plan.layout().world(), &self.config)
    }

    /// Bytes held on this rank, counted from the tensors.
    pub fn memory(&self) -> MemoryUse {
        const BYTES: usize = 4;
        let elems = |tensors: &mut dyn Iterator<Item = &Tensor>| {
            BYTES * tensors.map(Tensor::elem_count).sum::<usize>()
        };
        let (mut momentum, mut moments) = (elems(&mut self.shard.full_momentum.values()), 0);
        for state in &self.shard.state {
            match state {
                SliceState::Momentum(tensor) => momentum += BYTES * tensor.elem_count(),
                SliceState::InFull => {}
                SliceState::Moments { first, second } => {
                    moments += elems(&mut [first, second].into_iter());
                }
            }
        }
        MemoryUse {
            masters: elems(&mut self.shard.masters.iter()),
            momentum,
            moments,
            reduced_gradients: BYTES * self.inbox.intake().reduced.elems(),
        }
    }

    /// Pauses the deadline of collectives on all ranks, for long work of this rank alone (evaluation, saving), until the
    /// guard is dropped.
    pub fn pause(&self) -> Pause {
        self.inbox.intake().channel.comm().pause()
    }

    /// Ends the optimizer, and its communicator together with all ranks.
    ///
    /// # Errors
    /// If a rank does not come within the deadline, or has failed.
    pub fn shutdown(self) -> Result<()> {
        match Arc::into_inner(self.inbox) {
            Some(inbox) => inbox.into_intake().channel.shutdown(),
            None => unreachable!("hooks hold the inbox during a backward pass only"),
        }
    }

    fn boundary(&mut self) -> Result<StepReport> {
        let mut guard = self.inbox.intake();
        let intake = &mut *guard;
        let census = census(intake, &self.shard, &self.config, self.steps).or_else(|error| {
            // The other ranks wait for this one: it says that it failed.
            intake.fail(&error);
            census(intake, &self.shard, &self.config, self.steps)
        })?;
        let (rank, world) = (intake.channel.rank(), intake.channel.world().get());
        let sums = intake.channel.sum(census.encode(rank, world))?;
        let unreduced_peak = intake.held.peak();
        let next = self.steps + 1;
        let verdict = match census.decide(&sums, rank) {
            Decision::Drop(failed) => {
                intake.clear();
                return Err(Error::Dropped {
                    rank,
                    step: next,
                    failed,
                });
            }
            Decision::Refuse(drifted) => {
                intake.clear();
                return Err(Error::Drifted {
                    rank,
                    step: next,
                    drifted,
                });
            }
            Decision::Skip(non_finite) => {
                intake.clear();
                return Ok(StepReport {
                    step: self.steps,
                    outcome: Outcome::Skipped { non_finite },
                    gradient_norm: f64::INFINITY,
                    clip_factor: 1.0,
                    orthogonalized: 0,
                    unreduced_peak,
                });
            }
            Decision::Apply(verdict) => verdict,
        };
        let (gradient_norm, clip_factor) = norm(&verdict, &self.config);
        let divisor = verdict.weight * self.config.loss_scale;
        let prescales: Vec<_> = self
            .plan
            .params()
            .iter()
            .map(|(param, _)| intake.prescale(param))
            .collect();
        let factors = |param: ParamId| Factors {
            mean: 1.0 / (divisor * prescales[param.index()]),
            clip: clip_factor,
        };
        let applied = self
            .shard
            .update(
                &mut intake.channel,
                &intake.reduced,
                factors,
                &verdict,
                &self.config.muon,
                &self.config.adamw,
            )
            .and_then(|orthogonalized| {
                self.publisher.publish(
                    &mut intake.channel,
                    &self.plan,
                    &self.shard.masters,
                    &self.weights,
                )?;
                Ok(orthogonalized)
            });
        intake.clear();
        drop(guard);
        // From here on the state is half old and half new: no error can be survived.
        let orthogonalized = applied.map_err(|error| self.end(error))?;
        self.steps = next;
        Ok(StepReport {
            step: self.steps,
            outcome: Outcome::Applied,
            gradient_norm,
            clip_factor,
            orthogonalized,
            unreduced_peak,
        })
    }

    fn between_steps(&self) -> Result<()> {
        self.alive()?;
        let intake = self.inbox.intake();
        match intake.cycle().done {
            0 => Ok(()),
            done => Err(Error::WithinStep {
                rank: intake.channel.rank(),
                done,
            }),
        }
    }

    fn alive(&self) -> Result<()> {
        match &self.ended {
            Some(first) => Err(Error::Poisoned {
                first: Arc::clone(first),
            }),
            None => Ok(()),
        }
    }

    /// Remembers a fatal error.
    fn guard<T>(&mut self, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            if error.is_fatal() {
                self.end(error)
            } else {
                error
            }
        })
    }

    /// Ends the optimizer with an error.
    fn end(&mut self, error: Error) -> Error {
        let first = self.ended.get_or_insert_with(|| Arc::new(error.clone()));
        if error.is_fatal() {
            error
        } else {
            Error::Poisoned {
                first: Arc::clone(first),
            }
        }
    }
}

fn differentiate(loss: &Tensor, rank: Rank) -> Result<()> {
    match catch_unwind(AssertUnwindSafe(|| loss.backward())) {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(Error::Backward {
            rank,
            source: Arc::new(error),
        }),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(ToString::to_string);
            let message = text
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            Err(Error::BackwardPanic { rank, message })
        }
    }
}

/// The one device of all weights.
fn device_of(weights: &[Weight], config: &Config) -> Result<Device> {
    let first = weights
        .first()
        .ok_or(Error::NoParameters)?
        .values()
        .device();
    for weight in weights {
        let (expected, found) = (first.location(), weight.values().device().location());
        if expected != found {
            return Err(Error::MixedDevices {
                name: weight.name.clone(),
                expected,
                found,
            });
        }
    }
    match config.optimizer_device {
        Some(optimizer) if optimizer != first.location() => Err(Error::Offload {
            weights: first.location(),
            optimizer,
        }),
        _ => Ok(first.clone()),
    }
}

fn routing(weights: &[Weight], config: &Config) -> Result<RoutingTable> {
    let shapes: Vec<_> = weights
        .iter()
        .map(|weight| (weight.name.clone(), weight.shape.clone()))
        .collect();
    Ok(config.rules.route(&shapes)?)
}

fn parameters(weights: &[Weight], routing: &RoutingTable, config: &Config) -> Result<Params> {
    let params = weights
        .iter()
        .zip(routing.entries())
        .map(|(weight, routed)| {
            let unsupported = || Error::UnsupportedDtype {
                name: weight.name.clone(),
                dtype: weight.dtype,
            };
            let matrices = match &routed.decision {
                Routed::AdamW => Vec::new(),
                Routed::Muon(shapes) => shapes
                    .iter()
                    .map(|shape| Matrix {
                        span: polarshard_partition::Span::of_len(
                            shape.offset,
                            shape.rows * shape.cols,
                        ),
                        rows: shape.rows,
                        cols: shape.cols,
                        cost: config.muon.newton_schulz.flops(shape.rows, shape.cols),
                    })
                    .collect(),
            };
            let wire = dtypes::wire(weight.dtype).ok_or_else(unsupported)?;
            let shape = weight.shape.iter().copied().collect();
            Ok(Param {
                name: weight.name.clone(),
                shape,
                wire,
                matrices,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(Params::new(params)?)
}

fn broadcast(channel: &mut Channel, weights: &[Weight], root: Rank) -> Result<()> {
    for weight in weights.iter().filter(|weight| weight.elems() > 0) {
        let staging = weight.values().copy()?;
        let values = channel
            .start(Request::broadcast(Class::Weight, &staging, root))?
            .wait()?;
        weight.write(0, &values)?;
    }
    Ok(())
}

fn terms(params: &Params, world: WorldSize, config: &Config) -> Terms {
    Terms {
        stage: config.stage,
        accumulate: config.accumulate,
        gradient_wire: config.gradient_wire.and_then(dtypes::wire),
        result_wire: dtypes::wire(config.muon.newton_schulz.iterate).unwrap_or(Wire::F32),
        control_elems: Census::len(params.matrices().count(), params.len(), world.get()),
    }
}

/// What this rank says at the boundary.
fn census(intake: &Intake, shard: &Shard, config: &Config, steps: u64) -> Result<Census> {
    let (cycle, params) = (intake.cycle(), shard.plan().params());
    let mut census = Census {
        sum_of_squares: 0.0,
        non_finite: 0,
        weight: cycle.weight,
        non_zero: vec![false; params.matrices().count()],
        present: cycle.present.clone(),
        state: None,
    };
    if intake.has_failed() {
        return Ok(census);
    }
    for slice in &shard.owned {
        let gradient = intake
            .reduced
            .slice(slice.param, slice.span, slice.block, slice.at)?;
        let survey = polarshard_muon::survey(&gradient)?;
        census.sum_of_squares += survey.sum_of_squares / intake.prescale(slice.param).powi(2);
        census.non_finite += survey.non_finite;
        if let Some(matrix) = slice.matrix {
            census.non_zero[matrix.index()] |= survey.non_zero;
        }
    }
    let hyper_parameters =
        agreement::hyper_parameters(&config.muon, &config.adamw, config.clip, config.loss_scale);
    let state = DigestWriter::new()
        .u64(steps)
        .u64(cycle.done as u64)
        .u64(hyper_parameters.0)
        .u64(intake.channel.issued());
    census.state = Some(state.finish().0);
    Ok(census)
}

/// The global norm of the mean gradient, and what clips it.
fn norm(verdict: &Verdict, config: &Config) -> (f64, f64) {
    let norm = verdict.sum_of_squares.sqrt() / (verdict.weight * config.loss_scale);
    match config.clip {
        Some(most) if norm > most => (norm, most / norm),
        _ => (norm, 1.0),
    }
}
