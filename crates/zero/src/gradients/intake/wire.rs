//! The buckets of a micro-batch on their way over the wire.
//!
//! They are reduced in their fixed order: bucket k once it is full and bucket k-1 has been issued, whatever the order of
//! arrival, so that all ranks issue the same collectives. While one is reduced, the next one fills; the one before it is
//! collected by then.

use candle_core::Tensor;
use polarshard_comm::{Op, Pending, Request};
use polarshard_partition::{Class, Piece, Reduction, Span};

use super::Intake;
use crate::error::{Error, Result};
use crate::flat::{self, Write};
use crate::gradients::Buffer;

/// Where a bucket is in the micro-batch.
#[derive(Debug)]
pub(super) enum Slot {
    Empty,
    Filling { buffer: Buffer, arrived: usize },
    Issued,
}

/// Values that are to be written to an open bucket.
#[derive(Debug)]
pub(super) struct Arriving {
    bucket: usize,
    at: usize,
    pub(super) values: Tensor,
}

/// A bucket whose reduction was started.
#[derive(Debug)]
pub(super) struct Reducing {
    bucket: usize,
    buffer: Buffer,
    in_flight: Pending,
}

impl Intake {
    /// Brings values on their way to a bucket's wire buffer, on top of the sums of earlier micro-batches.
    pub(super) fn bring(&mut self, bucket: usize, at: usize, values: &Tensor) -> Result<()> {
        let current = self.cycle.current;
        self.open(bucket)?;
        let prescale = self.lanes[bucket].prescale;
        let (values, factor) = match &self.locals[bucket] {
            None => (values.clone(), current * prescale),
            Some(local) => {
                flat::add(local, at, values, current)?;
                let sums = flat::view(local, Span::of_len(at, values.elem_count()))?;
                (sums, prescale)
            }
        };
        let values = flat::scaled(&values, factor)?;
        self.arriving.push(Arriving { bucket, at, values });
        Ok(())
    }

    /// The buffer of a bucket that was opened and not issued.
    fn filling(&self, bucket: usize) -> &Tensor {
        let Slot::Filling { buffer, .. } = &self.slots[bucket] else {
            unreachable!("a bucket is issued when all that goes into it is there")
        };
        &buffer.used
    }

    /// Writes what is on its way into open buckets, all at once.
    pub(super) fn settle(&mut self) -> Result<()> {
        let arriving = std::mem::take(&mut self.arriving);
        let writes = arriving
            .into_iter()
            .map(|Arriving { bucket, at, values }| Write {
                flat: self.filling(bucket),
                at,
                values,
            });
        Ok(flat::write_all(&writes.collect::<Vec<_>>())?)
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

    /// Issues the buckets that are full and next.
    pub(super) fn issue_full(&mut self) -> Result<()> {
        while let Some(Slot::Filling { arrived, .. }) = self.slots.get(self.next)
            && *arrived == self.lanes[self.next].parameters
        {
            self.issue()?;
        }
        Ok(())
    }

    /// Reduces all buckets that have not been reduced in this micro-batch; what did not come is zero. An error ends the
    /// optimizer: this rank is behind the others by the buckets that are left.
    pub(super) fn flush(&mut self) -> Result<()> {
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

    /// Writes what did not come: zeros on top of the sums of earlier micro-batches. A rank that has no memory left can do
    /// it for a bucket without such sums.
    fn write_absent(&self, bucket: usize, piece: Piece) -> Result<()> {
        let span = Span::of_len(piece.at, piece.span.len());
        let Some(local) = &self.locals[bucket] else {
            return Ok(flat::zero(self.filling(bucket), span)?);
        };
        let sums = flat::view(local, span)?;
        let sums = flat::scaled(&sums, self.lanes[bucket].prescale)?;
        Ok(flat::write(self.filling(bucket), piece.at, &sums)?)
    }

    /// Starts the reduction of the next bucket. The one before it is collected meanwhile.
    fn issue(&mut self) -> Result<()> {
        self.settle()?;
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
        let request = Request::new(Class::Gradient, buffer.used.clone(), ops);
        let in_flight = self.channel.start(request)?;
        let before = self.reducing.replace(Reducing {
            bucket,
            buffer,
            in_flight,
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
        let last = self.reducing.take();
        self.collect(last)
    }

    /// Waits for a reduction and adds what this rank keeps of it.
    fn collect(&mut self, reducing: Option<Reducing>) -> Result<()> {
        let Some(Reducing {
            bucket,
            buffer,
            in_flight,
        }) = reducing
        else {
            return Ok(());
        };
        let waited = in_flight.wait();
        self.held.remove(buffer.bytes());
        // A buffer that was not waited for may still be written: it is not used again.
        waited?;
        let folded = self.reduced.fold(bucket, &buffer.used);
        self.buffers.give_back(buffer);
        folded
    }
}

fn operation(reduction: &Reduction) -> Op {
    match *reduction {
        Reduction::AllReduce(span) => Op::AllReduce(span),
        Reduction::Reduce { span, root } => Op::Reduce { span, root },
        Reduction::ReduceScatter(span) => Op::ReduceScatter(span),
    }
}
