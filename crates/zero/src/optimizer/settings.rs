//! What an optimizer is set to, and what it tells of itself.

use polarshard_muon::{AdamWConfig, MuonConfig, RoutingTable};
use polarshard_partition::{Plan, Rank, Terms, WorldSize};

use super::{Rates, ZeroOptimizer};
use crate::config::{hyper_parameters, positive};
use crate::error::Result;
use crate::report::MemoryUse;
use crate::setup;

impl ZeroOptimizer {
    /// The learning rate of the group `muon`.
    pub fn learning_rate(&self) -> f64 {
        self.config.muon.lr
    }

    /// Sets the learning rate of the group `muon`; that of `adamw` keeps its ratio to it.
    ///
    /// # Errors
    /// A rate out of its range in either group; nothing is set then.
    pub fn set_learning_rate(&mut self, lr: f64) -> Result<()> {
        let (mut muon, mut adamw) = (self.config.muon.clone(), self.config.adamw);
        muon.lr = lr;
        // By the rates as configured: they come back exactly, and a rate does not depend on those before it.
        adamw.lr = self.rates.adamw * (lr / self.rates.muon);
        self.replace(muon, adamw)
    }

    /// The hyper-parameters of both groups.
    pub fn hyper_parameters(&self) -> (&MuonConfig, &AdamWConfig) {
        (&self.config.muon, &self.config.adamw)
    }

    /// Replaces the hyper-parameters of both groups.
    ///
    /// # Errors
    /// A value out of its range, and [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a rate of zero for `muon`, to which there is no ratio;
    /// nothing is replaced then.
    pub fn set_hyper_parameters(&mut self, muon: MuonConfig, adamw: AdamWConfig) -> Result<()> {
        positive("muon.lr", muon.lr)?;
        let rates = Rates {
            muon: muon.lr,
            adamw: adamw.lr,
        };
        self.replace(muon, adamw)?;
        self.rates = rates;
        Ok(())
    }

    fn replace(&mut self, muon: MuonConfig, adamw: AdamWConfig) -> Result<()> {
        hyper_parameters(&muon, &adamw, self.weights[0].values().device())?;
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
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) for a scale that is not positive and finite as f32, and
    /// [`Error::WithinStep`](crate::Error::WithinStep): the gradients of a step are divided by one scale.
    pub fn set_loss_scale(&mut self, scale: f64) -> Result<()> {
        positive("loss_scale", scale)?;
        self.between_steps()?;
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

    /// What a prediction of this optimizer's steps depends on beside its plan.
    pub fn terms(&self) -> Terms {
        setup::terms(
            self.plan.params(),
            self.plan.layout().world(),
            &self.config,
            self.stepper.shard.device(),
        )
    }

    /// Bytes that this rank keeps from step to step, counted from the tensors.
    pub fn memory(&self) -> MemoryUse {
        let reduced = self.inbox.intake().reduced.bytes();
        self.stepper.shard.memory(reduced)
    }
}
