//! A kind of batch, made ready once: its products with their tiles and tensor maps, and their graph.

use std::sync::Arc;

use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Tensor, WithDType, bail};
use cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode, CUstreamCaptureStatus, CUtensorMap,
};
use cudarc::driver::{
    CudaFunction, CudaGraph, CudaSlice, CudaStream, CudaViewMut, DevicePtr, DevicePtrMut,
    DeviceRepr,
};

use super::Kind;
use super::edges::Edges;
use super::maps::Stack;
use super::modules::{Grid, Modules, argument, launch};
use crate::cuda::element::Element;
use crate::hopper::{
    Batch, Buffer, Deal, Product, Region, Scalars, Tile, Width, Workspace, program,
};

/// Threads of a block of a product: two warpgroups that compute and one that loads.
const THREADS: u32 = 384;

// SAFETY: `Tile` is laid out as the kernels' struct of the same name, without padding.
unsafe impl DeviceRepr for Tile {}

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

/// A product as the kernels take it.
struct Launch {
    function: CudaFunction,
    grid: Grid,
    maps: [CUtensorMap; 3],
    tiles: u64,
    first: u64,
    k_blocks: i32,
    scalars: Scalars,
}

/// What the kernels compute, by their names.
#[derive(Debug, Clone, Copy)]
enum Op {
    Symmetric,
    Apply,
    ApplyTransposed,
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
            return graph.launch().w();
        }
        // Within a capture of the caller's, the products become a part of that.
        let idle = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let again = matches!(self.graph, Graph::RunOnce);
        if as_graph && again && self.stream.capture_status().w()? == idle {
            let graph = self.capture()?;
            graph.launch().w()?;
            self.graph = Graph::Captured(graph);
            return Ok(());
        }
        self.launch_all()?;
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
            return self.launch(product, &d.map(dtype)?);
        }
        self.launch(product, &product.maps[2])?;
        // SAFETY: the length was checked.
        unsafe {
            self.edges
                .unpad(&self.stream, *padded, to, dtype == DType::F32)
        }
    }

    fn capture(&self) -> Result<CudaGraph> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).w()?;
        let launched = self.launch_all();
        // A capture that has begun must be ended, whatever happened in it.
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0)).w();
        launched?;
        match graph? {
            Some(graph) => Ok(graph),
            None => bail!("a capture of {} launches is empty", self.launches.len()),
        }
    }

    fn launch_all(&self) -> Result<()> {
        let mut launches = self.launches.iter();
        launches.try_for_each(|product| self.launch(product, &product.maps[2]))
    }

    /// A product with its result in `d`.
    fn launch(&self, product: &Launch, d: &CUtensorMap) -> Result<()> {
        let [a, b, _] = &product.maps;
        let mut arguments = [
            argument(a),
            argument(b),
            argument(d),
            argument(&product.tiles),
            argument(&product.first),
            argument(&product.k_blocks),
            argument(&product.scalars),
        ];
        // SAFETY: `newton_schulz_*(a, b, d, tiles, first, k_blocks, scalars)`: the maps are of stacks
        // in the workspace or of results of their size, d is neither a nor b, `first` has an entry
        // more than there are clusters, and the kernels store within their maps.
        unsafe {
            launch(
                &self.stream,
                &product.function,
                product.grid,
                &mut arguments,
            )
        }
    }
}

/// A product of stacks at their addresses.
struct Step {
    op: Op,
    region: Region,
    a: Stack,
    b: Stack,
    d: Stack,
    scalars: Scalars,
}

/// The stacks of a workspace.
struct Stacks {
    base: u64,
    batch: Batch,
    workspace: Workspace,
}

impl Stacks {
    /// All matrices of a stack, tall ones as their transposes.
    fn all(&self, buffer: Buffer) -> Stack {
        let Batch { n, m, .. } = self.batch;
        let cols = match buffer {
            Buffer::X | Buffer::Y => m,
            _ => n,
        };
        Stack {
            address: self.base + self.workspace.start(buffer) as u64,
            count: self.batch.count(),
            rows: n,
            cols,
        }
    }

    /// The last product's results: wide ones, and behind them tall ones, no longer transposed.
    fn results(&self, buffer: Buffer) -> [Stack; 2] {
        let Batch { n, m, wide, tall } = self.batch;
        let wide_results = self.all(buffer).take(wide);
        let tall_results = Stack {
            address: wide_results.address + (wide * wide_results.matrix_bytes()) as u64,
            count: tall,
            rows: m,
            cols: n,
        };
        [wide_results, tall_results]
    }

    /// The products of a program, and the last one, in which wide and tall matrices are computed
    /// apart, the latter with transposed results.
    fn steps(&self, program: &[Product]) -> (Vec<Step>, [Option<Step>; 2]) {
        let Batch { n, m, wide, .. } = self.batch;
        let full = Region::Full { rows: n, cols: m };
        let (last, others) = program.split_last().expect("an iteration has a step");
        let step = |product: &Product| {
            let (op, region) = if product.is_symmetric() {
                (Op::Symmetric, Region::Symmetric { n })
            } else {
                (Op::Apply, full)
            };
            Step {
                op,
                region,
                a: self.all(product.a),
                b: self.all(product.b),
                d: self.all(product.d),
                scalars: product.scalars,
            }
        };
        let (a, b) = (self.all(last.a), self.all(last.b));
        let [wide_results, tall_results] = self.results(last.d);
        let part = |op, a, b, d: Stack| {
            (d.count > 0).then_some(Step {
                op,
                region: full,
                a,
                b,
                d,
                scalars: last.scalars,
            })
        };
        let last = [
            part(Op::Apply, a.take(wide), b.take(wide), wide_results),
            part(
                Op::ApplyTransposed,
                a.skip(wide),
                b.skip(wide),
                tall_results,
            ),
        ];
        (others.iter().map(step).collect(), last)
    }
}

/// All tiles of a kind of batch, one list behind the other.
struct Deals {
    clusters: usize,
    known: Vec<Dealt>,
    tiles: Vec<Tile>,
    first: Vec<i32>,
}

/// A deal, and where it lies in the lists of all.
struct Dealt {
    region: Region,
    count: usize,
    width: Width,
    clusters: usize,
    tiles_from: usize,
    first_from: usize,
}

impl Deals {
    fn new(clusters: usize) -> Self {
        Self {
            clusters,
            known: Vec::new(),
            tiles: Vec::new(),
            first: Vec::new(),
        }
    }

    /// Deals a region of so many matrices, unless it is known.
    fn add(&mut self, region: Region, count: usize) {
        let known = |dealt: &Dealt| dealt.region == region && dealt.count == count;
        if self.known.iter().any(known) {
            return;
        }
        let deal = Deal::new(region, count, self.clusters);
        self.known.push(Dealt {
            region,
            count,
            width: deal.width,
            clusters: deal.clusters(),
            tiles_from: self.tiles.len(),
            first_from: self.first.len(),
        });
        self.tiles.extend(deal.tiles);
        self.first.extend(deal.first);
    }

    fn of(&self, region: Region, count: usize) -> &Dealt {
        let same = |dealt: &&Dealt| dealt.region == region && dealt.count == count;
        let known = self.known.iter().find(same);
        known.expect("the regions of all products are dealt first")
    }
}

impl Launch {
    /// `tiles` and `first` are the addresses of the lists of all deals.
    fn new(
        modules: &Modules,
        dtype: DType,
        step: &Step,
        dealt: &Dealt,
        tiles: u64,
        first: u64,
    ) -> Result<Self> {
        let op = match step.op {
            Op::Symmetric => "symmetric",
            Op::Apply => "apply",
            Op::ApplyTransposed => "apply_transposed",
        };
        let columns = dealt.width.kernel();
        let name = format!("newton_schulz_{op}_{}_{columns}", dtype.as_str());
        let shared_bytes = match columns {
            256 => 230_464,
            128 => 230_496,
            _ => 230_528,
        };
        Ok(Self {
            function: modules.product(&name, shared_bytes)?,
            grid: Grid {
                blocks: (2 * dealt.clusters as u32, 1),
                threads: THREADS,
                shared_bytes,
            },
            maps: [step.a.map(dtype)?, step.b.map(dtype)?, step.d.map(dtype)?],
            tiles: tiles + (dealt.tiles_from * size_of::<Tile>()) as u64,
            first: first + (dealt.first_from * size_of::<i32>()) as u64,
            k_blocks: step.a.cols.div_ceil(64) as i32,
            scalars: step.scalars,
        })
    }
}
