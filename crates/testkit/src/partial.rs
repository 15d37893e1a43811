//! The fault that this project exists to prevent: a rank that orthogonalizes what it happens to have.
//!
//! Where DeepSpeed's ZeRO copied each reduced slice back to the slice's owner alone, an owner of a split matrix ran
//! Newton-Schulz over its own reduced slice beside slices that nobody had reduced for it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use candle_core::Tensor;
use polarshard_comm::{Communicator, Completion, Error, Pause, Pending, Request, Started};
use polarshard_partition::{Class, Plan, Rank, UpdateGroup, WorldSize};

/// A communicator under which split matrices are partly reduced: in reduced gradients, what this rank does not own of a
/// split Muon parameter is put back to its own, unreduced values.
///
/// It shows under `BucketAllReduce` with `CopyToOwners`, where owners take the whole of a split parameter from the
/// reduced bucket. Nothing changes until the plan is set.
#[derive(Debug)]
pub struct Partial<C> {
    inner: C,
    plan: Arc<OnceLock<Plan>>,
    /// Requests so far.
    started: u64,
    /// Reductions of buckets since the plan was set: buckets come in their order, again and again.
    reductions: usize,
}

impl<C: Communicator> Partial<C> {
    /// A wrapper, and the place for the plan of the optimizer that will use it.
    pub fn new(inner: C) -> (Self, Arc<OnceLock<Plan>>) {
        let plan = Arc::new(OnceLock::new());
        (
            Self {
                inner,
                plan: Arc::clone(&plan),
                started: 0,
                reductions: 0,
            },
            plan,
        )
    }

    /// Copies of the runs of the next bucket that this rank will not get reduced.
    fn unreduced(&self, plan: &Plan, buffer: &Tensor) -> candle_core::Result<Vec<(usize, Tensor)>> {
        let rank = self.inner.rank();
        let mut runs = Vec::new();
        for piece in &plan.buckets()[self.reductions % plan.buckets().len()].pieces {
            let slices = plan.layout().slices(piece.param);
            let split = plan.layout().owners(piece.param).len() > 1;
            if !split || plan.params().get(piece.param).group() != UpdateGroup::Muon {
                continue;
            }
            for slice in slices.iter().filter(|slice| slice.rank != rank) {
                if let Some(common) = slice.span.intersect(piece.span) {
                    let at = piece.at + (common.start - piece.span.start);
                    runs.push((at, buffer.narrow(0, at, common.len())?.force_contiguous()?));
                }
            }
        }
        Ok(runs)
    }
}

impl<C: Communicator> Communicator for Partial<C> {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world(&self) -> WorldSize {
        self.inner.world()
    }

    fn history(&self) -> u64 {
        self.inner.history()
    }

    fn deadline(&self) -> Duration {
        self.inner.deadline()
    }

    fn start(&mut self, request: Request) -> Result<Pending, Error> {
        let started = Started {
            rank: self.rank(),
            sequence: self.started,
            called: request.called(),
        };
        self.started += 1;
        let plan = Arc::clone(&self.plan);
        let Some(plan) = plan.get().filter(|_| request.class() == Class::Gradient) else {
            return self.inner.start(request);
        };
        let runs = self
            .unreduced(plan, request.buffer())
            .map_err(|source| failed(&started, source))?;
        self.reductions += 1;
        let inner = self.inner.start(request)?;
        Ok(Pending::new(
            inner.buffer().clone(),
            PutBack {
                inner,
                runs,
                started,
            },
        ))
    }

    fn pause(&self) -> Pause {
        self.inner.pause()
    }

    fn shutdown(self: Box<Self>) -> Result<(), Error> {
        Box::new(self.inner).shutdown()
    }
}

/// Puts unreduced runs back when the reduction is done.
#[derive(Debug)]
struct PutBack {
    inner: Pending,
    runs: Vec<(usize, Tensor)>,
    started: Started,
}

impl Completion for PutBack {
    fn is_done(&self) -> bool {
        self.inner.is_done()
    }

    fn wait(self: Box<Self>) -> Result<(), Error> {
        self.finish(Duration::MAX)
    }

    fn finish(self: Box<Self>, deadline: Duration) -> Result<(), Error> {
        let Self {
            inner,
            runs,
            started,
        } = *self;
        let buffer = inner.finish(deadline)?;
        let mut runs = runs.iter();
        runs.try_for_each(|(at, values)| buffer.slice_set(values, 0, *at))
            .map_err(|source| failed(&started, source))
    }
}

fn failed(started: &Started, source: candle_core::Error) -> Error {
    Error::Tensor {
        started: Box::new(started.clone()),
        source: Arc::new(source),
    }
}
