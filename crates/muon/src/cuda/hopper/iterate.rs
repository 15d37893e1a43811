//! The launches that compute the products of an iteration.

use std::sync::Arc;

use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, bail};
use cudarc::driver::result::graph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, CUstreamCaptureStatus};
use cudarc::driver::{CudaFunction, CudaGraph, CudaSlice, CudaStream, DevicePtr, DeviceRepr};

use super::modules::{Grid, Modules, argument, launch, launch_together};
use super::steps::{Maps, Step};
use crate::hopper::schedule::{Launch, Schedule};
use crate::hopper::tiles::Tile;

// SAFETY: `Tile` is laid out as the kernels' struct of the same name, without padding.
unsafe impl DeviceRepr for Tile {}

/// What the kernel works off, laid out as `Work` in `kernels/hopper/products.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Work {
    steps: u64,
    step_count: i32,
    tiles: u64,
    first: u64,
    /// 0 where each launch waits for the one before.
    left: u64,
}

/// The products of a kind of batch.
pub(super) struct Iterate {
    launches: Vec<Part>,
    /// All of them but the last.
    others: Others,
    counts: Counts,
    /// What `work` and `counts` point to.
    _steps: CudaSlice<Step>,
    _tiles: CudaSlice<Tile>,
    _first: CudaSlice<i32>,
    _parts: CudaSlice<u32>,
    _left: CudaSlice<u32>,
}

/// Addresses of the parts of tiles that products have, and have left, `products` of each matrix: none
/// where each launch waits for the one before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counts {
    pub(super) parts: u64,
    pub(super) left: u64,
    pub(super) products: i32,
}

impl Iterate {
    pub(super) fn new(
        device: &CudaDevice,
        modules: &Modules,
        dtype: DType,
        steps: &[Step],
        schedule: &Schedule,
    ) -> Result<Self> {
        let step_count = steps.len() as i32;
        let is_counted = schedule.launches.len() == 1;
        let steps = device.clone_htod(steps)?;
        let tiles = device.clone_htod(&schedule.tiles)?;
        let first = device.clone_htod(&schedule.first)?;
        let parts = device.clone_htod(&schedule.parts)?;
        let left = device.clone_htod(&schedule.parts)?;
        let stream = device.cuda_stream();
        let counts = Counts {
            parts: start(&parts, &stream),
            left: start(&left, &stream),
            products: if is_counted { step_count } else { 0 },
        };
        let left_of_all = if is_counted { counts.left } else { 0 };
        let first_of_all = start(&first, &stream);
        let launch = |launch: &Launch| -> Result<_> {
            let columns = launch.width.kernel();
            let (function, grid) = modules.product(dtype, columns, launch.clusters)?;
            let work = Work {
                steps: start(&steps, &stream),
                step_count,
                tiles: start(&tiles, &stream),
                first: first_of_all + (launch.first_from * size_of::<i32>()) as u64,
                left: left_of_all,
            };
            Ok(Part {
                function,
                grid,
                work,
            })
        };
        let launches = schedule.launches.iter().map(launch);
        Ok(Self {
            launches: launches.collect::<Result<_>>()?,
            others: Others::NotRun,
            counts,
            _steps: steps,
            _tiles: tiles,
            _first: first,
            _parts: parts,
            _left: left,
        })
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// Puts the products on a stream, on which the counts were set before.
    ///
    /// # Safety
    /// The maps are of stacks in the workspace, always the same ones, and of results of their size.
    /// This outlives what was launched.
    pub(super) unsafe fn launch(&mut self, stream: &Arc<CudaStream>, maps: &Maps) -> Result<()> {
        let Some((last, others)) = self.launches.split_last() else {
            return Ok(());
        };
        // Within a capture of the caller's, the launches become a part of that.
        let idle = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let is_idle = others.is_empty() || stream.capture_status().w()? == idle;
        // SAFETY: as the caller promises.
        unsafe {
            match &self.others {
                Others::Captured(graph) if is_idle => replay(graph, stream)?,
                Others::RunOnce if is_idle => {
                    let graph = capture(others, stream, maps)?;
                    replay(&graph, stream)?;
                    self.others = Others::Captured(graph);
                }
                _ => {
                    others
                        .iter()
                        .try_for_each(|part| part.launch(stream, maps))?;
                    if !others.is_empty() {
                        self.others = Others::RunOnce;
                    }
                }
            }
            last.launch(stream, maps)
        }
    }
}

/// One of the launches.
struct Part {
    function: CudaFunction,
    grid: Grid,
    work: Work,
}

impl Part {
    /// # Safety
    /// As [`Iterate::launch`].
    unsafe fn launch(&self, stream: &CudaStream, maps: &Maps) -> Result<()> {
        let mut arguments = [argument(maps), argument(&self.work)];
        // SAFETY: `newton_schulz_iterate_*(maps, work)`: `first` has an entry more than there are
        // clusters, and the kernels store within the maps and take from the counts. With counts all
        // clusters run at once.
        unsafe {
            if self.work.left == 0 {
                launch(stream, &self.function, self.grid, &mut arguments)
            } else {
                launch_together(stream, &self.function, self.grid, &mut arguments)
            }
        }
    }
}

/// All launches but the last, whose results lie elsewhere each time, as one graph: a device starts a
/// graph's kernels sooner after each other, and a host does it in one call. That is worth its making
/// from the second run on.
enum Others {
    NotRun,
    RunOnce,
    Captured(CudaGraph),
}

/// On a stream of its own: what another thread launches on the device's stream meanwhile must run, not
/// be recorded.
///
/// # Safety
/// As [`Iterate::launch`].
unsafe fn capture(parts: &[Part], stream: &CudaStream, maps: &Maps) -> Result<CudaGraph> {
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let private = stream.context().new_stream().w()?;
    private.begin_capture(mode).w()?;
    // SAFETY: as the caller promises.
    let launched = parts
        .iter()
        .try_for_each(|part| unsafe { part.launch(&private, maps) });
    // A capture that has begun must be ended, whatever happened in it.
    let graph = private.end_capture(CUgraphInstantiate_flags(0)).w();
    launched?;
    match graph? {
        Some(graph) => Ok(graph),
        None => bail!("a capture of {} launches is empty", parts.len()),
    }
}

/// # Safety
/// As [`Iterate::launch`].
unsafe fn replay(graph: &CudaGraph, stream: &CudaStream) -> Result<()> {
    // SAFETY: the graph is whole, and what it works on lives, as the caller promises.
    unsafe { graph::launch(graph.cu_graph_exec(), stream.cu_stream()) }.w()
}

/// The address of a slice, which stands for as long as the slice does.
fn start<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> u64 {
    let (address, _read) = slice.device_ptr(stream);
    address
}
