//! A wrapper for a world that outlives what uses it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use polarshard_partition::{Class, Rank, WorldSize};

use crate::{Communicator, Error, Pause, Pending, Request};

/// One of several handles on a communicator: for optimizers that follow each other in one world, or
/// that work side by side. The ranks' requests must have the same order over all handles, which are
/// counted as they are made: an optimizer can tell by [`handle`](Communicator::handle) that another
/// rank has used another one.
///
/// [`shutdown`](Communicator::shutdown) of a handle waits for the other ranks and leaves the world
/// as it is; [`into_inner`](Self::into_inner) gives the communicator back, to end it. The others
/// hear of a rank that drops its handles only when it has dropped the last one: until then they wait
/// for their deadline.
#[derive(Debug)]
pub struct Shared<C> {
    inner: Arc<Mutex<C>>,
    /// How many there have been.
    handles: Arc<AtomicU64>,
    handle: u64,
}

impl<C: Communicator> Shared<C> {
    /// The first handle.
    pub fn new(inner: C) -> Self {
        Self {
            inner: Arc::new(Mutex::new(inner)),
            handles: Arc::new(AtomicU64::new(1)),
            handle: 0,
        }
    }

    /// The communicator, if this is the last handle.
    pub fn into_inner(self) -> Option<C> {
        let inner = Arc::into_inner(self.inner)?;
        Some(inner.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn locked(&self) -> MutexGuard<'_, C> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C> Clone for Shared<C> {
    fn clone(&self) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            handles: Arc::clone(&self.handles),
            handle: self.handles.fetch_add(1, Ordering::Relaxed),
        }
    }
}

impl<C: Communicator> Communicator for Shared<C> {
    fn rank(&self) -> Rank {
        self.locked().rank()
    }

    fn world(&self) -> WorldSize {
        self.locked().world()
    }

    fn handle(&self) -> u64 {
        self.handle
    }

    fn deadline(&self) -> Duration {
        self.locked().deadline()
    }

    fn start(&mut self, request: Request) -> Result<Pending, Error> {
        self.locked().start(request)
    }

    fn pause(&self) -> Pause {
        self.locked().pause()
    }

    fn shutdown(mut self: Box<Self>) -> Result<(), Error> {
        let deadline = self.deadline();
        let presence = Tensor::ones(1, DType::F32, &Device::Cpu).expect("one number on the host");
        self.start(Request::all_reduce(Class::Control, &presence))?
            .finish(deadline)
            .map(drop)
    }
}
