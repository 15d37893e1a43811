//! The gradients of a step, from the backward pass to the sums that a rank keeps.
//!
//! A gradient is checked as it comes, and written to its place in its bucket: at once, or together with its bucket's where
//! all are handed in together.

mod check;
#[cfg(test)]
mod tests;
mod wire;

use std::sync::Arc;

use candle_core::{DType, Tensor};
use polarshard_partition::{ParamId, Plan, Rank, Stage};

use self::wire::{Arriving, Reducing, Slot};
use super::buffers::Buffers;
use super::cycle::Cycle;
use super::held::{self, Held};
use super::lane::{Home, Lane, homes, lanes};
use super::reduced::Reduced;
use crate::channel::Channel;
use crate::config::is_usable;
use crate::error::{Error, Result};
use crate::flat;
use crate::setup::{Setup, terms};
use crate::weights::Weight;

/// Takes in the gradients of one step.
#[derive(Debug)]
pub(crate) struct Intake {
    pub(crate) channel: Channel,
    pub(crate) reduced: Reduced,
    pub(crate) held: Held,
    plan: Arc<Plan>,
    weights: Arc<Vec<Weight>>,
    stage: Stage,
    /// Micro-batches in a step.
    accumulate: usize,
    overlap: bool,
    /// By bucket.
    lanes: Vec<Lane>,
    /// By parameter; an empty one has none.
    homes: Arc<[Option<Home>]>,
    /// By bucket: sums of the micro-batches before the last, where they are not reduced (stage 1).
    locals: Vec<Option<Tensor>>,
    buffers: Buffers,
    /// By bucket.
    slots: Vec<Slot>,
    /// Gradients on their way into open buckets.
    arriving: Vec<Arriving>,
    /// The bucket that is issued next.
    next: usize,
    reducing: Option<Reducing>,
    cycle: Cycle,
}

impl Intake {
    pub(crate) fn new(channel: Channel, setup: &Setup, weights: Arc<Vec<Weight>>) -> Result<Self> {
        let (plan, config) = (Arc::clone(&setup.plan), &setup.config);
        let terms = terms(plan.params(), channel.world(), config, &setup.device);
        let lanes = lanes(&plan, terms.gradient_wire);
        let uses = lanes.iter().map(|lane| (lane.space, lane.wire, lane.len));
        Ok(Self {
            reduced: Reduced::new(&plan, channel.rank(), &terms, &setup.device)?,
            held: Held::new(held::bound(&lanes, &weights)),
            stage: config.stage,
            accumulate: config.accumulate.get(),
            overlap: config.overlap,
            homes: homes(&plan).into(),
            locals: vec![None; lanes.len()],
            buffers: Buffers::new(setup.device.clone(), uses),
            slots: lanes.iter().map(|_| Slot::Empty).collect(),
            arriving: Vec::new(),
            next: 0,
            reducing: None,
            cycle: Cycle::new(weights.len()),
            channel,
            plan,
            weights,
            lanes,
        })
    }

    pub(crate) fn cycle(&self) -> &Cycle {
        &self.cycle
    }

    /// Whether all micro-batches of the step are complete.
    pub(crate) fn at_boundary(&self) -> bool {
        self.cycle.done == self.accumulate
    }

    /// The power of two with which a parameter's gradients were multiplied on the wire.
    pub(crate) fn prescale(&self, param: ParamId) -> f64 {
        self.homes[param.index()]
            .as_ref()
            .map_or(1.0, |home| self.lanes[home.bucket].prescale)
    }

    /// Begins a micro-batch.
    pub(crate) fn begin(&mut self, weight: f64) -> Result<()> {
        let rank = self.rank();
        if self.at_boundary() {
            return Err(Error::StepDue {
                rank,
                accumulate: self.accumulate,
            });
        }
        self.restart();
        let usable = is_usable(weight);
        self.cycle.begin(if usable { weight } else { 1.0 });
        if !usable {
            self.fail(&Error::MicroBatchWeight { rank, weight });
        }
        Ok(())
    }

    fn restart(&mut self) {
        self.next = 0;
        self.arriving.clear();
        self.slots.iter_mut().for_each(|slot| *slot = Slot::Empty);
    }

    /// Takes a parameter's complete gradient of this micro-batch. An error is remembered: what comes after it is
    /// ignored, and the step's micro-batches will be dropped on all ranks.
    pub(crate) fn accept(&mut self, param: ParamId, gradient: &Tensor) -> Result<()> {
        self.accept_lent(param, gradient)?;
        self.settle().inspect_err(|error| self.fail(error))
    }

    /// The same for a gradient that its owner keeps until the micro-batch ends: a bucket's are written together.
    pub(crate) fn accept_lent(&mut self, param: ParamId, gradient: &Tensor) -> Result<()> {
        if self.cycle.has_failed() {
            return Ok(());
        }
        self.check_gradient(param, gradient)
            .and_then(|()| self.place(param, gradient))
            .inspect_err(|error| self.fail(error))
    }

    /// Remembers an error of this micro-batch.
    pub(crate) fn fail(&mut self, error: &Error) {
        self.cycle.fail(error);
    }

    /// Ends a micro-batch: buckets that are still open are reduced, what did not come as zeros.
    ///
    /// # Errors
    /// The first error of this micro-batch; the micro-batch is complete even so.
    pub(crate) fn end(&mut self) -> Result<()> {
        if self.cycle.done + 1 == self.accumulate
            && let Err(missing) = self.check_complete()
        {
            self.fail(&missing);
        }
        // After a collective that failed there is nobody to reduce with.
        let flushed = if self.fills_wire() && !self.cycle.has_ended() {
            self.flush()
        } else {
            Ok(())
        };
        let ended = self.cycle.end();
        flushed.and(ended)
    }

    /// Makes the micro-batches so far a whole step.
    ///
    /// # Errors
    /// Those of a collective.
    pub(crate) fn close_early(&mut self) -> Result<()> {
        if self.at_boundary() {
            return Ok(());
        }
        if let Err(missing) = self.check_complete() {
            self.fail(&missing);
        }
        if self.stage == Stage::One {
            self.restart();
            self.cycle.arrived.fill(false);
            self.flush()?;
        }
        // The count stays what it is: ranks that differ in it find out at the boundary.
        Ok(())
    }

    /// Forgets the step's gradients.
    pub(crate) fn clear(&mut self) {
        self.reduced.clear();
        self.locals.fill(None);
        self.cycle = Cycle::new(self.weights.len());
        self.held.reset();
    }

    fn rank(&self) -> Rank {
        self.channel.rank()
    }

    /// Whether gradients of the micro-batch under way go to the wire.
    fn fills_wire(&self) -> bool {
        self.stage == Stage::Two || self.cycle.done + 1 == self.accumulate
    }

    fn place(&mut self, param: ParamId, gradient: &Tensor) -> Result<()> {
        self.cycle.arrive(param.index());
        let homes = Arc::clone(&self.homes);
        let Some(home) = &homes[param.index()] else {
            return Ok(());
        };
        let lent = flat::address(gradient);
        let gradient = flat::one_dimensional(gradient)?;
        let bytes = flat::bytes(&gradient);
        self.held.add(bytes);
        let before = self.arriving.len();
        let placed = self.place_at(home, &gradient).and_then(|()| {
            let arrived = &self.arriving[before..];
            if arrived.iter().all(|one| flat::address(&one.values) == lent) {
                Ok(())
            } else {
                // A copy of ours goes before the next one comes.
                self.settle()
            }
        });
        self.held.remove(bytes);
        placed?;
        self.issue_full()
    }

    fn place_at(&mut self, home: &Home, gradient: &Tensor) -> Result<()> {
        let to_wire = self.fills_wire();
        for piece in &home.pieces {
            let values = flat::view(gradient, piece.span)?;
            if to_wire {
                self.bring(home.bucket, piece.at, &values)?;
            } else {
                let factor = self.cycle.current;
                flat::add(self.local(home.bucket)?, piece.at, &values, factor)?;
            }
        }
        if let Slot::Filling { arrived, .. } = &mut self.slots[home.bucket] {
            *arrived += 1;
        }
        Ok(())
    }

    fn local(&mut self, bucket: usize) -> Result<&Tensor> {
        let (len, device) = (self.lanes[bucket].len, self.weights[0].values().device());
        let local = &mut self.locals[bucket];
        if local.is_none() {
            *local = Some(flat::zeros(len, DType::F32, device)?);
        }
        Ok(local.as_ref().expect("it was just made"))
    }
}
