//! A wrapper that notes down every call.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polarshard_partition::{Call, Rank, Wire, WorldSize};

use crate::{Communicator, Error, Op, Pause, Pending, Request};

/// Records each operation that is started, receives apart, as a [`Call`]: what a run really sent,
/// to be compared with what a plan predicts.
#[derive(Debug)]
pub struct Recording<C> {
    inner: C,
    log: CallLog,
}

impl<C: Communicator> Recording<C> {
    /// Records what goes through `inner`.
    pub fn new(inner: C) -> Self {
        Self {
            inner,
            log: CallLog::default(),
        }
    }

    /// A handle on the record, which lives on when the communicator is gone.
    pub fn log(&self) -> CallLog {
        self.log.clone()
    }
}

impl<C: Communicator> Communicator for Recording<C> {
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
        let calls = request
            .wire()
            .map(|wire| calls(&request, wire))
            .unwrap_or_default();
        let pending = self.inner.start(request)?;
        self.log.extend(calls);
        Ok(pending)
    }

    fn pause(&self) -> Pause {
        self.inner.pause()
    }

    fn shutdown(self: Box<Self>) -> Result<(), Error> {
        Box::new(self.inner).shutdown()
    }
}

/// The calls that a [`Recording`] has seen, in order. Clones share one record.
#[derive(Debug, Clone, Default)]
pub struct CallLog(Arc<Mutex<Vec<Call>>>);

impl CallLog {
    /// A copy of all calls so far.
    pub fn calls(&self) -> Vec<Call> {
        self.locked(|calls| calls.clone())
    }

    /// All calls since the last time, which are forgotten.
    pub fn take(&self) -> Vec<Call> {
        self.locked(std::mem::take)
    }

    fn extend(&self, more: Vec<Call>) {
        self.locked(|calls| calls.extend(more));
    }

    fn locked<R>(&self, change: impl FnOnce(&mut Vec<Call>) -> R) -> R {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn calls(request: &Request, wire: Wire) -> Vec<Call> {
    let call = |op: &Op| {
        Some(Call {
            class: request.class(),
            collective: op.collective()?,
            elems: op.span().len(),
            wire,
            root: op.peer(),
        })
    };
    request.ops().iter().filter_map(call).collect()
}
