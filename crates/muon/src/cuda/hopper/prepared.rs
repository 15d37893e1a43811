//! A kind of batch, made ready once: its products with their tiles and tensor maps, and their graph.

use std::sync::Arc;

use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Tensor, WithDType, bail};
use cudarc::driver::result::graph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, CUstreamCaptureStatus};
use cudarc::driver::{CudaGraph, CudaSlice, CudaStream, CudaViewMut, DevicePtr, DevicePtrMut};

use super::Kind;
use super::edges::Edges;
use super::maps::Stack;
use super::modules::Modules;
use super::products::{Deals, Launch};
use super::steps::{Stacks, Step};
use crate::cuda::element::Element;
use crate::hopper::program::{Buffer, program};
use crate::hopper::tiles::Tile;
use crate::hopper::workspace::{Batch, Workspace};

/// A kind of batch in a workspace. It refers to the workspace, which must outlive its use.
pub(super) struct Prepared {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    edges: Edges,
    dtype: DType,
    /// All products but the last.
    launches: Vec<Launch>,
    /// The last product of wide and of tall matrices, and its results in the workspace.
    last: [Option<(Launch, Stack)>; 2],
    /// What `launches` point to.
    _tiles: CudaSlice<Tile>,
    _first: CudaSlice<i32>,
    graph: Graph,
}

/// All products but the last as one graph, which is worth its making from the second run on.
enum Graph {
    NotRun,
    RunOnce,
    Captured(CudaGraph),
}

impl Prepared {
    /// The products of a kind of batch in a workspace at `base`, for so many clusters at once.
    pub(super) fn new(
        device: &CudaDevice,
        modules: &Modules,
        kind: &Kind,
        base: u64,
        clusters: usize,
    ) -> Result<Self> {
        let batch = kind.batch;
        let stacks = Stacks {
            base,
            batch,
            workspace: Workspace::new(kind.method, batch),
        };
        let (steps, last) = stacks.steps(&program(kind.method, &kind.coefficients));
        let mut deals = Deals::new(clusters);
        for step in steps.iter().chain(last.iter().flatten()) {
            deals.add(step.region, step.d.count);
        }
        let tiles = device.clone_htod(&deals.tiles)?;
        let first = device.clone_htod(&deals.first)?;
        let stream = device.cuda_stream();
        let (tiles_at, first_at) = {
            let (tiles, _read) = tiles.device_ptr(&stream);
            let (first, _read) = first.device_ptr(&stream);
            (tiles, first)
        };
        let launch = |step: &Step| {
            let dealt = deals.of(step.region, step.d.count);
            Launch::new(modules, kind.dtype, step, dealt, tiles_at, first_at)
        };
        let launches = steps.iter().map(launch).collect::<Result<Vec<_>>>()?;
        let last_launch = |step: &Option<Step>| -> Result<Option<_>> {
            let step = step.as_ref();
            step.map(|step| Ok((launch(step)?, step.d))).transpose()
        };
        let last = [last_launch(&last[0])?, last_launch(&last[1])?];
        let parts = base + stacks.workspace.parts as u64;
        let x = stacks.all(Buffer::X);
        Ok(Self {
            edges: Edges::new(modules, kind.dtype, x, (parts, batch.parts()))?,
            dtype: kind.dtype,
            device: device.clone(),
            stream,
            launches,
            last,
            _tiles: tiles,
            _first: first,
            graph: Graph::NotRun,
        })
    }

    /// Normalizes contiguous matrices into the workspace.
    pub(super) fn normalize(&self, wide: &[Tensor], tall: &[Tensor]) -> Result<()> {
        self.stream.context().bind_to_thread().w()?;
        self.edges.normalize(&self.device, wide, tall)
    }

    /// Runs all products but the last, as a graph where that is asked for.
    pub(super) fn iterate(&mut self, as_graph: bool) -> Result<()> {
        if let Graph::Captured(graph) = &self.graph
            && as_graph
        {
            return self.replay(graph);
        }
        // Within a capture of the caller's, the products become a part of that.
        let idle = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let again = matches!(self.graph, Graph::RunOnce);
        if as_graph && again && self.stream.capture_status().w()? == idle {
            let graph = self.capture()?;
            self.replay(&graph)?;
            self.graph = Graph::Captured(graph);
            return Ok(());
        }
        self.launch_all(&self.stream)?;
        if matches!(self.graph, Graph::NotRun) {
            self.graph = Graph::RunOnce;
        }
        Ok(())
    }

    /// The last product of the wide (0) or the tall (1) matrices, into a contiguous stack of f32 or
    /// of the iteration's dtype. Where there are no such matrices, nothing happens.
    pub(super) fn finish<T: Element + WithDType>(
        &self,
        which: usize,
        results: &mut CudaViewMut<'_, T>,
    ) -> Result<()> {
        let Some((product, padded)) = &self.last[which] else {
            return Ok(());
        };
        let dtype = T::DTYPE;
        if results.len() != padded.count * padded.rows * padded.cols {
            bail!("{} elements of results, for {padded:?}", results.len());
        }
        if dtype != DType::F32 && dtype != self.dtype {
            bail!(
                "the iteration is in {:?}, its results in {dtype:?}",
                self.dtype
            );
        }
        let (to, _write) = results.device_ptr_mut(&self.stream);
        let has_padding = Batch::pitch(padded.cols) != padded.cols;
        if dtype == self.dtype && !has_padding && to.is_multiple_of(16) {
            let d = Stack {
                address: to,
                ..*padded
            };
            return product.launch(&self.stream, Some(&d.map(dtype)?));
        }
        product.launch(&self.stream, None)?;
        // SAFETY: the length was checked.
        unsafe {
            self.edges
                .unpad(&self.stream, *padded, to, dtype == DType::F32)
        }
    }

    /// On a stream of its own: what another thread launches on the device's stream meanwhile must run, not be recorded.
    fn capture(&self) -> Result<CudaGraph> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let private = self.stream.context().new_stream().w()?;
        private.begin_capture(mode).w()?;
        let launched = self.launch_all(&private);
        // A capture that has begun must be ended, whatever happened in it.
        let graph = private.end_capture(CUgraphInstantiate_flags(0)).w();
        launched?;
        match graph? {
            Some(graph) => Ok(graph),
            None => bail!("a capture of {} launches is empty", self.launches.len()),
        }
    }

    fn replay(&self, graph: &CudaGraph) -> Result<()> {
        // SAFETY: the graph is whole, and what it works on lives as long as `self`, which waits for the stream before
        // it goes.
        unsafe { graph::launch(graph.cu_graph_exec(), self.stream.cu_stream()) }.w()
    }

    fn launch_all(&self, stream: &Arc<CudaStream>) -> Result<()> {
        let mut launches = self.launches.iter();
        launches.try_for_each(|product| product.launch(stream, None))
    }
}

impl Drop for Prepared {
    /// Waits for what was launched: a graph and the modules of kernels may only go when they are idle.
    /// It happens where a workspace grows, and at the end of a thread.
    fn drop(&mut self) {
        // Of an error, the next use of the stream tells as well.
        let _ = self.stream.synchronize();
    }
}
