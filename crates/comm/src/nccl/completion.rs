//! The end of a job, seen from the rank's own thread.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;

use super::flight::Progress;
use crate::tether::Link;
use crate::{Completion, Error, Started};

/// How long to look before sleeping: to be woken takes as long as a small request.
const EAGER: Duration = Duration::from_micros(200);

/// A job that was handed over.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) started: Started,
    pub(super) progress: Arc<Progress>,
    pub(super) link: Arc<Link>,
    /// candle's stream, if the buffer is on the device.
    pub(super) compute: Option<Arc<CudaStream>>,
}

impl Completion for InFlight {
    fn is_done(&self) -> bool {
        self.progress.ended.get().is_some()
    }

    /// The engine keeps the deadline: it begins only when the request is at the head of the stream.
    fn wait(self: Box<Self>) -> Result<(), Error> {
        let Some(compute) = self.compute.clone() else {
            return self.finish(Duration::MAX);
        };
        let Progress { issued, ended } = &*self.progress;
        let found = || {
            let ended = ended.get().cloned();
            ended.or_else(|| issued.get().map(|_| Ok(())))
        };
        let sleep = || self.link.wait(Duration::MAX, |_| found(), |_| Ok(()));
        look(EAGER, found).unwrap_or_else(sleep)?;
        let joined = issued.get().map_or(Ok(()), |event| compute.wait(event));
        joined.map_err(|e| {
            let error = Error::Backend {
                started: Box::new(self.started.clone()),
                message: e.to_string(),
            };
            self.link.fail(&error);
            error
        })
    }

    fn finish(self: Box<Self>, deadline: Duration) -> Result<(), Error> {
        let found = || self.progress.ended.get().cloned().map(Some);
        let rest = deadline.saturating_sub(EAGER);
        let sleep = || self.link.wait(rest, |_| found(), |_| None);
        let ended = look(EAGER.min(deadline), found).unwrap_or_else(sleep);
        ended.unwrap_or_else(|| Err(self.link.expire(&self.started, deadline)))
    }
}

/// What is found within a time, without sleeping.
fn look<R>(time: Duration, found: impl Fn() -> Option<R>) -> Option<R> {
    let begun = Instant::now();
    loop {
        let now = found();
        if now.is_some() || begun.elapsed() >= time {
            return now;
        }
        thread::yield_now();
    }
}
