//! A request that has been started.

use std::fmt;
use std::time::Duration;

use candle_core::Tensor;

use crate::Error;

/// A request in flight. It owns a clone of the buffer, which must be left alone until it is given
/// back.
///
/// Dropping it does not cancel the collective; it only gives up hearing how it ended.
#[must_use = "the buffer holds the result only after `wait` or `finish`"]
#[derive(Debug)]
pub struct Pending {
    buffer: Tensor,
    completion: Box<dyn Completion>,
}

impl Pending {
    /// A request on `buffer` whose end `completion` knows; for backends and wrappers.
    pub fn new(buffer: Tensor, completion: impl Completion + 'static) -> Self {
        Self {
            buffer,
            completion: Box::new(completion),
        }
    }

    /// The buffer of the request. Its values are unspecified while the request is in flight.
    pub fn buffer(&self) -> &Tensor {
        &self.buffer
    }

    /// Whether the request has ended, well or not. Never blocks.
    pub fn is_done(&self) -> bool {
        self.completion.is_done()
    }

    /// Orders later device work after the request, and gives the buffer back. May or may not block
    /// the host, for the communicator's deadline at most.
    ///
    /// # Errors
    /// Why the request failed, as far as it is known by then.
    pub fn wait(self) -> Result<Tensor, Error> {
        self.completion.wait()?;
        Ok(self.buffer)
    }

    /// Blocks the host until the request is done, and gives the buffer back: its values may be
    /// read.
    ///
    /// # Errors
    /// Why the request failed, or [`Error::Deadline`], which ends the world.
    pub fn finish(self, deadline: Duration) -> Result<Tensor, Error> {
        self.completion.finish(deadline)?;
        Ok(self.buffer)
    }
}

/// How a backend, or a wrapper around one, knows that a request has ended. A wrapper may hold the
/// inner [`Pending`] and change its buffer after it is done.
pub trait Completion: fmt::Debug + Send {
    /// See [`Pending::is_done`].
    fn is_done(&self) -> bool;

    /// See [`Pending::wait`].
    ///
    /// # Errors
    /// Why the request failed.
    fn wait(self: Box<Self>) -> Result<(), Error>;

    /// See [`Pending::finish`].
    ///
    /// # Errors
    /// Why the request failed, or [`Error::Deadline`].
    fn finish(self: Box<Self>, deadline: Duration) -> Result<(), Error>;
}
