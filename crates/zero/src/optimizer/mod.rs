//! The optimizer: micro-batches in, steps out.

mod make;
mod settings;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use polarshard_comm::Pause;
use polarshard_comm::ranks::panic_message;
use polarshard_muon::RoutingTable;
use polarshard_partition::{Plan, Rank};

use crate::checkpoint;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::flat;
use crate::gradients::Inbox;
use crate::replicas;
use crate::report::StepReport;
use crate::step::Stepper;
use crate::store::StaleCheck;
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
    stepper: Stepper,
    config: Config,
    rates: Rates,
    steps: u64,
    ended: Option<Arc<Error>>,
}

/// The learning rates that were set last by themselves, whose ratio schedules keep.
#[derive(Debug, Clone, Copy)]
struct Rates {
    muon: f64,
    adamw: f64,
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
    /// Differentiates the mean loss of one micro-batch and reduces its gradients (stage 2: now; stage 1: with the last
    /// micro-batch of the step), while the pass goes on if the settings say so.
    ///
    /// # Errors
    /// A gradient that is missing, comes twice or does not fit, a loss of several elements, a failed backward pass;
    /// [`Error::Stale`] in the second step, for what the model computed from a weight in the first one and goes on using.
    /// The micro-batch counts even so: this rank goes on, and [`step`](Self::step) drops the step's micro-batches on all
    /// ranks. [`Error::StepDue`] after the last micro-batch, which does not count.
    ///
    /// A loss that was computed before the last step is not found out: its gradients are of neither set of weights.
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
        let passed = one_element(loss, rank).and_then(|()| {
            stale.check(loss, self.steps)?;
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
                && intake.accept_lent(param, gradient).is_err()
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
    /// On a device the host does not wait for what the step does after its decision: device work that reads the weights
    /// comes after it by itself. Such a step is complete, and its errors are known, when the next `step`,
    /// [`verify_replicas`](Self::verify_replicas), [`save`](Self::save), [`load`](Self::load) or
    /// [`shutdown`](Self::shutdown) has succeeded; a `backward` that succeeds says nothing of it. If another rank dies
    /// before its part of the step is done, `step` may have returned [`Outcome::Applied`](crate::Outcome::Applied) on
    /// this one: its weights are unspecified then, and each of those calls fails.
    ///
    /// # Errors
    /// [`Error::StepTooEarly`]; [`Error::Dropped`], [`Error::Drifted`] and [`Error::MeanOutOfRange`], after which training
    /// can go on with the next step; errors of a collective, of the step before too, which are fatal.
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
        self.boundary()
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
        self.boundary()
    }

    /// Compares the bits of all weights over ranks. A collective: all ranks call it.
    ///
    /// # Errors
    /// [`Error::ReplicasDiffer`]; [`Error::OtherOrder`] if another rank is comparing another optimizer of this world.
    pub fn verify_replicas(&mut self) -> Result<()> {
        self.alive()?;
        let verified = replicas::verify(&mut self.inbox.intake().channel, &self.weights);
        self.guard(verified)
    }

    /// Saves masters, momentum, moments and step counts to a folder that all ranks see. A collective: all ranks call it
    /// with the same folder, between steps. A checkpoint in the folder is replaced when the new one is whole; a state that is
    /// not finite replaces none. Of files named `N-step-S-rank-R.safetensors` those with a lower N are removed then: the earlier
    /// checkpoint's, and what an interrupted save has left. A folder belongs to one run at a time.
    ///
    /// Frozen tensors and buffers belong to the model and are not saved.
    ///
    /// # Errors
    /// [`Error::WithinStep`], [`Error::Checkpoint`] naming the file on the rank that met it, on rank 0 where ranks were
    /// given different folders, and [`Error::CheckpointFailed`] on the others: the earlier checkpoint is whole.
    pub fn save(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        self.between_steps()?;
        let saved = checkpoint::save(
            &mut self.inbox.intake().channel,
            &self.stepper.shard,
            self.steps,
            folder.as_ref(),
        );
        self.guard(saved)
    }

    /// Loads what [`save`](Self::save) wrote, at any world size, stage, placement, route and policy, into the same
    /// parameters by name. A collective. Training goes on bit for bit where all of these are the same.
    ///
    /// # Errors
    /// [`Error::WithinStep`]; [`Error::NotInCheckpoint`], [`Error::NotInModel`], [`Error::CheckpointShape`],
    /// [`Error::CheckpointGroup`] and [`Error::Checkpoint`], naming the parameter or file, and [`Error::CheckpointFailed`]
    /// on the other ranks; [`Error::OtherCheckpoint`] where ranks found different ones, as in different folders that are no copies: nothing
    /// has changed then, on any rank.
    pub fn load(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        self.between_steps()?;
        let shard = &mut self.stepper.shard;
        let loaded = checkpoint::load(&mut self.inbox.intake().channel, shard, folder.as_ref());
        let loaded = self.guard(loaded)?;
        let step = loaded.step;
        let published = loaded
            .put_in(&mut self.stepper.shard)
            .and_then(|()| self.stepper.publish(&mut self.inbox.intake().channel))
            .map_err(Error::ending);
        self.guard(published)?;
        self.steps = step;
        Ok(())
    }

    /// Pauses the deadline of collectives on all ranks, for long work of this rank alone (evaluation, writing files of its
    /// own), until the guard is dropped.
    pub fn pause(&self) -> Pause {
        self.inbox.intake().channel.comm().pause()
    }

    /// Ends the optimizer, and its communicator together with all ranks.
    ///
    /// # Errors
    /// If a rank does not come within the deadline, or has failed.
    ///
    /// # Panics
    /// If another thread is in a backward pass through this optimizer's weights.
    pub fn shutdown(self) -> Result<()> {
        match Arc::into_inner(self.inbox) {
            Some(inbox) => inbox.into_intake().channel.shutdown(),
            None => unreachable!("hooks hold the inbox during a backward pass only"),
        }
    }

    fn boundary(&mut self) -> Result<StepReport> {
        let stepped = self
            .stepper
            .step(&mut self.inbox.intake(), &self.config, self.steps);
        let report = self.guard(stepped)?;
        self.steps = report.step;
        Ok(report)
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

    /// Remembers an error that ends the optimizer.
    fn guard<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result
            && error.is_fatal()
        {
            self.ended.get_or_insert_with(|| match error {
                Error::Poisoned { first } => Arc::clone(first),
                error => Arc::new(error.clone()),
            });
        }
        result
    }
}

fn one_element(loss: &Tensor, rank: Rank) -> Result<()> {
    match loss.elem_count() {
        1 => Ok(()),
        _ => Err(Error::LossShape {
            rank,
            shape: loss.dims().to_vec(),
        }),
    }
}

fn differentiate(loss: &Tensor, rank: Rank) -> Result<()> {
    match catch_unwind(AssertUnwindSafe(|| loss.backward())) {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(Error::Backward {
            rank,
            source: Arc::new(error),
        }),
        Err(panic) => Err(Error::BackwardPanic {
            rank,
            message: panic_message(&*panic),
        }),
    }
}
