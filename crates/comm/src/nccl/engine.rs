//! The thread that owns a communicator: it issues requests, sees when they are done, and ends the
//! communicator when something is wrong.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;

use super::flight::{Flight, Flying, Job, Progress};
use super::memory::{self, Staging};
use super::raw::Raw;
use crate::ranks::panic_message;
use crate::tether::Link;
use crate::{Error, Started};

/// How often to look without a pause after a request has come, for the next one and for its end, and
/// how long a pause is: a collective takes tens of microseconds at least.
const LOOKS: u32 = 200;
const NAP: Duration = Duration::from_micros(50);

/// How long to wait for a request when there is none, before looking for bad news.
const IDLE: Duration = Duration::from_millis(50);

/// How long to wait for the name of a rank that died, after NCCL has noticed that one did.
const BLAME: Duration = Duration::from_secs(1);

/// The owner of a communicator.
#[derive(Debug)]
pub(super) struct Engine {
    /// Gone when the world has ended.
    raw: Option<Raw>,
    jobs: mpsc::Receiver<Job>,
    link: Arc<Link>,
    deadline: Duration,
    /// What the communicator works on.
    stream: Arc<CudaStream>,
    /// For buffers of the host.
    staging: Staging,
    flight: Flight,
}

impl Engine {
    /// An engine that does the `jobs` with a communicator that is set up.
    pub(super) fn new(
        raw: Raw,
        stream: Arc<CudaStream>,
        staging: Staging,
        jobs: mpsc::Receiver<Job>,
        link: Arc<Link>,
        deadline: Duration,
    ) -> Self {
        Self {
            raw: Some(raw),
            jobs,
            link,
            deadline,
            stream,
            staging,
            flight: Flight::default(),
        }
    }

    /// Works until the communicator is shut down, or its owner is gone. A panic ends the world, but
    /// not the engine: whoever waits must hear of it.
    pub(super) fn run(mut self) {
        let mut looks = 0;
        loop {
            match catch_unwind(AssertUnwindSafe(|| self.step(&mut looks))) {
                Ok(true) => {}
                Ok(false) => return,
                Err(panic) => {
                    if let Some(started) = self.flight.head() {
                        self.link.fail(&Error::Panicked {
                            started: Box::new(started.clone()),
                            message: panic_message(&*panic),
                        });
                    }
                    self.abort();
                }
            }
        }
    }

    /// One round; whether there is another one.
    fn step(&mut self, looks: &mut u32) -> bool {
        match self.next(*looks) {
            Ok(job) => {
                *looks = 0;
                self.take(job);
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            // The owner has told the others, and this rank's own calls.
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                self.abort();
                return false;
            }
        }
        self.look();
        if self.flight.first().is_none()
            && let Some((started, progress)) = &self.flight.last
        {
            let (started, progress) = (started.clone(), Arc::clone(progress));
            let result = self.shut_down(&started);
            self.tell(&progress, result);
            return false;
        }
        *looks = looks.saturating_add(1);
        true
    }

    /// The next job, if one can be taken and comes before it is time to look at the flight again.
    fn next(&self, looks: u32) -> Result<Job, mpsc::RecvTimeoutError> {
        let wait = if looks < LOOKS {
            thread::yield_now();
            Duration::ZERO
        } else if self.flight.head().is_none() {
            IDLE
        } else {
            NAP
        };
        if self.flight.leaving.is_some() || self.flight.last.is_some() {
            thread::sleep(wait);
            return Err(mpsc::RecvTimeoutError::Timeout);
        }
        self.jobs.recv_timeout(wait)
    }

    /// Begins a job.
    fn take(&mut self, job: Job) {
        match job {
            Job::Request {
                started,
                request,
                ready,
                issued,
                progress,
            } => {
                self.flight.leaving = Some(Flying {
                    started: started.clone(),
                    request,
                    staged: None,
                    ready,
                    issued: Some(issued),
                    progress,
                });
                if self.link.failure(&started).is_some() {
                    self.abort();
                } else if let Err(message) = self.issue() {
                    self.fail(&started, message);
                    // Before NCCL is asked whether it is on the stream: there is nothing to be on it.
                    self.abort();
                }
            }
            Job::Shutdown { started, progress } => self.flight.last = Some((started, progress)),
        }
    }

    /// Issues the request that is leaving.
    fn issue(&mut self) -> Result<(), String> {
        let (Some(raw), Some(leaving)) = (&self.raw, &mut self.flight.leaving) else {
            return Err("the communicator is gone".to_owned());
        };
        let request = &leaving.request;
        let buffer = request.buffer();
        self.stream.wait(&leaving.ready).map_err(text)?;
        if buffer.elem_count() == 0 {
            return Ok(());
        }
        let memory = if buffer.device().is_cpu() {
            let staged = self.staging.up(buffer, &self.stream).map_err(text)?;
            let staged = leaving.staged.insert(staged);
            staged.memory().map_err(text)?
        } else {
            memory::of_tensor(buffer).map_err(text)?
        };
        // SAFETY: the request is checked, so its spans lie in the buffer, which is on this device;
        // `leaving` keeps it alive until the event after it has come, or the abort is over. The
        // caller leaves the buffer alone, as `Communicator::start` asks.
        unsafe { raw.issue(request.ops(), memory, &self.stream) }.map_err(text)
    }

    /// Sees what has changed: what is done, what is late, what is wrong.
    fn look(&mut self) {
        if let Err((started, message)) = self.advance() {
            self.fail(&started, message);
        }
        self.keep_deadline();
        let head = self.flight.head();
        if head.is_some_and(|head| self.link.failure(head).is_some()) {
            self.abort();
        }
    }

    /// Moves on what can be: from the stream to the end, and from NCCL to the stream.
    fn advance(&mut self) -> Result<(), (Started, String)> {
        while let Some(first) = self.flight.flying.front() {
            let issued = first.progress.issued.get();
            let is_done = issued.map_or(Ok(false), |issued| issued.try_is_complete());
            if !is_done.map_err(|e| (first.started.clone(), text(e)))? {
                break;
            }
            self.flight.begun = None;
            self.land();
        }
        let (Some(raw), Some(first)) = (&self.raw, self.flight.first()) else {
            return Ok(());
        };
        // Asked even with nothing leaving: it tells of failures, too.
        let is_free = raw.poll().map_err(|e| (first.started.clone(), text(e)))?;
        if let (true, Some(leaving)) = (is_free, &mut self.flight.leaving) {
            if let Some(issued) = leaving.issued.take() {
                let recorded = issued.record(&self.stream);
                recorded.map_err(|e| (leaving.started.clone(), text(e)))?;
                // Set once: it leaves now.
                let _ = leaving.progress.issued.set(issued);
            }
            self.flight.flying.extend(self.flight.leaving.take());
            self.link.wake();
        }
        Ok(())
    }

    /// Ends the first request, which is done on the device. It is in flight until it can be told: if the copy panics,
    /// the abort tells.
    fn land(&mut self) {
        let Some(first) = self.flight.flying.front_mut() else {
            return;
        };
        let staged = first.staged.take();
        let landed = staged.map_or(Ok(()), |staged| {
            self.staging.down(staged, first.request.buffer())
        });
        let result = landed.map_err(|e| Error::Tensor {
            started: Box::new(first.started.clone()),
            source: Arc::new(e),
        });
        if let Err(error) = &result {
            self.link.fail(error);
        }
        let progress = Arc::clone(&first.progress);
        // The buffer is let go before its owner hears of it.
        drop(self.flight.flying.pop_front());
        self.tell(&progress, result);
    }

    /// Ends the world if the first request has had its time.
    fn keep_deadline(&mut self) {
        let Some(first) = self.flight.first() else {
            return;
        };
        let running = self.link.running();
        let begun = match self.flight.begun {
            Some(begun) => begun,
            None => match first.ready.try_is_complete() {
                Ok(true) => running,
                Ok(false) => return,
                // It will never be ready.
                Err(error) => return self.fail(&first.started, text(error)),
            },
        };
        if running.saturating_sub(begun) >= self.deadline {
            // Known to all ranks when it returns, this one included.
            let _ = self.link.expire(&first.started, self.deadline);
        }
        self.flight.begun = Some(begun);
    }

    /// Ends the world because NCCL or the device failed. If a rank has died NCCL may know before the
    /// tether does, but not who it was.
    fn fail(&self, started: &Started, message: String) {
        if self.link.await_failure(started, BLAME).is_none() {
            self.link.fail(&Error::Backend {
                started: Box::new(started.clone()),
                message,
            });
        }
    }

    /// Ends everything under way with the failure of the world, then the communicator.
    fn abort(&mut self) {
        let Flight {
            flying,
            leaving,
            last,
            ..
        } = std::mem::take(&mut self.flight);
        let flying: Vec<Flying> = flying.into_iter().chain(leaving).collect();
        let requests = flying.iter().map(|one| (&one.started, &one.progress));
        for (started, progress) in requests.chain(last.iter().map(|(s, p)| (s, p))) {
            let error = self.link.failure(started);
            let error = error.unwrap_or_else(|| Error::Backend {
                started: Box::new(started.clone()),
                message: "the communicator was aborted".to_owned(),
            });
            self.tell(progress, Err(error));
        }
        // Only then, for it may take a while; and before the buffers are let go.
        drop(self.raw.take());
        drop(flying);
    }

    /// Waits until all ranks are here, and ends the communicator in good order.
    fn shut_down(&mut self, started: &Started) -> Result<(), Error> {
        self.link.shutdown(started, self.deadline)?;
        let failed = |message| Error::Backend {
            started: Box::new(started.clone()),
            message,
        };
        let Some(raw) = self.raw.take() else {
            return Ok(());
        };
        raw.finalize().map_err(|e| failed(text(e)))?;
        let begun = Instant::now();
        while !raw.poll().map_err(|e| failed(text(e)))? {
            if begun.elapsed() >= self.deadline {
                let deadline = self.deadline;
                return Err(failed(format!(
                    "ncclCommFinalize is not done within {deadline:?}"
                )));
            }
            thread::sleep(NAP);
        }
        raw.destroy().map_err(|e| failed(text(e)))
    }

    fn tell(&self, progress: &Progress, result: Result<(), Error>) {
        // Set once: what is told has left the flight.
        let _ = progress.ended.set(result);
        self.link.wake();
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
