//! A wrapper for a world that outlives what uses it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use polarshard_partition::{Class, DigestWriter, Rank, WorldSize};

use crate::{Communicator, Error, Pause, Pending, Request};

/// One of several handles on a communicator: for optimizers that follow each other in one world, or
/// that work side by side.
///
/// The ranks' requests must have the same order over all handles, which are counted as they are used
/// first. Backends cannot tell the requests of two models of the same shapes apart; whoever uses a
/// handle finds out by its [`history`](Communicator::history) whether another rank has used another one.
///
/// [`shutdown`](Communicator::shutdown) of a handle waits for the other ranks and leaves the world
/// as it is; [`into_inner`](Self::into_inner) gives the communicator back, to end it. The others
/// hear of a rank that drops its handles only when it has dropped the last one: until then they wait
/// for their deadline.
#[derive(Debug)]
pub struct Shared<C> {
    inner: Arc<Mutex<Inner<C>>>,
    /// Which of those that were used it is.
    number: Option<u64>,
}

/// What the handles have in common.
#[derive(Debug)]
struct Inner<C> {
    comm: C,
    /// Handles that were used.
    used: u64,
    history: u64,
}

impl<C> Inner<C> {
    /// The history after a use of this handle.
    fn with(&self, number: u64) -> u64 {
        let history = DigestWriter::new().u64(self.history).u64(number);
        history.finish().0
    }
}

impl<C: Communicator> Shared<C> {
    /// The first handle.
    pub fn new(comm: C) -> Self {
        let inner = Inner {
            comm,
            used: 0,
            history: 0,
        };
        Self {
            inner: Arc::new(Mutex::new(inner)),
            number: None,
        }
    }

    /// The communicator, if this is the last handle.
    pub fn into_inner(self) -> Option<C> {
        let inner = Arc::into_inner(self.inner)?;
        let inner = inner.into_inner().unwrap_or_else(PoisonError::into_inner);
        Some(inner.comm)
    }

    fn locked(&self) -> MutexGuard<'_, Inner<C>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C> Clone for Shared<C> {
    fn clone(&self) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            number: None,
        }
    }
}

impl<C: Communicator> Communicator for Shared<C> {
    fn rank(&self) -> Rank {
        self.locked().comm.rank()
    }

    fn world(&self) -> WorldSize {
        self.locked().comm.world()
    }

    fn history(&self) -> u64 {
        let inner = self.locked();
        inner.with(self.number.unwrap_or(inner.used + 1))
    }

    fn deadline(&self) -> Duration {
        self.locked().comm.deadline()
    }

    fn start(&mut self, request: Request) -> Result<Pending, Error> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let pending = inner.comm.start(request)?;
        let number = *self.number.get_or_insert_with(|| {
            inner.used += 1;
            inner.used
        });
        inner.history = inner.with(number);
        Ok(pending)
    }

    fn pause(&self) -> Pause {
        self.locked().comm.pause()
    }

    fn shutdown(mut self: Box<Self>) -> Result<(), Error> {
        let deadline = self.deadline();
        let presence = Tensor::ones(1, DType::F32, &Device::Cpu).expect("one number on the host");
        self.start(Request::all_reduce(Class::Control, &presence))?
            .finish(deadline)
            .map(drop)
    }
}
