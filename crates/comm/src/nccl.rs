//! The backend of many processes: each rank has a process and a GPU, and NCCL moves the data.

mod completion;
mod device;
mod engine;
mod flight;
mod marks;
mod memory;
mod parts;
mod raw;
mod sys;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::Device;
use cudarc::driver::{CudaStream, DriverError};
use polarshard_partition::{Digest, Rank, WorldSize};

use self::completion::InFlight;
use self::engine::Engine;
use self::flight::{Job, Progress};
use self::marks::{Mark, Marks};
use self::parts::Parts;
use crate::launch::Launch;
use crate::tether::Tether;
use crate::{
    Called, Communicator, Completion, Departure, Error, Invalid, Pause, Pending, Request,
    SetupError, Started,
};

pub use device::{device, device_count, device_of};

/// How long a communicator that is dropped may take to abort, before it is left to itself.
const ABORT: Duration = Duration::from_secs(10);

/// How often the engine is looked after while it ends.
const POLL: Duration = Duration::from_millis(1);

/// One rank of a world of processes.
///
/// Requests run in order on a stream of their own. They begin when what candle's stream has been given
/// before [`start`](Communicator::start) is done; [`Pending::wait`] makes candle's stream wait for
/// them without blocking the host, but for the moment until NCCL has accepted them. Buffers on the
/// host, control sums, are copied to the device and back, and `wait` blocks for them.
///
/// A thread owns the communicator, looks after it and aborts it: when a request at the head of the
/// stream is not done within the deadline, when a process dies, and when NCCL fails. The
/// [`tether`](crate::tether) finds out who it was, and tells all ranks.
///
/// ```no_run
/// use std::time::Duration;
/// use candle_core::Tensor;
/// use polarshard_comm::{Communicator, Nccl, Request, launch::Launch, nccl};
/// use polarshard_partition::{Class, Digest};
///
/// let launch = Launch::from_env()?.ok_or("started without a launcher")?;
/// let device = nccl::device_of(&launch)?;
/// let deadline = Duration::from_secs(60);
/// let mut comm = Nccl::connect(&launch, &device, Digest(0), deadline)?;
/// let mine = Tensor::ones(1 << 20, candle_core::DType::BF16, &device)?;
/// let sum = comm.start(Request::all_reduce(Class::Gradient, &mine))?.wait()?;
/// println!("{}", (sum + 1.0)?);
/// Box::new(comm).shutdown()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Nccl {
    device: Device,
    /// candle's.
    compute: Arc<CudaStream>,
    marks: Arc<Marks>,
    deadline: Duration,
    /// The next call's sequence number.
    next: u64,
    /// The engine's queue; none when it was told to end.
    jobs: Option<mpsc::Sender<Job>>,
    engine: Option<thread::JoinHandle<()>>,
    tether: Tether,
}

impl Nccl {
    /// Joins the world of `launch`, and blocks until all its ranks have, with the same `digest` of
    /// all that they must have alike. The `device` is one of [`device`], and nothing else is done on
    /// it from another thread meanwhile. The `deadline` is the one of the set-up, and later of every
    /// request.
    ///
    /// # Errors
    /// Those of [`Tether::join`]; [`SetupError::Library`] without NCCL 2.14 or later,
    /// [`SetupError::Device`] for a device that is not right, [`SetupError::Backend`] if NCCL fails,
    /// each of which the other ranks get as [`SetupError::PeerGone`] with the reason.
    pub fn connect(
        launch: &Launch,
        device: &Device,
        digest: Digest,
        deadline: Duration,
    ) -> Result<Self, SetupError> {
        let tether = Tether::join(launch, digest, deadline)?;
        match Parts::make(&tether, device, deadline) {
            Ok(parts) => Self::start_engine(parts, tether, device, deadline),
            Err(error) => {
                tether.leave(Departure::Returned, Some(error.to_string()));
                Err(error)
            }
        }
    }

    fn start_engine(
        parts: Parts,
        tether: Tether,
        device: &Device,
        deadline: Duration,
    ) -> Result<Self, SetupError> {
        let (sender, jobs) = mpsc::channel();
        let Parts {
            raw,
            compute,
            marks,
            stream,
            staging,
        } = parts;
        let link = Arc::clone(tether.link());
        let engine = Engine::new(raw, stream, staging, jobs, link, deadline);
        let context = Arc::clone(compute.context());
        let rank = tether.rank();
        let engine = thread::Builder::new()
            .name(format!("nccl-{rank}"))
            .spawn(move || {
                // What goes wrong here does so again at the first call that needs it.
                let _ = context.bind_to_thread();
                engine.run();
            })
            .map_err(|e| {
                let message = e.to_string();
                tether.leave(Departure::Returned, Some(message.clone()));
                SetupError::Backend { rank, message }
            })?;
        Ok(Self {
            device: device.clone(),
            compute,
            marks,
            deadline,
            next: 0,
            jobs: Some(sender),
            engine: Some(engine),
            tether,
        })
    }

    fn describe(&self, called: Called) -> Started {
        Started {
            rank: self.tether.rank(),
            sequence: self.next,
            called,
        }
    }

    /// Hands a job to the engine.
    fn enqueue(&mut self, started: &Started, job: Job) -> Result<(), Error> {
        self.next += 1;
        let sent = self
            .jobs
            .as_ref()
            .is_some_and(|jobs| jobs.send(job).is_ok());
        if sent {
            return Ok(());
        }
        // It has panicked, and said so.
        Err(self.failure(started, "the communication thread is gone".to_owned()))
    }

    /// What ended the world, which `message` does if nothing has before.
    fn failure(&self, started: &Started, message: String) -> Error {
        self.tether.failure(started).unwrap_or_else(|| {
            let error = Error::Backend {
                started: Box::new(started.clone()),
                message,
            };
            self.tether.fail(&error);
            error
        })
    }

    /// Where candle's stream is now, and what the engine will record.
    fn marks(&self) -> Result<[Mark; 2], DriverError> {
        let ready = self.marks.take()?;
        ready.record(&self.compute)?;
        Ok([ready, self.marks.take()?])
    }

    fn check(&self, request: &Request) -> Result<(), Invalid> {
        request.check(self.world())?;
        let device = request.buffer().device();
        if device.is_cpu() || device.same_device(&self.device) {
            return Ok(());
        }
        Err(Invalid::Device {
            buffer: device.location(),
            own: self.device.location(),
        })
    }
}

impl Communicator for Nccl {
    fn rank(&self) -> Rank {
        self.tether.rank()
    }

    fn world(&self) -> WorldSize {
        self.tether.world()
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }

    fn start(&mut self, request: Request) -> Result<Pending, Error> {
        let started = self.describe(request.called());
        if let Some(error) = self.tether.failure(&started) {
            self.next += 1;
            return Err(error);
        }
        if let Err(reason) = self.check(&request) {
            let started = Box::new(started);
            return Err(Error::Invalid { started, reason });
        }
        if let Err(error) = self.tether.note(&started) {
            self.next += 1;
            return Err(error);
        }
        let marks = self.marks();
        let [ready, issued] = marks.map_err(|e| self.failure(&started, e.to_string()))?;
        let progress = Arc::new(Progress::default());
        let buffer = request.buffer().clone();
        let in_flight = InFlight {
            started: started.clone(),
            progress: Arc::clone(&progress),
            link: Arc::clone(self.tether.link()),
            compute: buffer.device().is_cuda().then(|| Arc::clone(&self.compute)),
        };
        let job = Job::Request {
            started: started.clone(),
            request,
            ready,
            issued,
            progress,
        };
        self.enqueue(&started, job)?;
        Ok(Pending::new(buffer, in_flight))
    }

    fn pause(&self) -> Pause {
        self.tether.pause()
    }

    fn shutdown(mut self: Box<Self>) -> Result<(), Error> {
        let started = self.describe(Called::Shutdown);
        let progress = Arc::new(Progress::default());
        let in_flight = InFlight {
            started: started.clone(),
            progress: Arc::clone(&progress),
            link: Arc::clone(self.tether.link()),
            compute: None,
        };
        let job = Job::Shutdown {
            started: started.clone(),
            progress,
        };
        self.enqueue(&started, job)?;
        Box::new(in_flight).wait()
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let how = if thread::panicking() {
            Departure::Panicked
        } else {
            Departure::Returned
        };
        // After a shutdown nobody listens any more, and the engine has ended.
        self.tether.leave(how, None);
        drop(self.jobs.take());
        let Some(engine) = self.engine.take() else {
            return;
        };
        let begun = Instant::now();
        while !engine.is_finished() && begun.elapsed() < ABORT {
            thread::sleep(POLL);
        }
        if engine.is_finished() {
            // Its panics are caught.
            let _ = engine.join();
        }
    }
}
