//! A communicator of NCCL that does not block: calls return at once, and [`Raw::poll`] tells when
//! they are done.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::size_of;
use std::ptr;

use cudarc::driver::CudaStream;
use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use polarshard_partition::{Rank, Span, WorldSize};

use super::sys::{Code, Failure, Library, SUCCESS};
use crate::Op;

/// The version whose `ncclConfig_t` this crate is built with.
const CONFIG_VERSION: c_int = 23000;
/// `NCCL_API_MAGIC`.
const CONFIG_MAGIC: c_uint = 0xcafe_beef;
/// `NCCL_CONFIG_UNDEF_INT`: as NCCL pleases.
const UNDEFINED: c_int = c_int::MIN;

/// The number of a communicator that is to be, from rank 0 to all.
#[derive(Debug, Clone, Copy)]
pub(super) struct Id(ncclUniqueId);

impl Id {
    pub(super) fn new(library: &Library) -> Result<Self, Failure> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: it writes one id.
        let code = unsafe { (library.functions.get_unique_id)(&mut id) };
        library.check("ncclGetUniqueId", ptr::null_mut(), code)?;
        Ok(Self(id))
    }

    pub(super) fn to_bytes(self) -> Vec<u8> {
        self.0.internal.iter().map(|&c| c as u8).collect()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; 128] = bytes.try_into().ok()?;
        let internal = bytes.map(|byte| byte as std::ffi::c_char);
        Some(Self(ncclUniqueId { internal }))
    }
}

/// Memory of a device: where it begins, and of what type the elements are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    pub(super) base: u64,
    pub(super) dtype: ncclDataType_t,
    pub(super) bytes: usize,
}

/// One rank's communicator. Dropping it aborts it.
#[derive(Debug)]
pub(super) struct Raw {
    library: &'static Library,
    comm: ncclComm_t,
    rank: Rank,
    world: WorldSize,
}

// SAFETY: NCCL ties no communicator to a thread; it must not be used by two at a time, and there is
// no `Sync`.
unsafe impl Send for Raw {}

impl Raw {
    /// Begins to set a communicator up, on the device that is current; it can be used when
    /// [`poll`](Self::poll) says so, which takes all ranks.
    pub(super) fn init(
        library: &'static Library,
        id: Id,
        rank: Rank,
        world: WorldSize,
    ) -> Result<Self, Failure> {
        let mut config = ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: CONFIG_MAGIC,
            version: CONFIG_VERSION.min(library.version) as c_uint,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: ptr::null(),
            splitShare: UNDEFINED,
            trafficClass: UNDEFINED,
            commName: ptr::null(),
            collnetEnable: UNDEFINED,
            CTAPolicy: UNDEFINED,
            shrinkShare: UNDEFINED,
            nvlsCTAs: UNDEFINED,
            nChannelsPerNetPeer: UNDEFINED,
            nvlinkCentricSched: UNDEFINED,
            graphUsageMode: UNDEFINED,
            numRmaCtx: UNDEFINED,
            maxP2pPeers: UNDEFINED,
        };
        let mut raw = Self {
            library,
            comm: ptr::null_mut(),
            rank,
            world,
        };
        let (size, at) = (world.get() as c_int, rank.0 as c_int);
        // SAFETY: the pointers are valid for the call, and NCCL copies the configuration. It writes
        // the communicator's address before it returns.
        let code = unsafe {
            let init = library.functions.comm_init_rank_config;
            init(&mut raw.comm, size, id.0, at, &mut config)
        };
        raw.check("ncclCommInitRankConfig", code)?;
        Ok(raw)
    }

    /// Whether what was called before is done: nothing else may be called until then.
    pub(super) fn poll(&self) -> Result<bool, Failure> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive as long as `self`; it writes one number.
        let code = unsafe { (self.library.functions.comm_get_async_error)(self.comm, &mut state) };
        self.check("ncclCommGetAsyncError", code)?;
        self.check("the communicator", state)
    }

    /// Begins to put a group of operations on a stream. They are on it when [`poll`](Self::poll) says
    /// so.
    ///
    /// # Safety
    /// The memory holds every span of the operations, on the communicator's device, and stays alive
    /// and is not used otherwise until they are done on the stream, or aborted.
    pub(super) unsafe fn issue(
        &self,
        ops: &[Op],
        memory: Memory,
        stream: &CudaStream,
    ) -> Result<(), Failure> {
        if ops.iter().all(|op| op.span().is_empty()) {
            return Ok(());
        }
        // SAFETY: no requirements; the group is ended below, whatever happens.
        let code = unsafe { (self.library.functions.group_start)() };
        self.check("ncclGroupStart", code)?;
        let issued = ops
            .iter()
            .filter(|op| !op.span().is_empty())
            // SAFETY: the caller's.
            .try_for_each(|op| unsafe { self.issue_one(*op, memory, stream) });
        // SAFETY: the group was started above, by this thread.
        let code = unsafe { (self.library.functions.group_end)() };
        issued?;
        self.check("ncclGroupEnd", code).map(drop)
    }

    /// # Safety
    /// As [`issue`](Self::issue).
    unsafe fn issue_one(&self, op: Op, memory: Memory, stream: &CudaStream) -> Result<(), Failure> {
        const SUM: ncclRedOp_t = ncclRedOp_t::ncclSum;
        let Self { comm, library, .. } = *self;
        let Memory { dtype, .. } = memory;
        let f = &library.functions;
        let stream = stream.cu_stream().cast();
        let at = |span: Span| (memory.base + (span.start * memory.bytes) as u64) as *mut c_void;
        let peer = |rank: Rank| rank.0 as c_int;
        // This rank's part of a span: both of these work in place on it.
        let part = |span: Span| {
            let own = Op::part(span, self.world, self.rank);
            (at(own), own.len())
        };
        // SAFETY: the caller answers for the memory; `self` keeps the communicator alive, and the
        // stream is one of its device. In place is where NCCL's documentation wants it.
        let (call, code) = unsafe {
            match op {
                Op::AllReduce(span) => {
                    let (p, n) = (at(span), span.len());
                    (
                        "ncclAllReduce",
                        (f.all_reduce)(p, p, n, dtype, SUM, comm, stream),
                    )
                }
                Op::Reduce { span, root } => {
                    let (p, n, root) = (at(span), span.len(), peer(root));
                    (
                        "ncclReduce",
                        (f.reduce)(p, p, n, dtype, SUM, root, comm, stream),
                    )
                }
                Op::ReduceScatter(span) => {
                    let (p, (own, n)) = (at(span), part(span));
                    let code = (f.reduce_scatter)(p, own, n, dtype, SUM, comm, stream);
                    ("ncclReduceScatter", code)
                }
                Op::AllGather(span) => {
                    let (p, (own, n)) = (at(span), part(span));
                    (
                        "ncclAllGather",
                        (f.all_gather)(own, p, n, dtype, comm, stream),
                    )
                }
                Op::Broadcast { span, root } => {
                    let (p, n, root) = (at(span), span.len(), peer(root));
                    (
                        "ncclBroadcast",
                        (f.broadcast)(p, p, n, dtype, root, comm, stream),
                    )
                }
                Op::Send { span, to } => {
                    let (p, n) = (at(span), span.len());
                    ("ncclSend", (f.send)(p, n, dtype, peer(to), comm, stream))
                }
                Op::Recv { span, from } => {
                    let (p, n) = (at(span), span.len());
                    ("ncclRecv", (f.recv)(p, n, dtype, peer(from), comm, stream))
                }
            }
        };
        self.check(call, code).map(drop)
    }

    /// Begins to end the communicator in good order, with all ranks; [`destroy`](Self::destroy) it
    /// when [`poll`](Self::poll) says so.
    pub(super) fn finalize(&self) -> Result<(), Failure> {
        // SAFETY: the communicator is alive as long as `self`.
        let code = unsafe { (self.library.functions.comm_finalize)(self.comm) };
        self.check("ncclCommFinalize", code).map(drop)
    }

    /// Frees a communicator that is finalized.
    pub(super) fn destroy(mut self) -> Result<(), Failure> {
        let comm = std::mem::replace(&mut self.comm, ptr::null_mut());
        // SAFETY: `self` has forgotten it: nothing uses it again.
        let code = unsafe { (self.library.functions.comm_destroy)(comm) };
        self.library
            .check("ncclCommDestroy", ptr::null_mut(), code)
            .map(drop)
    }

    fn check(&self, call: &'static str, code: Code) -> Result<bool, Failure> {
        self.library.check(call, self.comm, code)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if !self.comm.is_null() {
            // SAFETY: nothing uses it again. What it says does not matter any more.
            let _ = unsafe { (self.library.functions.comm_abort)(self.comm) };
        }
    }
}
