//! A communicator that sets marks on candle's stream where requests start and are waited for.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{DType, Device, Tensor};
use polarshard_comm::{Communicator, Completion, Error, Nccl, Op, Pause, Pending, Request, Shared};
use polarshard_partition::{Class, Rank, WorldSize};

/// Elements of a reduction whose time is latency.
const SMALL: usize = 1 << 14;

/// Where in a step a mark is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum At {
    Begin,
    Start(Class),
    /// Before candle's stream waits for a request.
    Wait(Class),
    /// After it has.
    Waited(Class),
    HandedIn,
    End,
}

/// A moment of the device, and when the host passed it.
#[derive(Debug)]
pub(crate) struct Mark {
    pub(crate) at: At,
    pub(crate) event: CudaEvent,
    pub(crate) host: Instant,
}

/// A request without its data.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) class: Class,
    pub(crate) dtype: DType,
    pub(crate) len: usize,
    pub(crate) ops: Vec<Op>,
}

/// Sets marks and remembers requests, while somebody wants them.
#[derive(Debug, Clone)]
pub(crate) struct Clock {
    stream: Arc<CudaStream>,
    notes: Arc<Mutex<Option<Notes>>>,
}

/// What was noted of one step.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    pub(crate) marks: Vec<Mark>,
    pub(crate) asked: Vec<Asked>,
}

impl Notes {
    /// The first moment of a kind.
    pub(crate) fn first(&self, at: At) -> Result<&CudaEvent> {
        let found = self.marks.iter().find(|mark| mark.at == at);
        Ok(&found.context("no such mark was set")?.event)
    }
}

impl Clock {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            stream: device.as_cuda_device()?.cuda_stream(),
            notes: Arc::default(),
        })
    }

    /// An event here on candle's stream.
    pub(crate) fn event(&self) -> Result<CudaEvent> {
        let timed = Some(CUevent_flags::CU_EVENT_DEFAULT);
        Ok(self.stream.record_event(timed)?)
    }

    pub(crate) fn begin(&self) {
        *self.notes() = Some(Notes::default());
        self.mark(At::Begin);
    }

    pub(crate) fn end(&self) -> Result<Notes> {
        self.mark(At::End);
        self.notes().take().context("nothing was begun")
    }

    pub(crate) fn mark(&self, at: At) {
        if let Some(notes) = &mut *self.notes() {
            let event = self.event().expect("a device whose other calls succeed");
            let host = Instant::now();
            notes.marks.push(Mark { at, event, host });
        }
    }

    fn remember(&self, request: &Request) {
        if let Some(notes) = &mut *self.notes() {
            notes.asked.push(Asked {
                class: request.class(),
                dtype: request.buffer().dtype(),
                len: request.buffer().elem_count(),
                ops: request.ops().to_vec(),
            });
        }
    }

    fn notes(&self) -> MutexGuard<'_, Option<Notes>> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One rank's communicator, for several optimizers one after the other: a clone's shutdown waits for the other ranks'
/// and ends nothing.
#[derive(Debug, Clone)]
pub(crate) struct Timed {
    comm: Shared<Nccl>,
    pub(crate) clock: Clock,
    delay: usize,
    scratch: Option<Tensor>,
    /// What is done when a control sum is there.
    after_decision: Arc<Mutex<Option<Stall>>>,
}

/// Long work for the device, and the event after it once it was given.
#[derive(Debug)]
pub(crate) struct Stall {
    pub(crate) factor: Tensor,
    pub(crate) times: usize,
    pub(crate) over: Option<CudaEvent>,
}

impl Stall {
    pub(crate) fn give(&mut self, clock: &Clock) -> Result<()> {
        for _ in 0..self.times {
            self.factor.matmul(&self.factor)?;
        }
        self.over = Some(clock.event()?);
        Ok(())
    }
}

impl Timed {
    pub(crate) fn new(comm: Nccl, device: &Device) -> Result<Self> {
        Ok(Self {
            comm: Shared::new(comm),
            clock: Clock::new(device)?,
            delay: 0,
            scratch: None,
            after_decision: Arc::default(),
        })
    }

    /// The mean of a number over ranks: the same on all of them. Waits for all.
    pub(crate) fn mean(&mut self, value: f64) -> Result<f64> {
        let values = Tensor::new(&[value], &Device::Cpu)?;
        let request = Request::all_reduce(Class::Control, &values);
        let pending = self.comm.start(request)?;
        let sum = pending.finish(self.deadline())?.to_vec1::<f64>()?[0];
        Ok(sum / self.world().get() as f64)
    }

    /// Ends the world; no clone may be left.
    pub(crate) fn end(self) -> Result<()> {
        let comm = self.comm.into_inner().context("a clone is left")?;
        Ok(Box::new(comm).shutdown()?)
    }

    /// Makes reductions slow, those of this clone and of clones made of it later: before each, a small one of no use is
    /// done so many times. It occupies the link but little of the device.
    pub(crate) fn delay(&mut self, times: usize) {
        self.delay = times;
    }

    /// What the device is to do at once after the next decision; gives back what was set before.
    pub(crate) fn stall_after_decision(&self, stall: Option<Stall>) -> Option<Stall> {
        let mut after = self.after_decision.lock().expect("nobody has panicked");
        std::mem::replace(&mut after, stall)
    }

    fn hold_up(&mut self, request: &Request) -> Result<(), Error> {
        if request.class() != Class::Gradient || self.delay == 0 {
            return Ok(());
        }
        let device = request.buffer().device();
        let scratch = self.scratch.take().unwrap_or_else(|| {
            Tensor::zeros(SMALL, DType::F32, device).expect("memory for a small tensor")
        });
        for _ in 0..self.delay {
            let again = Request::all_reduce(Class::Gradient, &scratch);
            drop(self.comm.start(again)?);
        }
        self.scratch = Some(scratch);
        Ok(())
    }
}

impl Communicator for Timed {
    fn rank(&self) -> Rank {
        self.comm.rank()
    }

    fn world(&self) -> WorldSize {
        self.comm.world()
    }

    fn history(&self) -> u64 {
        self.comm.history()
    }

    fn deadline(&self) -> Duration {
        self.comm.deadline()
    }

    fn start(&mut self, request: Request) -> Result<Pending, Error> {
        let class = request.class();
        self.clock.remember(&request);
        self.clock.mark(At::Start(class));
        self.hold_up(&request)?;
        let buffer = request.buffer().clone();
        let watched = Watched {
            pending: self.comm.start(request)?,
            class,
            clock: self.clock.clone(),
            after_decision: Arc::clone(&self.after_decision),
        };
        Ok(Pending::new(buffer, watched))
    }

    fn pause(&self) -> Pause {
        self.comm.pause()
    }

    fn shutdown(self: Box<Self>) -> Result<(), Error> {
        Box::new(self.comm).shutdown()
    }
}

/// The end of a request, with marks around the wait for it.
#[derive(Debug)]
struct Watched {
    pending: Pending,
    class: Class,
    clock: Clock,
    after_decision: Arc<Mutex<Option<Stall>>>,
}

impl Completion for Watched {
    fn is_done(&self) -> bool {
        self.pending.is_done()
    }

    fn wait(self: Box<Self>) -> Result<(), Error> {
        self.clock.mark(At::Wait(self.class));
        self.pending.wait()?;
        self.clock.mark(At::Waited(self.class));
        Ok(())
    }

    fn finish(self: Box<Self>, deadline: Duration) -> Result<(), Error> {
        self.clock.mark(At::Wait(self.class));
        self.pending.finish(deadline)?;
        self.clock.mark(At::Waited(self.class));
        if let Some(stall) = &mut *self.after_decision.lock().expect("nobody has panicked") {
            stall.give(&self.clock).expect("a product on the device");
        }
        Ok(())
    }
}
