//! The kernels of a call, as one graph where they come again.

use std::mem::MaybeUninit;
use std::rc::Rc;
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::{Result, bail};
use cudarc::driver::result::graph;
use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS, CUgraphInstantiate_flags, CUgraphNode, CUstreamCaptureMode,
    CUstreamCaptureStatus, cuGraphExecKernelNodeSetParams_v2, cuGraphGetNodes,
    cuGraphKernelNodeGetParams_v2,
};
use cudarc::driver::{CudaGraph, CudaStream};

use super::kernel::Kernel;

/// So few kernels follow each other as soon on a stream as in a graph, which keeps the next call waiting.
const FEW: usize = 5;
/// Graphs that are kept: of matrices and results in other dtypes, or at other alignments.
const MOST_GRAPHS: usize = 4;

/// Graphs of what was put on a stream: a device starts a graph's kernels sooner after each other, and a
/// host does it in one call. That is worth its making from the second time on.
#[derive(Default)]
pub(super) struct Replay {
    /// What was launched last without a graph.
    last: Vec<Rc<Kernel>>,
    /// The latest made last.
    graphs: Vec<Captured>,
}

impl Replay {
    /// Puts kernels on a stream, one after the other. Those that differ from earlier ones in arguments
    /// alone are replayed.
    ///
    /// # Safety
    /// Each may be launched now. None is launched later with these arguments.
    pub(super) unsafe fn put(
        &mut self,
        stream: &Arc<CudaStream>,
        kernels: Vec<Rc<Kernel>>,
    ) -> Result<()> {
        // Within a capture of the caller's, the launches become a part of that.
        let idle = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        if kernels.len() <= FEW || stream.capture_status().w()? != idle {
            // SAFETY: as the caller promises.
            return unsafe { launch_all(&kernels, stream) };
        }
        if let Some(index) = self.graphs.iter().position(|graph| graph.is_of(&kernels)) {
            // SAFETY: as the caller promises.
            let replayed = unsafe { self.graphs[index].replay(&kernels) };
            if replayed.is_err() {
                // Which arguments it has now is not known.
                self.graphs.remove(index);
            }
            return replayed;
        }
        if are_like(self.last.iter(), &kernels) {
            if self.graphs.len() == MOST_GRAPHS {
                self.graphs.remove(0);
            }
            // SAFETY: as the caller promises.
            unsafe {
                let mut graph = Captured::new(&kernels, stream)?;
                graph.replay(&kernels)?;
                self.graphs.push(graph);
            }
            return Ok(());
        }
        // SAFETY: as the caller promises.
        unsafe { launch_all(&kernels, stream) }?;
        self.last = kernels;
        Ok(())
    }
}

/// # Safety
/// The kernels may be launched.
unsafe fn launch_all(kernels: &[Rc<Kernel>], stream: &CudaStream) -> Result<()> {
    // SAFETY: as the caller promises.
    let mut launches = kernels
        .iter()
        .map(|kernel| unsafe { kernel.launch(stream) });
    launches.try_for_each(|launched| launched)
}

/// Whether they differ in arguments alone.
fn are_like<'a>(a: impl ExactSizeIterator<Item = &'a Rc<Kernel>>, b: &[Rc<Kernel>]) -> bool {
    a.len() == b.len() && a.zip(b).all(|(a, b)| a.is_like(b))
}

struct Captured {
    graph: CudaGraph,
    stream: Arc<CudaStream>,
    /// In the order in which they run.
    nodes: Vec<Node>,
}

struct Node {
    node: CUgraphNode,
    /// The graph keeps what they point to.
    params: CUDA_KERNEL_NODE_PARAMS,
    /// What is launched the next time, if nothing is changed.
    kernel: Rc<Kernel>,
}

impl Captured {
    /// Captures them on a stream of their own: what another thread launches on the device's stream meanwhile
    /// must run, not be recorded.
    ///
    /// # Safety
    /// The kernels may be launched.
    unsafe fn new(kernels: &[Rc<Kernel>], stream: &Arc<CudaStream>) -> Result<Self> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let private = stream.context().new_stream().w()?;
        private.begin_capture(mode).w()?;
        // SAFETY: as the caller promises.
        let launched = unsafe { launch_all(kernels, &private) };
        // A capture that has begun must be ended, whatever happened in it.
        let graph = private.end_capture(CUgraphInstantiate_flags(0)).w();
        launched?;
        let Some(graph) = graph? else {
            bail!("a capture of {} kernels is empty", kernels.len());
        };
        let mut found = nodes(&graph)?;
        let of_kernel = |kernel: &Rc<Kernel>| {
            // SAFETY: the graph lives, and was captured of these kernels.
            let is_its = |(_, params): &(_, _)| unsafe { kernel.is_of_node(params) };
            let Some(index) = found.iter().position(is_its) else {
                bail!("one of {} kernels is not in their graph", kernels.len());
            };
            let (node, params) = found.swap_remove(index);
            Ok(Node {
                node,
                params,
                kernel: Rc::clone(kernel),
            })
        };
        let nodes = kernels.iter().map(of_kernel).collect::<Result<_>>()?;
        Ok(Self {
            graph,
            stream: Arc::clone(stream),
            nodes,
        })
    }

    /// Whether it is of such kernels, with whatever arguments.
    fn is_of(&self, kernels: &[Rc<Kernel>]) -> bool {
        are_like(self.nodes.iter().map(|node| &node.kernel), kernels)
    }

    /// Launches it with the arguments of these kernels, which it is of.
    ///
    /// # Safety
    /// The kernels may be launched.
    unsafe fn replay(&mut self, kernels: &[Rc<Kernel>]) -> Result<()> {
        let exec = self.graph.cu_graph_exec();
        for (node, kernel) in self.nodes.iter_mut().zip(kernels) {
            if Rc::ptr_eq(&node.kernel, kernel) || node.kernel.has_arguments_of(kernel) {
                continue;
            }
            let changed = kernel.with_arguments(|arguments| {
                let params = CUDA_KERNEL_NODE_PARAMS {
                    kernelParams: arguments,
                    ..node.params
                };
                // SAFETY: the node is of this graph, and launches the same kernel, whose arguments are
                // copied. What was launched before keeps its own.
                unsafe { cuGraphExecKernelNodeSetParams_v2(exec, node.node, &raw const params) }
            });
            changed.result().w()?;
            node.kernel = Rc::clone(kernel);
        }
        // SAFETY: the graph is whole, and its kernels may be launched, as the caller promises.
        unsafe { graph::launch(exec, self.stream.cu_stream()) }.w()
    }
}

impl Drop for Captured {
    /// Waits: a graph may only go when it is idle.
    fn drop(&mut self) {
        // Of an error, the next use of the stream tells as well.
        let _ = self.stream.synchronize();
    }
}

/// The nodes of a graph of kernels, in any order, and what they launch.
fn nodes(graph: &CudaGraph) -> Result<Vec<(CUgraphNode, CUDA_KERNEL_NODE_PARAMS)>> {
    let mut count = 0;
    // SAFETY: without room for nodes it asks for their number alone.
    unsafe { cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut count) }
        .result()
        .w()?;
    let mut nodes: Vec<CUgraphNode> = vec![std::ptr::null_mut(); count];
    // SAFETY: there is room for so many.
    unsafe { cuGraphGetNodes(graph.cu_graph(), nodes.as_mut_ptr(), &raw mut count) }
        .result()
        .w()?;
    let with_params = |node: CUgraphNode| {
        let mut params = MaybeUninit::uninit();
        // SAFETY: the node is a kernel's. What it launches is written where the call succeeds.
        unsafe {
            cuGraphKernelNodeGetParams_v2(node, params.as_mut_ptr())
                .result()
                .w()?;
            Ok((node, params.assume_init()))
        }
    };
    nodes.into_iter().map(with_params).collect()
}
