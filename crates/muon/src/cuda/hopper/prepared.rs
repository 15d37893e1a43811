//! A kind of batch, made ready once: its products with their tiles and tensor maps.

use std::sync::Arc;

use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Tensor, WithDType, bail};
use cudarc::driver::{CudaStream, CudaViewMut, DevicePtrMut};

use super::Kind;
use super::edges::Edges;
use super::iterate::Iterate;
use super::maps::Stack;
use super::modules::Modules;
use super::replay::Replay;
use super::steps::{Maps, Stacks};
use crate::cuda::element::Element;
use crate::hopper::program::{Buffer, program};
use crate::hopper::schedule::Schedule;
use crate::hopper::workspace::{Batch, Workspace};

/// A kind of batch in a workspace. It refers to the workspace, which must outlive its use.
pub(super) struct Prepared {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    dtype: DType,
    edges: Edges,
    iterate: Iterate,
    replay: Replay,
    maps: Maps,
    /// The results of wide and of tall matrices in the workspace.
    results: [Stack; 2],
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
        let program = program(kind.method, &kind.coefficients);
        let schedule = Schedule::new(&program, batch, clusters);
        let steps = stacks.steps(&program);
        let results = stacks.results(&program);
        let maps = stacks.maps(results, kind.dtype)?;
        let iterate = Iterate::new(
            device, modules, kind.dtype, &program, &steps, &schedule, &maps,
        )?;
        let parts = base + stacks.workspace.parts as u64;
        let x = stacks.all(Buffer::X);
        Ok(Self {
            edges: Edges::new(
                device,
                modules,
                kind.dtype,
                x,
                (parts, batch.parts()),
                iterate.counts(),
            )?,
            dtype: kind.dtype,
            device: device.clone(),
            stream: device.cuda_stream(),
            iterate,
            replay: Replay::default(),
            maps,
            results,
        })
    }

    /// Orthogonalizes contiguous matrices into a contiguous stack of wide and one of tall ones, of f32
    /// or of the iteration's dtype.
    pub(super) fn run<T: Element + WithDType>(
        &mut self,
        wide: &[Tensor],
        tall: &[Tensor],
        results: [Option<CudaViewMut<'_, T>>; 2],
    ) -> Result<()> {
        self.stream.context().bind_to_thread().w()?;
        let mut kernels = self.edges.normalize(&self.device, wide, tall)?;
        let dtype = T::DTYPE;
        if dtype != DType::F32 && dtype != self.dtype {
            bail!(
                "the iteration is in {:?}, its results in {dtype:?}",
                self.dtype
            );
        }
        let mut results = results;
        let mut maps = self.maps;
        let mut written = Vec::new();
        let mut padded = Vec::new();
        for (which, results) in results.iter_mut().enumerate() {
            let stack = self.results[which];
            let len = results.as_ref().map_or(0, |results| results.len());
            if len != stack.count * stack.rows * stack.cols {
                bail!("{len} elements of results, for {stack:?}");
            }
            let Some(results) = results else {
                continue;
            };
            let (to, write) = results.device_ptr_mut(&self.stream);
            written.push(write);
            let has_padding = Batch::pitch(stack.cols) != stack.cols;
            if dtype == self.dtype && !has_padding && to.is_multiple_of(16) {
                let direct = Stack {
                    address: to,
                    ..stack
                };
                maps = maps.with_results(which, direct.map(dtype)?);
            } else {
                padded.push((stack, to));
            }
        }
        kernels.extend(self.iterate.kernels(&maps));
        for (stack, to) in padded {
            kernels.extend(self.edges.unpad(stack, to, dtype == DType::F32));
        }
        // SAFETY: matrices live, whose shapes and dtypes were checked, maps are of this kind's workspace, and
        // results have the right length.
        unsafe { self.replay.put(&self.stream, kernels) }
    }
}

impl Drop for Prepared {
    /// Waits for what was launched: the modules of kernels may only go when they are idle. It happens
    /// where a workspace grows, and at the end of a thread.
    fn drop(&mut self) {
        // Of an error, the next use of the stream tells as well.
        let _ = self.stream.synchronize();
    }
}
