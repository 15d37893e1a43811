//! A wrapper that goes wrong on purpose.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use polarshard_partition::{Rank, WorldSize};

use crate::{Called, Communicator, Completion, Departure, Error, Pause, Pending, Request, Started};

/// What goes wrong.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// The request is not started; the rank gets [`Error::Injected`] and may go on.
    Fail,
    /// The rank panics.
    Panic,
    /// The rank drops its communicator, and gets an error from then on.
    Leave,
    /// The request is started so much later.
    Delay(Duration),
    /// The request says that it is not done, as often as this.
    HoldBack {
        /// How many calls of [`Pending::is_done`] find it not done.
        polls: usize,
    },
    /// The request that this makes of the right one is started instead.
    Replace(fn(&Request) -> Request),
}

/// Lets one request of `inner` go wrong.
#[derive(Debug)]
pub struct Faulty<C> {
    /// Nothing after [`Fault::Leave`].
    inner: Result<C, Box<Error>>,
    rank: Rank,
    world: WorldSize,
    deadline: Duration,
    nth: u64,
    fault: Fault,
    started: u64,
}

impl<C: Communicator> Faulty<C> {
    /// The `nth` request, from 0, meets `fault`. The others go through.
    pub fn new(inner: C, nth: u64, fault: Fault) -> Self {
        Self {
            rank: inner.rank(),
            world: inner.world(),
            deadline: inner.deadline(),
            inner: Ok(inner),
            nth,
            fault,
            started: 0,
        }
    }

    fn describe(&self, called: Called) -> Box<Started> {
        Box::new(Started {
            rank: self.rank,
            sequence: self.started,
            called,
        })
    }

    fn poisoned(&self, called: Called, first: &Error) -> Error {
        Error::Poisoned {
            started: self.describe(called),
            first: Box::new(first.clone()),
        }
    }
}

impl<C: Communicator> Communicator for Faulty<C> {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> WorldSize {
        self.world
    }

    fn history(&self) -> u64 {
        self.inner.as_ref().map_or(0, Communicator::history)
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }

    /// # Panics
    /// On [`Fault::Panic`].
    fn start(&mut self, request: Request) -> Result<Pending, Error> {
        let started = self.describe(request.called());
        let is_hit = self.started == self.nth;
        self.started += 1;
        let inner = match &mut self.inner {
            Ok(inner) => inner,
            Err(first) => {
                let first = first.clone();
                return Err(Error::Poisoned { started, first });
            }
        };
        if !is_hit {
            return inner.start(request);
        }
        match self.fault {
            Fault::Fail => Err(Error::Injected { started }),
            Fault::Panic => panic!("{started}: panicked on purpose"),
            Fault::Leave => {
                let error = Error::PeerGone {
                    started,
                    peer: self.rank,
                    how: Departure::Returned,
                };
                self.inner = Err(Box::new(error.clone()));
                Err(error)
            }
            Fault::Delay(time) => {
                thread::sleep(time);
                inner.start(request)
            }
            Fault::HoldBack { polls } => {
                let inner = inner.start(request)?;
                Ok(Pending::new(
                    inner.buffer().clone(),
                    HeldBack {
                        inner,
                        polls: AtomicUsize::new(polls),
                    },
                ))
            }
            Fault::Replace(other) => inner.start(other(&request)),
        }
    }

    fn pause(&self) -> Pause {
        match &self.inner {
            Ok(inner) => inner.pause(),
            Err(_) => Pause::new(|| ()),
        }
    }

    fn shutdown(self: Box<Self>) -> Result<(), Error> {
        match self.inner {
            Ok(inner) => Box::new(inner).shutdown(),
            Err(ref first) => Err(self.poisoned(Called::Shutdown, first)),
        }
    }
}

#[derive(Debug)]
struct HeldBack {
    inner: Pending,
    /// How many polls are left that find it not done.
    polls: AtomicUsize,
}

impl Completion for HeldBack {
    fn is_done(&self) -> bool {
        let fewer = |polls: usize| polls.checked_sub(1);
        let held = self
            .polls
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer);
        held.is_err() && self.inner.is_done()
    }

    fn wait(self: Box<Self>) -> Result<(), Error> {
        self.inner.wait().map(drop)
    }

    fn finish(self: Box<Self>, deadline: Duration) -> Result<(), Error> {
        self.inner.finish(deadline).map(drop)
    }
}
