//! A wrapper for a world that outlives what uses it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use polarshard_partition::{Class, Rank, WorldSize};

use crate::{Communicator, Error, Pause, Pending, Request};

/// One of several handles on a communicator: for optimizers that follow each other in one world, or
/// that work side by side. The ranks' requests must have the same order over all handles.
///
/// [`shutdown`](Communicator::shutdown) of a handle waits for the other ranks and leaves the world
/// as it is; [`into_inner`](Self::into_inner) gives the communicator back, to end it. The others
/// hear of a rank that drops its handles only when it has dropped the last one: until then they wait
/// for their deadline.
#[derive(Debug)]
pub struct Shared<C>(Arc<Mutex<C>>);

impl<C: Communicator> Shared<C> {
    /// The first handle.
    pub fn new(inner: C) -> Self {
        Self(Arc::new(Mutex::new(inner)))
    }

    /// The communicator, if this is the last handle.
    pub fn into_inner(self) -> Option<C> {
        let inner = Arc::into_inner(self.0)?;
        Some(inner.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn inner(&self) -> MutexGuard<'_, C> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C> Clone for Shared<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C: Communicator> Communicator for Shared<C> {
    fn rank(&self) -> Rank {
        self.inner().rank()
    }

    fn world(&self) -> WorldSize {
        self.inner().world()
    }

    fn deadline(&self) -> Duration {
        self.inner().deadline()
    }

    fn start(&mut self, request: Request) -> Result<Pending, Error> {
        self.inner().start(request)
    }

    fn pause(&self) -> Pause {
        self.inner().pause()
    }

    fn shutdown(mut self: Box<Self>) -> Result<(), Error> {
        let deadline = self.deadline();
        let presence = Tensor::ones(1, DType::F32, &Device::Cpu).expect("one number on the host");
        self.start(Request::all_reduce(Class::Control, &presence))?
            .finish(deadline)
            .map(drop)
    }
}
