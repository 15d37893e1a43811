//! The requests of a communicator: handed over by a rank's thread, and on their way.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::marks::Mark;
use super::memory::Staged;
use crate::{Error, Request, Started};

/// What a rank's thread hands over.
#[derive(Debug)]
pub(super) enum Job {
    /// A request that is right by itself.
    Request {
        started: Started,
        request: Request,
        /// When the buffer is ready to be read.
        ready: Mark,
        /// To be recorded where the request is on the stream.
        issued: Mark,
        progress: Arc<Progress>,
    },
    /// The end, when all before it is done.
    Shutdown {
        started: Started,
        progress: Arc<Progress>,
    },
}

/// How far a job has come.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// On the device's stream up to here.
    pub(super) issued: OnceLock<Mark>,
    /// Over, well or not.
    pub(super) ended: OnceLock<Result<(), Error>>,
}

/// What is under way, in order.
#[derive(Debug, Default)]
pub(super) struct Flight {
    /// On the stream.
    pub(super) flying: VecDeque<Flying>,
    /// On its way to the stream: NCCL may have to connect ranks first.
    pub(super) leaving: Option<Flying>,
    /// The shutdown, after which there is nothing.
    pub(super) last: Option<(Started, Arc<Progress>)>,
    /// When the first of them came to its turn: its buffer was ready, and nothing was before it.
    pub(super) begun: Option<Duration>,
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Flying {
    pub(super) started: Started,
    /// Kept alive until nothing works on its buffer.
    pub(super) request: Request,
    pub(super) staged: Option<Staged>,
    pub(super) ready: Mark,
    /// Until it is recorded.
    pub(super) issued: Option<Mark>,
    pub(super) progress: Arc<Progress>,
}

impl Flight {
    /// The request whose turn it is.
    pub(super) fn first(&self) -> Option<&Flying> {
        self.flying.front().or(self.leaving.as_ref())
    }

    /// The call whose turn it is.
    pub(super) fn head(&self) -> Option<&Started> {
        let first = self.first().map(|flying| &flying.started);
        first.or_else(|| self.last.as_ref().map(|(started, _)| started))
    }
}
