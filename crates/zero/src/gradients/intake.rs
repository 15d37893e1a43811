//! The gradients of a step, from the backward pass to the sums that a rank keeps.
//!
//! A gradient is checked and written to its place in its bucket as it comes. Buckets are reduced in their fixed
//! order: bucket k once it is full and bucket k-1 has been issued, whatever the order of arrival, so that all ranks
//! issue the same collectives. While one is reduced, the next one fills; the one before it is collected by then.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use polarshard_comm::{Op, Pending, Request};
use polarshard_partition::{Class, ParamId, Piece, Plan, Rank, Reduction, Span, Stage};

use super::buffers::{Buffer, Buffers};
use super::cycle::Cycle;
use super::held::Held;
use super::lane::{Home, Lane, homes, lanes};
use super::reduced::Reduced;
use crate::channel::Channel;
use crate::config::is_usable;
use crate::dtypes;
use crate::error::{Error, Result};
use crate::flat;
use crate::setup::Setup;
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
    /// The bucket that is issued next.
    next: usize,
    in_flight: Option<InFlight>,
    cycle: Cycle,
}

/// Where a bucket is in the micro-batch.
#[derive(Debug)]
enum Slot {
    Empty,
    Filling { buffer: Buffer, arrived: usize },
    Issued,
}

/// The reduction under way.
#[derive(Debug)]
struct InFlight {
    bucket: usize,
    buffer: Buffer,
    pending: Pending,
}

impl Intake {
    pub(crate) fn new(channel: Channel, setup: &Setup, weights: Arc<Vec<Weight>>) -> Result<Self> {
        let (plan, config) = (Arc::clone(&setup.plan), &setup.config);
        let lanes = lanes(&plan, config.gradient_wire.and_then(dtypes::wire));
        let uses = lanes.iter().map(|lane| (lane.space, lane.wire, lane.len));
        Ok(Self {
            reduced: Reduced::new(&plan, channel.rank(), &setup.device)?,
            held: Held::new(bound(&lanes, &weights)),
            stage: config.stage,
            accumulate: config.accumulate.get(),
            overlap: config.overlap,
            homes: homes(&plan).into(),
            locals: vec![None; lanes.len()],
            buffers: Buffers::new(setup.device.clone(), uses),
            slots: lanes.iter().map(|_| Slot::Empty).collect(),
            next: 0,
            in_flight: None,
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
        self.slots.iter_mut().for_each(|slot| *slot = Slot::Empty);
    }

    /// Takes a parameter's complete gradient of this micro-batch. An error is remembered: what comes after it is
    /// ignored, and the step's micro-batches will be dropped on all ranks.
    pub(crate) fn accept(&mut self, param: ParamId, gradient: &Tensor) -> Result<()> {
        if self.cycle.has_failed() {
            return Ok(());
        }
        self.check(param, gradient)
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
            && let Some(missing) = self.missing()
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
        if let Some(missing) = self.missing() {
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

    fn missing(&self) -> Option<Error> {
        let names: Vec<_> = self
            .weights
            .iter()
            .zip(&self.cycle.present)
            .filter(|(weight, present)| !weight.optional && !**present && weight.elems() > 0)
            .map(|(weight, _)| weight.name.clone())
            .collect();
        (!names.is_empty()).then(|| Error::MissingGradient {
            rank: self.rank(),
            names,
        })
    }

    fn check(&self, param: ParamId, gradient: &Tensor) -> Result<()> {
        let weight = &self.weights[param.index()];
        let (rank, name) = (self.rank(), weight.name.clone());
        if self.cycle.arrived[param.index()] {
            return Err(Error::RepeatedGradient { rank, name });
        }
        if gradient.dims() != weight.shape {
            let found = gradient.dims().to_vec();
            return Err(Error::GradientShape {
                rank,
                name,
                expected: weight.shape.clone(),
                found,
            });
        }
        if gradient.dtype() != weight.dtype {
            return Err(Error::GradientDtype {
                rank,
                name,
                expected: weight.dtype,
                found: gradient.dtype(),
            });
        }
        let (expected, found) = (
            weight.values().device().location(),
            gradient.device().location(),
        );
        if expected != found {
            return Err(Error::GradientDevice {
                rank,
                name,
                expected,
                found,
            });
        }
        Ok(())
    }

    fn place(&mut self, param: ParamId, gradient: &Tensor) -> Result<()> {
        self.cycle.arrive(param.index());
        let homes = Arc::clone(&self.homes);
        let Some(home) = &homes[param.index()] else {
            return Ok(());
        };
        let gradient = flat::one_dimensional(gradient)?;
        let bytes = gradient.elem_count() * gradient.dtype().size_in_bytes();
        self.held.add(bytes);
        let placed = self.place_at(home, &gradient);
        self.held.remove(bytes);
        placed?;
        self.issue_full()
    }

    fn place_at(&mut self, home: &Home, gradient: &Tensor) -> Result<()> {
        let to_wire = self.fills_wire();
        for piece in &home.pieces {
            let values = flat::view(gradient, piece.span)?;
            if to_wire {
                self.write(home.bucket, piece.at, &values)?;
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

    /// Writes values to a bucket's wire buffer, on top of the sums of earlier micro-batches.
    fn write(&mut self, bucket: usize, at: usize, values: &Tensor) -> Result<()> {
        let current = self.cycle.current;
        self.open(bucket)?;
        let lane = &self.lanes[bucket];
        let Slot::Filling { buffer, .. } = &self.slots[bucket] else {
            unreachable!("the bucket was just opened")
        };
        let values = match &self.locals[bucket] {
            None => flat::scaled(values, current * lane.prescale)?,
            Some(local) => {
                flat::add(local, at, values, current)?;
                let sums = flat::view(local, Span::of_len(at, values.elem_count()))?;
                flat::scaled(&sums, lane.prescale)?
            }
        };
        Ok(flat::write(&buffer.used, at, &values)?)
    }

    fn local(&mut self, bucket: usize) -> Result<&Tensor> {
        let (len, device) = (self.lanes[bucket].len, self.weights[0].values().device());
        let local = &mut self.locals[bucket];
        if local.is_none() {
            *local = Some(flat::zeros(len, DType::F32, device)?);
        }
        Ok(local.as_ref().expect("it was just made"))
    }

    /// Gives a bucket a buffer, unless it has one. Its padding is zeroed here and not where it is issued, which must not
    /// fail half-way: a bucket that could not be opened is opened again.
    fn open(&mut self, bucket: usize) -> Result<()> {
        if matches!(self.slots[bucket], Slot::Empty) {
            let lane = &self.lanes[bucket];
            let buffer = self.buffers.take(lane.space, lane.len)?;
            let mut padding = lane.padding.iter();
            if let Err(error) = padding.try_for_each(|gap| flat::zero(&buffer.used, *gap)) {
                self.buffers.give_back(buffer);
                return Err(error.into());
            }
            self.held.add(buffer.bytes());
            self.slots[bucket] = Slot::Filling { buffer, arrived: 0 };
        }
        Ok(())
    }

    fn issue_full(&mut self) -> Result<()> {
        while let Some(Slot::Filling { arrived, .. }) = self.slots.get(self.next)
            && *arrived == self.lanes[self.next].parameters
        {
            self.issue()?;
        }
        Ok(())
    }

    /// Starts the reduction of the next bucket. The one before it is collected meanwhile.
    fn issue(&mut self) -> Result<()> {
        let bucket = self.next;
        let Slot::Filling { buffer, .. } = std::mem::replace(&mut self.slots[bucket], Slot::Issued)
        else {
            unreachable!("only open buckets are issued")
        };
        let ops = self.plan.buckets()[bucket]
            .ops
            .iter()
            .map(operation)
            .collect();
        let pending =
            self.channel
                .start(Request::new(Class::Gradient, buffer.used.clone(), ops))?;
        let before = self.in_flight.replace(InFlight {
            bucket,
            buffer,
            pending,
        });
        self.next += 1;
        self.collect(before)?;
        if self.overlap {
            Ok(())
        } else {
            self.collect_last()
        }
    }

    fn collect_last(&mut self) -> Result<()> {
        let last = self.in_flight.take();
        self.collect(last)
    }

    /// Waits for a reduction and adds what this rank keeps of it.
    fn collect(&mut self, reduction: Option<InFlight>) -> Result<()> {
        let Some(InFlight {
            bucket,
            buffer,
            pending,
        }) = reduction
        else {
            return Ok(());
        };
        let waited = pending.wait();
        self.held.remove(buffer.bytes());
        // A buffer that was not waited for may still be written: it is not used again.
        waited?;
        let folded = self.reduced.fold(bucket, &buffer.used);
        self.buffers.give_back(buffer);
        folded
    }

    /// Reduces all buckets that have not been reduced in this micro-batch; what did not come is zero. An error ends the
    /// optimizer: this rank is behind the others by the buckets that are left.
    fn flush(&mut self) -> Result<()> {
        self.flush_all().map_err(Error::ending)
    }

    fn flush_all(&mut self) -> Result<()> {
        while self.next < self.lanes.len() {
            self.open(self.next)?;
            for index in 0..self.plan.buckets()[self.next].pieces.len() {
                let piece = self.plan.buckets()[self.next].pieces[index];
                if !self.cycle.arrived[piece.param.index()] {
                    self.write_absent(self.next, piece)?;
                }
            }
            self.issue()?;
        }
        self.collect_last()
    }

    fn write_absent(&mut self, bucket: usize, piece: Piece) -> Result<()> {
        let zeros = flat::zeros(
            piece.span.len(),
            DType::F32,
            self.weights[0].values().device(),
        )?;
        self.write(bucket, piece.at, &zeros)
    }
}

/// One open bucket a flat space, one in flight, and one gradient, in bytes.
fn bound(lanes: &[Lane], weights: &[Weight]) -> usize {
    let mut longest = BTreeMap::new();
    for lane in lanes {
        let bytes = lane.len * lane.wire.bytes();
        let known = longest.entry(lane.space).or_insert(bytes);
        *known = bytes.max(*known);
    }
    let gradients = weights
        .iter()
        .map(|weight| weight.elems() * weight.dtype.size_in_bytes());
    let in_flight = longest.values().max().copied().unwrap_or_default();
    longest.values().sum::<usize>() + in_flight + gradients.max().unwrap_or_default()
}

fn operation(reduction: &Reduction) -> Op {
    match *reduction {
        Reduction::AllReduce(span) => Op::AllReduce(span),
        Reduction::Reduce { span, root } => Op::Reduce { span, root },
        Reduction::ReduceScatter(span) => Op::ReduceScatter(span),
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::time::Duration;

    use candle_core::Device;
    use polarshard_comm::Loopback;
    use polarshard_partition::WorldSize;

    use super::*;
    use crate::config::Config;

    /// Of two vectors so long, each a bucket with an element of padding, on one rank.
    fn intake(len: usize) -> Result<Intake> {
        let comm = Loopback::world(WorldSize::new(1)?, Duration::from_secs(10)).swap_remove(0);
        let vector = |name: &str| {
            let values = Tensor::ones(len, DType::F32, &Device::Cpu)?;
            Weight::new(name.to_owned(), &values, false)
        };
        let weights = Arc::new(vec![vector("a")?, vector("b")?]);
        let config = Config {
            bucket_size: NonZeroUsize::MIN,
            ..Config::default()
        };
        let mut channel = Channel::new(Box::new(comm));
        let setup = Setup::new(&mut channel, &weights, config)?;
        Intake::new(channel, &setup, weights)
    }

    /// Hands in gradients in plan order, until one is refused.
    fn hand_in(intake: &mut Intake) -> Result<()> {
        let gradient = intake.weights[0].values().ones_like()?;
        let mut params = intake.plan.clone().params().plan_order();
        params.try_for_each(|param| intake.accept(param, &gradient))
    }

    /// The micro-batch ends with `refused`, all its buckets are reduced, and nothing is left behind.
    fn ends(intake: &mut Intake, refused: &Error, issued_before: u64) -> Result<()> {
        let ended = intake.end().expect_err("a gradient was refused");
        assert_eq!(ended.to_string(), refused.to_string());
        assert!(!ended.is_fatal(), "{ended:?}");
        let buckets = intake.lanes.len() as u64;
        assert_eq!(intake.channel.issued() - issued_before, buckets);
        intake.clear();
        assert_eq!(intake.held.peak(), 0, "bytes held after the micro-batch");
        // Each bucket is filled while the one before it is reduced.
        assert_eq!(intake.buffers.free_bytes(), 2 * 4 * size_of::<f32>());
        intake.begin(1.0)?;
        hand_in(intake)?;
        intake.end()
    }

    #[test]
    fn padding_that_cannot_be_zeroed_costs_the_micro_batch_alone() -> Result<()> {
        for bucket in 0..2 {
            let mut intake = intake(3)?;
            let before = intake.channel.issued();
            intake.begin(1.0)?;
            let beyond = vec![Span::new(3, 4), Span::new(4, 5)];
            let padding = std::mem::replace(&mut intake.lanes[bucket].padding, beyond);
            let refused = hand_in(&mut intake).expect_err("the span is beyond the buffer");
            intake.lanes[bucket].padding = padding;
            ends(&mut intake, &refused, before)?;
        }
        Ok(())
    }

    #[test]
    fn a_sum_that_cannot_be_kept_costs_the_micro_batch_alone() -> Result<()> {
        let (mut intake, mut longer) = (intake(3)?, intake(9)?);
        let before = intake.channel.issued();
        intake.begin(1.0)?;
        std::mem::swap(&mut intake.reduced, &mut longer.reduced);
        let refused = hand_in(&mut intake).expect_err("the buffer is too short for it");
        std::mem::swap(&mut intake.reduced, &mut longer.reduced);
        ends(&mut intake, &refused, before)
    }
}
