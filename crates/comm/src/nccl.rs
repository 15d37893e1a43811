//! The backend of many processes: each rank has a process and a GPU, and NCCL moves the data.

mod device;
mod engine;
mod marks;
mod memory;
mod raw;
mod sys;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::Device;
use cudarc::driver::result::stream::get_priority_range;
use cudarc::driver::{CudaStream, DriverError};
use polarshard_partition::{Digest, Rank, WorldSize};

use self::engine::{Engine, Job, Progress};
use self::marks::{Mark, Marks};
use self::raw::{Id, Raw};
use self::sys::Library;
use crate::launch::Launch;
use crate::tether::{Link, Tether};
use crate::{
    Called, Communicator, Completion, Departure, Error, Invalid, Pause, Pending, Request,
    SetupError, Started,
};

pub use device::{device, device_count};

/// How long a communicator that is dropped may take to abort, before it is left to itself.
const ABORT: Duration = Duration::from_secs(10);

/// How often the set-up is looked after.
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
/// let device = nccl::device(launch.local_rank())?;
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
            streams,
        } = parts;
        let link = Arc::clone(tether.link());
        let engine = Engine::new(raw, streams, jobs, link, deadline);
        let context = Arc::clone(compute.context());
        let rank = tether.rank();
        let engine = thread::Builder::new()
            .name(format!("nccl-{rank}"))
            .spawn(move || {
                // What goes wrong here does so again at the first call that needs it.
                let _ = context.bind_to_thread();
                engine.run();
            })
            .map_err(|e| SetupError::Backend {
                rank,
                message: e.to_string(),
            })?;
        Ok(Self {
            device: device.clone(),
            marks: Marks::new(compute.context()),
            compute,
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

/// The end of a job, seen from the rank's own thread.
#[derive(Debug)]
struct InFlight {
    started: Started,
    progress: Arc<Progress>,
    link: Arc<Link>,
    /// candle's stream, if the buffer is on the device.
    compute: Option<Arc<CudaStream>>,
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
        let found = |_: &mut _| {
            let ended = ended.get().cloned();
            ended.or_else(|| issued.get().map(|_| Ok(())))
        };
        self.link.wait(Duration::MAX, found, |_| Ok(()))?;
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
        let found = |_: &mut _| self.progress.ended.get().cloned().map(Some);
        let ended = self.link.wait(deadline, found, |_| None);
        ended.unwrap_or_else(|| Err(self.link.expire(&self.started, deadline)))
    }
}

/// What a world of NCCL is made of.
struct Parts {
    raw: Raw,
    /// candle's stream.
    compute: Arc<CudaStream>,
    /// The communicator's, and the one that brings buffers of the host to the device and back.
    streams: [Arc<CudaStream>; 2],
}

impl Parts {
    fn make(tether: &Tether, device: &Device, deadline: Duration) -> Result<Self, SetupError> {
        let begun = Instant::now();
        let rank = tether.rank();
        let failed = |e: &dyn std::fmt::Display| SetupError::Backend {
            rank,
            message: e.to_string(),
        };
        let library = Library::get()?;
        let compute = device::stream_of(device)?;
        let context = compute.context();
        context.bind_to_thread().map_err(|e| failed(&e))?;
        // Communication goes first where it competes: others wait for it.
        let (_, greatest) = get_priority_range().map_err(|e| failed(&e))?;
        let stream = context.new_stream_with_priority(greatest);
        let stream = stream.map_err(|e| failed(&e))?;
        let side = context.new_stream().map_err(|e| failed(&e))?;

        let mine = match rank {
            Rank(0) => Some(Id::new(library).map_err(|e| failed(&e))?.to_bytes()),
            _ => None,
        };
        let id = tether.hand_out(mine, deadline)?;
        let id = Id::from_bytes(&id).ok_or_else(|| failed(&"rank 0's id is none of NCCL's"))?;
        let raw = Raw::init(library, id, rank, tether.world()).map_err(|e| failed(&e))?;
        while !raw.poll().map_err(|e| failed(&e))? {
            if let Some(error) = tether.link().setup_failure() {
                return Err(error);
            }
            if begun.elapsed() >= deadline {
                return Err(failed(&format_args!(
                    "ncclCommInitRankConfig is not done within {deadline:?}"
                )));
            }
            thread::sleep(POLL);
        }
        Ok(Self {
            raw,
            compute,
            streams: [stream, side],
        })
    }
}
