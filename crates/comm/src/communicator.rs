//! The interface of every backend.

use std::fmt;
use std::time::Duration;

use polarshard_partition::{Rank, WorldSize};

use crate::{Error, Pending, Request};

/// One rank's end of a world.
///
/// All ranks start the same requests in the same order. After a fatal error ([`Error::is_fatal`])
/// the world has ended: every outstanding and later call, on every rank, returns an error that
/// carries the first one. Dropping a communicator without [`shutdown`](Self::shutdown) tells the
/// other ranks at once that this one is gone.
pub trait Communicator: fmt::Debug + Send {
    /// Who this is.
    fn rank(&self) -> Rank;

    /// How many ranks there are.
    fn world(&self) -> WorldSize;

    /// A hash of the order in which the handles on this rank's end of the world were used so far, and of
    /// this one as the next, where there are several, as of [`Shared`](crate::Shared): it must be the same
    /// on all ranks. Wrappers hand on that of what they wrap.
    fn history(&self) -> u64 {
        0
    }

    /// How long a request may take, from when it is at the head of its rank's queue.
    fn deadline(&self) -> Duration;

    /// Starts a request, and returns before it is done. What this rank computed into the buffer
    /// before is seen; the buffer must be left alone until the [`Pending`] gives it back.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the request is wrong by itself, and whatever ended the world before.
    /// What goes wrong with other ranks comes out of the [`Pending`].
    fn start(&mut self, request: Request) -> Result<Pending, Error>;

    /// Stops the deadlines of all ranks until the guard is dropped: for long work of one rank,
    /// evaluation or saving.
    fn pause(&self) -> Pause;

    /// Ends the world in good order: waits, within the deadline, until all ranks do so.
    ///
    /// # Errors
    /// As a request: another rank is gone, does something else, or does not come in time.
    fn shutdown(self: Box<Self>) -> Result<(), Error>;
}

impl<C: Communicator + ?Sized> Communicator for Box<C> {
    fn rank(&self) -> Rank {
        (**self).rank()
    }

    fn world(&self) -> WorldSize {
        (**self).world()
    }

    fn history(&self) -> u64 {
        (**self).history()
    }

    fn deadline(&self) -> Duration {
        (**self).deadline()
    }

    fn start(&mut self, request: Request) -> Result<Pending, Error> {
        (**self).start(request)
    }

    fn pause(&self) -> Pause {
        (**self).pause()
    }

    fn shutdown(self: Box<Self>) -> Result<(), Error> {
        (*self).shutdown()
    }
}

/// A guard: while any rank holds one, no deadline of the world runs.
#[must_use = "deadlines run again as soon as it is dropped"]
pub struct Pause {
    resume: Option<Box<dyn FnOnce() + Send>>,
}

impl Pause {
    /// A guard that calls `resume` when it is dropped; for backends.
    pub fn new(resume: impl FnOnce() + Send + 'static) -> Self {
        let resume: Box<dyn FnOnce() + Send> = Box::new(resume);
        Self {
            resume: Some(resume),
        }
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        if let Some(resume) = self.resume.take() {
            resume();
        }
    }
}

impl fmt::Debug for Pause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pause").finish_non_exhaustive()
    }
}
