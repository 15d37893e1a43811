//! The backend of one process: ranks are threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use polarshard_partition::{Rank, WorldSize};

use crate::parts::Parts;
use crate::ranks::panic_message;
use crate::rendezvous::Rendezvous;
use crate::{Called, Communicator, Completion, Departure, Error, Pause, Pending, Request, Started};

/// One rank of a world of threads. Sums are made in f32 in rank order and rounded once (f64 in
/// f64), so that a run repeats bit for bit.
///
/// Each rank has a progress thread that does its requests one after the other. Data is copied out
/// of the buffer before the ranks meet and into it afterwards, so no storage is locked while a rank
/// waits. Devices other than the CPU work, by copies through the host.
#[derive(Debug)]
pub struct Loopback {
    rank: Rank,
    world: WorldSize,
    rendezvous: Arc<Rendezvous<Parts>>,
    /// The next call's sequence number.
    next: u64,
    /// The progress thread's queue; the thread ends when it is dropped.
    jobs: mpsc::Sender<Job>,
}

impl Loopback {
    /// All ranks of a world, in rank order, each to be moved to a thread of its own.
    ///
    /// # Panics
    /// If the system cannot start a thread a rank.
    pub fn world(world: WorldSize, deadline: Duration) -> Vec<Self> {
        let rendezvous = Arc::new(Rendezvous::new(world, deadline));
        world
            .ranks()
            .map(|rank| Self::one(rank, world, Arc::clone(&rendezvous)))
            .collect()
    }

    fn one(rank: Rank, world: WorldSize, rendezvous: Arc<Rendezvous<Parts>>) -> Self {
        let (jobs, queue) = mpsc::channel::<Job>();
        let meeting = Arc::clone(&rendezvous);
        thread::Builder::new()
            .name(format!("loopback-{rank}"))
            .spawn(move || {
                for job in queue {
                    job.run(world, &meeting);
                }
            })
            .expect("the system starts a thread a rank");
        Self {
            rank,
            world,
            rendezvous,
            next: 0,
            jobs,
        }
    }

    fn describe(&self, called: Called) -> Started {
        Started {
            rank: self.rank,
            sequence: self.next,
            called,
        }
    }

    /// Hands a job to the progress thread, and returns how to hear of its end.
    fn enqueue(&mut self, started: Started, request: Option<Request>) -> InFlight {
        self.next += 1;
        let ended = Arc::new(OnceLock::new());
        let job = Job {
            started: started.clone(),
            request,
            ended: Arc::clone(&ended),
        };
        // The progress thread lives as long as this sender, and catches panics.
        self.jobs
            .send(job)
            .expect("the progress thread outlives its communicator");
        InFlight {
            started,
            ended,
            rendezvous: Arc::clone(&self.rendezvous),
        }
    }
}

impl Communicator for Loopback {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> WorldSize {
        self.world
    }

    fn deadline(&self) -> Duration {
        self.rendezvous.deadline()
    }

    fn start(&mut self, request: Request) -> Result<Pending, Error> {
        let started = self.describe(request.called());
        if let Some(first) = self.rendezvous.failure() {
            self.next += 1;
            return Err(first.seen_by(&started));
        }
        if let Err(reason) = request.check(self.world) {
            let started = Box::new(started);
            return Err(Error::Invalid { started, reason });
        }
        let buffer = request.buffer().clone();
        Ok(Pending::new(buffer, self.enqueue(started, Some(request))))
    }

    fn pause(&self) -> Pause {
        self.rendezvous.pause()
    }

    fn shutdown(mut self: Box<Self>) -> Result<(), Error> {
        let started = self.describe(Called::Shutdown);
        Box::new(self.enqueue(started, None)).wait()
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        // After a shutdown nobody listens any more.
        self.rendezvous.leave(
            self.rank,
            if thread::panicking() {
                Departure::Panicked
            } else {
                Departure::Returned
            },
        );
    }
}

type Ended = OnceLock<Result<(), Error>>;

/// What the progress thread does in one go: a request, or the shutdown.
struct Job {
    started: Started,
    request: Option<Request>,
    ended: Arc<Ended>,
}

impl Job {
    fn run(self, world: WorldSize, rendezvous: &Rendezvous<Parts>) {
        let attempt = AssertUnwindSafe(|| self.attempt(world, rendezvous));
        let result = catch_unwind(attempt).unwrap_or_else(|panic| {
            Err(Error::Panicked {
                started: Box::new(self.started.clone()),
                message: panic_message(&*panic),
            })
        });
        if let Err(error) = &result {
            // News to the others only if it is this rank's own failure; the first one stays.
            rendezvous.abort(error);
        }
        // Set once: the job is consumed here. The buffer is let go before its owner hears of it.
        drop(self.request);
        let _ = self.ended.set(result);
        rendezvous.wake();
    }

    fn attempt(&self, world: WorldSize, rendezvous: &Rendezvous<Parts>) -> Result<(), Error> {
        let started = &self.started;
        let Some(request) = &self.request else {
            return rendezvous.meet(started, Parts::default()).map(drop);
        };
        let failed = |source| Error::Tensor {
            started: Box::new(started.clone()),
            source,
        };
        let parts = Parts::read(request, started.rank, world).map_err(failed)?;
        let all = rendezvous.meet(started, parts)?;
        Parts::write(request, started.rank, &all).map_err(failed)
    }
}

/// The end of a job, seen from the rank's own thread.
#[derive(Debug)]
struct InFlight {
    started: Started,
    ended: Arc<Ended>,
    rendezvous: Arc<Rendezvous<Parts>>,
}

impl Completion for InFlight {
    fn is_done(&self) -> bool {
        self.ended.get().is_some()
    }

    /// The progress thread keeps the deadline: it begins only when the request is at the head of
    /// the queue.
    fn wait(self: Box<Self>) -> Result<(), Error> {
        self.finish(Duration::MAX)
    }

    fn finish(self: Box<Self>, deadline: Duration) -> Result<(), Error> {
        self.rendezvous.wait(
            deadline,
            |_| self.ended.get().cloned(),
            |state, deadline| Err(state.expire(&self.started, deadline)),
        )
    }
}
