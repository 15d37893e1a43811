//! The launches of a call, as one graph where they come again.

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

/// What was launched last, and the graph of it: a device starts a graph's kernels sooner after each
/// other, and a host does it in one call. That is worth its making from the second time on, of more than
/// a few kernels.
#[derive(Default)]
pub(super) struct Replay {
    last: Vec<Rc<Kernel>>,
    graph: Option<Captured>,
}

/// With so few there is no graph.
const FEW: usize = 5;

impl Replay {
    /// Puts kernels on a stream, one after the other. They may differ from the last ones in anything, but
    /// are replayed where they differ in arguments alone.
    ///
    /// # Safety
    /// Each may be launched, now or later, until others were put.
    pub(super) unsafe fn put(
        &mut self,
        stream: &Arc<CudaStream>,
        kernels: Vec<Rc<Kernel>>,
    ) -> Result<()> {
        let is_again = self.last.len() == kernels.len()
            && self.last.iter().zip(&kernels).all(|(a, b)| a.is_like(b));
        // Within a capture of the caller's, the launches become a part of that.
        let idle = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let is_replayed = is_again && kernels.len() > FEW && stream.capture_status().w()? == idle;
        if !is_replayed {
            if !is_again && self.graph.is_some() {
                // A graph may only go when it is idle.
                stream.synchronize().w()?;
                self.graph = None;
            }
            for kernel in &kernels {
                // SAFETY: as the caller promises.
                unsafe { kernel.launch(stream) }?;
            }
        } else if let Some(graph) = &self.graph {
            for (i, (last, kernel)) in self.last.iter().zip(&kernels).enumerate() {
                if !Rc::ptr_eq(last, kernel) && !last.has_arguments_of(kernel) {
                    graph.change(i, kernel)?;
                }
            }
            // SAFETY: as the caller promises.
            unsafe { graph.launch(stream) }?;
        } else {
            // SAFETY: as the caller promises.
            unsafe {
                let graph = Captured::new(&kernels, stream)?;
                graph.launch(stream)?;
                self.graph = Some(graph);
            }
        }
        self.last = kernels;
        Ok(())
    }
}

struct Captured {
    graph: CudaGraph,
    /// Those of the kernels, in their order.
    nodes: Vec<(CUgraphNode, CUDA_KERNEL_NODE_PARAMS)>,
}

impl Captured {
    /// On a stream of its own: what another thread launches on the device's stream meanwhile must run, not
    /// be recorded.
    ///
    /// # Safety
    /// The kernels may be launched.
    unsafe fn new(kernels: &[Rc<Kernel>], stream: &CudaStream) -> Result<Self> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let private = stream.context().new_stream().w()?;
        private.begin_capture(mode).w()?;
        // SAFETY: as the caller promises.
        let launched = kernels
            .iter()
            .try_for_each(|kernel| unsafe { kernel.launch(&private) });
        // A capture that has begun must be ended, whatever happened in it.
        let graph = private.end_capture(CUgraphInstantiate_flags(0)).w();
        launched?;
        let Some(graph) = graph? else {
            bail!("a capture of {} kernels is empty", kernels.len());
        };
        let all = nodes(&graph)?;
        let of_kernel = |kernel: &Rc<Kernel>| {
            // SAFETY: the graph lives.
            let node = all
                .iter()
                .find(|(_, node)| unsafe { kernel.is_of_node(node) });
            match node {
                Some(node) => Ok(*node),
                None => bail!(
                    "a kernel is not in the graph of {} that it was captured in",
                    all.len()
                ),
            }
        };
        let nodes = kernels.iter().map(of_kernel).collect::<Result<_>>()?;
        Ok(Self { graph, nodes })
    }

    /// Gives a kernel other arguments from the next launch on. What was launched before keeps its own.
    fn change(&self, index: usize, kernel: &Kernel) -> Result<()> {
        let (node, params) = &self.nodes[index];
        let changed = kernel.with_arguments(|arguments| {
            let params = CUDA_KERNEL_NODE_PARAMS {
                kernelParams: arguments,
                ..*params
            };
            // SAFETY: the node is of this graph and of this kernel, whose arguments are copied.
            unsafe {
                let exec = self.graph.cu_graph_exec();
                cuGraphExecKernelNodeSetParams_v2(exec, *node, &raw const params)
            }
        });
        changed.result().w()
    }

    /// # Safety
    /// The kernels may be launched.
    unsafe fn launch(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: the graph is whole, and its kernels may be launched, as the caller promises.
        unsafe { graph::launch(self.graph.cu_graph_exec(), stream.cu_stream()) }.w()
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
        // SAFETY: the node is a kernel's. What it launches is written where the call succeeds; the graph
        // keeps what that points to.
        unsafe {
            cuGraphKernelNodeGetParams_v2(node, params.as_mut_ptr())
                .result()
                .w()?;
            Ok((node, params.assume_init()))
        }
    };
    nodes.into_iter().map(with_params).collect()
}
