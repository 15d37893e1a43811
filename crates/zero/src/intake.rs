//! The gradients of a step, from the backward pass to the sums that a rank keeps.
//!
//! A gradient is checked and written to its place in its bucket as it comes. Buckets are reduced in their fixed
//! order: bucket k once it is full and bucket k-1 has been issued, whatever the order of arrival, so that all ranks
//! issue the same collectives. At most one reduction is in flight.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use polarshard_comm::{Op, Pending, Request};
use polarshard_partition::{
    Class, ParamId, Piece, Plan, Rank, Reduction, Space, Span, Stage, Wire,
};

use crate::buffers::{Buffer, Buffers};
use crate::channel::Channel;
use crate::error::{Error, Result};
use crate::flat;
use crate::held::Held;
use crate::reduced::Reduced;
use crate::weights::Weight;

/// Takes in the gradients of one step.
#[derive(Debug)]
pub(crate) struct Intake {
    pub(crate) channel: Channel,
    pub(crate) reduced: Reduced,
    pub(crate) held: Held,
    plan: Arc<Plan>,
    weights: Arc<Vec<Weight>>,
    terms: Terms,
    /// By bucket.
    lanes: Vec<Lane>,
    /// By parameter; an empty one has none.
    homes: Vec<Option<Home>>,
    buffers: Buffers,
    slots: Vec<Slot>,
    next: usize,
    in_flight: Option<InFlight>,
    cycle: Cycle,
}

/// The settings that gradients meet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) stage: Stage,
    pub(crate) accumulate: usize,
    pub(crate) overlap: bool,
}

/// What is fixed about a bucket.
#[derive(Debug)]
struct Lane {
    space: Space,
    wire: Wire,
    /// The power of two by which an f16 wire is kept from overflowing.
    prescale: f64,
    len: usize,
    parameters: usize,
    /// Elements of the buffer that no parameter writes.
    padding: Vec<Span>,
    /// Sums of the micro-batches before the last, where they are not reduced (stage 1).
    local: Option<Tensor>,
}

/// Where a parameter's gradient goes: its bucket, and its runs in there.
#[derive(Debug)]
struct Home {
    bucket: usize,
    pieces: Vec<Piece>,
}

/// Where a bucket is in the micro-batch.
#[derive(Debug)]
enum Slot {
    Empty,
    Filling { buffer: Buffer, arrived: usize },
    Issued,
}

#[derive(Debug)]
struct InFlight {
    bucket: usize,
    buffer: Buffer,
    pending: Pending,
}

/// How far the step has come.
#[derive(Debug)]
pub(crate) struct Cycle {
    /// Micro-batches complete.
    pub(crate) done: usize,
    /// The sum of their weights.
    pub(crate) weight: f64,
    /// By parameter: whether a gradient came in any micro-batch.
    pub(crate) present: Vec<bool>,
    /// The first error and its micro-batch; everything of this step will be dropped.
    failed: Option<(usize, Error)>,
    /// By parameter: whether a gradient came in this micro-batch.
    arrived: Vec<bool>,
    /// The weight of the micro-batch under way.
    current: f64,
}

impl Cycle {
    fn new(parameters: usize) -> Self {
        Self {
            done: 0,
            weight: 0.0,
            present: vec![false; parameters],
            failed: None,
            arrived: vec![false; parameters],
            current: 1.0,
        }
    }
}

impl Intake {
    pub(crate) fn new(
        channel: Channel,
        plan: Arc<Plan>,
        weights: Arc<Vec<Weight>>,
        gradient_wire: Option<Wire>,
        terms: Terms,
        device: &Device,
    ) -> Result<Self> {
        let world = channel.world().get();
        let lanes: Vec<_> = plan
            .buckets()
            .iter()
            .zip(plan.layout().buckets())
            .map(|(bucket, place)| {
                let space = plan.layout().space(place.space);
                let wire = gradient_wire.unwrap_or(space.wire);
                let parameters = place.params.len();
                let prescale = prescale(wire, world);
                let padding = gaps(bucket.len, &bucket.pieces);
                Lane {
                    space,
                    wire,
                    prescale,
                    len: bucket.len,
                    parameters,
                    padding,
                    local: None,
                }
            })
            .collect();
        let mut homes: Vec<Option<Home>> = weights.iter().map(|_| None).collect();
        for (bucket, plan) in plan.buckets().iter().enumerate() {
            for piece in &plan.pieces {
                let home = homes[piece.param.index()].get_or_insert_with(|| Home {
                    bucket,
                    pieces: Vec::new(),
                });
                home.pieces.push(*piece);
            }
        }
        Ok(Self {
            reduced: Reduced::new(&plan, channel.rank(), device)?,
            held: Held::default(),
            buffers: Buffers::new(
                device.clone(),
                lanes.iter().map(|lane| (lane.space, lane.wire, lane.len)),
            ),
            slots: lanes.iter().map(|_| Slot::Empty).collect(),
            cycle: Cycle::new(weights.len()),
            next: 0,
            in_flight: None,
            channel,
            plan,
            weights,
            terms,
            lanes,
            homes,
        })
    }

    /// Whether an error was met in this step.
    pub(crate) fn has_failed(&self) -> bool {
        self.cycle.failed.is_some()
    }

    pub(crate) fn cycle(&self) -> &Cycle {
        &self.cycle
    }

    /// Whether all micro-batches of the step are complete.
    pub(crate) fn at_boundary(&self) -> bool {
        self.cycle.done == self.terms.accumulate
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
                accumulate: self.terms.accumulate,
            });
        }
        self.cycle.arrived.fill(false);
        self.restart();
        self.cycle.current = weight;
        if !(weight.is_finite() && weight > 0.0) {
            self.cycle.current = 1.0;
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
        if self.cycle.failed.is_some() {
            return Ok(());
        }
        self.check(param, gradient)
            .and_then(|()| self.place(param, gradient))
            .inspect_err(|error| self.fail(error))
    }

    /// Remembers an error of this micro-batch.
    pub(crate) fn fail(&mut self, error: &Error) {
        let micro_batch = self.cycle.done;
        self.cycle
            .failed
            .get_or_insert_with(|| (micro_batch, error.clone()));
    }

    /// Ends a micro-batch: buckets that are still open are reduced, what did not come as zeros.
    ///
    /// # Errors
    /// The first error of this micro-batch; the micro-batch is complete even so.
    pub(crate) fn end(&mut self) -> Result<()> {
        let micro_batch = self.cycle.done;
        if micro_batch + 1 == self.terms.accumulate
            && let Some(missing) = self.missing()
        {
            self.fail(&missing);
        }
        let flushed = if self.fills_wire() {
            self.flush()
        } else {
            Ok(())
        };
        self.cycle.done += 1;
        self.cycle.weight += self.cycle.current;
        flushed?;
        match &self.cycle.failed {
            Some((at, error)) if *at == micro_batch => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Makes the micro-batches so far a whole step.
    ///
    /// # Errors
    /// As of a collective.
    pub(crate) fn close_early(&mut self) -> Result<()> {
        if self.at_boundary() {
            return Ok(());
        }
        if let Some(missing) = self.missing() {
            self.fail(&missing);
        }
        if self.terms.stage == Stage::One {
            self.cycle.arrived.fill(false);
            self.restart();
            self.flush()?;
        }
        self.cycle.done = self.terms.accumulate;
        Ok(())
    }

    /// Forgets the step's gradients.
    pub(crate) fn clear(&mut self) {
        self.reduced.clear();
        for lane in &mut self.lanes {
            lane.local = None;
        }
        self.cycle = Cycle::new(self.weights.len());
        self.held.reset();
    }

    fn rank(&self) -> Rank {
        self.channel.rank()
    }

    /// Whether gradients of the micro-batch under way go to the wire.
    fn fills_wire(&self) -> bool {
        self.terms.stage == Stage::Two || self.cycle.done + 1 == self.terms.accumulate
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
        self.cycle.arrived[param.index()] = true;
        self.cycle.present[param.index()] = true;
        let Some(home) = self.homes[param.index()].take() else {
            return Ok(());
        };
        let bytes = gradient.elem_count() * gradient.dtype().size_in_bytes();
        self.held.add(bytes);
        let placed = self.place_at(&home, &flat::one_dimensional(gradient)?);
        self.held.remove(bytes);
        self.homes[param.index()] = Some(home);
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
                let values = flat::scaled(&values, self.cycle.current)?;
                flat::add(self.local(home.bucket)?, piece.at, &values)?;
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
        let values = match &lane.local {
            None => flat::scaled(values, current * lane.prescale)?,
            Some(local) => {
                let earlier = flat::view(local, Span::of_len(at, values.elem_count()))?;
                {
                    let sum = (flat::scaled(values, current)?.to_dtype(DType::F32)? + earlier)?;
                    flat::scaled(&sum, lane.prescale)?
                }
            }
        };
        Ok(flat::write(&buffer.used, at, &values)?)
    }

    fn local(&mut self, bucket: usize) -> Result<&Tensor> {
        let lane = &mut self.lanes[bucket];
        if lane.local.is_none() {
            lane.local = Some(Tensor::zeros(
                lane.len,
                DType::F32,
                self.weights[0].values().device(),
            )?);
        }
        Ok(lane.local.as_ref().expect("it was just made"))
    }

    fn open(&mut self, bucket: usize) -> Result<()> {
        if matches!(self.slots[bucket], Slot::Empty) {
            let lane = &self.lanes[bucket];
            let buffer = self.buffers.take(lane.space, lane.len)?;
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

    /// Starts the reduction of the next bucket, after the one before it has arrived.
    fn issue(&mut self) -> Result<()> {
        let bucket = self.next;
        self.collect()?;
        let Slot::Filling { buffer, .. } = std::mem::replace(&mut self.slots[bucket], Slot::Issued)
        else {
            unreachable!("only open buckets are issued")
        };
        for gap in &self.lanes[bucket].padding {
            flat::zero(&buffer.used, *gap)?;
        }
        let ops = self.plan.buckets()[bucket]
            .ops
            .iter()
            .map(operation)
            .collect();
        let pending =
            self.channel
                .start(Request::new(Class::Gradient, buffer.used.clone(), ops))?;
        self.in_flight = Some(InFlight {
            bucket,
            buffer,
            pending,
        });
        self.next += 1;
        if self.terms.overlap {
            Ok(())
        } else {
            self.collect()
        }
    }

    /// Waits for the reduction in flight and adds what this rank keeps of it.
    fn collect(&mut self) -> Result<()> {
        let Some(InFlight {
            bucket,
            buffer,
            pending,
        }) = self.in_flight.take()
        else {
            return Ok(());
        };
        pending.wait()?;
        self.reduced.fold(bucket, &buffer.used)?;
        self.held.remove(buffer.bytes());
        self.buffers.give_back(buffer);
        Ok(())
    }

    /// Reduces all buckets that have not been reduced in this micro-batch; what did not come is zero.
    fn flush(&mut self) -> Result<()> {
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
        self.collect()
    }

    fn write_absent(&mut self, bucket: usize, piece: Piece) -> Result<()> {
        let zeros = Tensor::zeros(
            piece.span.len(),
            DType::F32,
            self.weights[0].values().device(),
        )?;
        self.write(bucket, piece.at, &zeros)
    }
}

/// The largest power of two up to 1/W on an f16 wire, where a sum of W values could overflow; 1 elsewhere.
fn prescale(wire: Wire, world: usize) -> f64 {
    match wire {
        Wire::F16 => 1.0 / world.next_power_of_two() as f64,
        _ => 1.0,
    }
}

fn operation(reduction: &Reduction) -> Op {
    match *reduction {
        Reduction::AllReduce(span) => Op::AllReduce(span),
        Reduction::Reduce { span, root } => Op::Reduce { span, root },
        Reduction::ReduceScatter(span) => Op::ReduceScatter(span),
    }
}

/// What ascending pieces leave free of a buffer.
fn gaps(len: usize, pieces: &[Piece]) -> Vec<Span> {
    let mut gaps = Vec::new();
    let mut end = 0;
    for piece in pieces {
        if piece.at > end {
            gaps.push(Span::new(end, piece.at));
        }
        end = piece.at + piece.span.len();
    }
    if len > end {
        gaps.push(Span::new(end, len));
    }
    gaps
}
