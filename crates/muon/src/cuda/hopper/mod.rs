//! Newton-Schulz by the kernels for compute capability 9.0: normalization, products, results.
//!
//! What does not change from one batch of a kind to the next (workspace, tiles, tensor maps, graphs but for
//! addresses) is kept by each thread for each device, so that nothing is allocated but the results. By thread,
//! since candle's usual stream is another one in each.

mod edges;
mod iterate;
mod kernel;
mod maps;
mod modules;
mod prepared;
mod replay;
mod steps;

use std::cell::RefCell;

use candle_core::cuda_backend::{CudaDevice, DeviceId, WrapErr};
use candle_core::{DType, Result, Tensor, WithDType, bail};
use cudarc::driver::{CudaSlice, DevicePtr};

use super::element::{Element, by_dtype};
use super::launch::{tensor, uninitialized};
use crate::choice::Gpu;
use crate::hopper::workspace::{Batch, Workspace, chunks};
use crate::{Method, NewtonSchulz};
use modules::Modules;
use prepared::Prepared;

/// How many kinds of batches a thread keeps prepared for a device.
const MOST_PREPARED: usize = 64;

thread_local! {
    static ENGINES: RefCell<Vec<Engine>> = const { RefCell::new(Vec::new()) };
}

/// The device, as far as it decides how to orthogonalize.
pub(crate) fn gpu(device: &CudaDevice) -> Result<Gpu> {
    with_engine(device, |engine| Ok(engine.gpu))
}

/// Calls a function with this thread's engine of a device.
fn with_engine<R>(device: &CudaDevice, call: impl FnOnce(&mut Engine) -> Result<R>) -> Result<R> {
    ENGINES.with_borrow_mut(|engines| {
        let index = match engines.iter().position(|engine| engine.id == device.id()) {
            Some(index) => index,
            None => {
                engines.push(Engine::new(device)?);
                engines.len() - 1
            }
        };
        call(&mut engines[index])
    })
}

/// A contiguous stack of what was wide, and one of what was tall, if anything was.
pub(crate) type Results = (Option<Tensor>, Option<Tensor>);

/// Orthogonalizes contiguous matrices of f32, f16 or bf16, `wide` ones, n × m with n ≤ m, and `tall`
/// ones, m × n, in `dtype`, with results in `results`: f32, or `dtype`. Gives nothing where the
/// kernels for Hopper are not to be taken.
pub(crate) fn orthogonalize_on_hopper(
    ns: &NewtonSchulz,
    device: &CudaDevice,
    (dtype, results): (DType, DType),
    wide: &[Tensor],
    tall: &[Tensor],
    (n, m): (usize, usize),
) -> Result<Option<Results>> {
    with_engine(device, |engine| {
        if !ns.takes_hopper_kernels(engine.gpu, dtype, m) {
            return Ok(None);
        }
        let batch = Batch {
            n,
            m,
            wide: wide.len(),
            tall: tall.len(),
        };
        let call = Call {
            engine,
            ns,
            device,
            dtype,
        };
        let results = by_dtype!(results, orthogonalize_to(call, wide, tall, batch))?;
        Ok(Some(results))
    })
}

/// What a call is made with.
struct Call<'a> {
    engine: &'a mut Engine,
    ns: &'a NewtonSchulz,
    device: &'a CudaDevice,
    dtype: DType,
}

fn orthogonalize_to<T: Element + WithDType>(
    call: Call<'_>,
    wide: &[Tensor],
    tall: &[Tensor],
    batch: Batch,
) -> Result<Results> {
    let Call {
        engine,
        ns,
        device,
        dtype,
    } = call;
    let Batch { n, m, .. } = batch;
    // The kernels count vectors of a matrix in 32 bits.
    let vectors = (n * Batch::pitch(m)).max(m * Batch::pitch(n)) / 8;
    if vectors > u32::MAX as usize / 2 {
        bail!("a matrix of {n} x {m} is too large");
    }
    let method = ns.chosen_on_hopper(n, m);
    let parts = chunks(method, batch, ns.workspace_bytes);
    let batches = parts.iter().map(|(wide, tall)| Batch {
        wide: wide.len(),
        tall: tall.len(),
        ..batch
    });
    let bytes = batches
        .clone()
        .map(|part| Workspace::new(method, part).bytes);
    engine.reserve(device, bytes.max().unwrap_or(0))?;

    let elements = n * m;
    let stack = |count: usize| -> Result<_> {
        if count == 0 {
            return Ok(None);
        }
        // SAFETY: each part writes its results, and the parts are all matrices.
        unsafe { uninitialized::<T>(device, elements * count) }.map(Some)
    };
    let (mut wide_results, mut tall_results) = (stack(wide.len())?, stack(tall.len())?);
    for (part, (of_wide, of_tall)) in batches.zip(&parts) {
        let kind = Kind {
            batch: part,
            dtype,
            method,
            coefficients: ns.coefficients.steps(ns.steps),
        };
        let prepared = engine.prepared(device, kind)?;
        let results = [(&mut wide_results, of_wide), (&mut tall_results, of_tall)];
        let results = results.map(|(results, range)| {
            let elements = elements * range.start..elements * range.end;
            let results = results.as_mut().filter(|_| !range.is_empty());
            results.map(|results| results.slice_mut(elements))
        });
        prepared.run(&wide[of_wide.clone()], &tall[of_tall.clone()], results)?;
    }
    let stack = |results: Option<_>, count, rows, cols| {
        results.map(|results| tensor::<T>(results, device, (count, rows, cols)))
    };
    Ok((
        stack(wide_results, wide.len(), n, m),
        stack(tall_results, tall.len(), m, n),
    ))
}

/// What tells one kind of batch from another.
#[derive(Debug, Clone, PartialEq)]
struct Kind {
    batch: Batch,
    dtype: DType,
    method: Method,
    coefficients: Vec<[f64; 3]>,
}

/// A device as one thread uses it.
struct Engine {
    id: DeviceId,
    gpu: Gpu,
    /// On a device that has them.
    modules: Option<Modules>,
    workspace: Option<CudaSlice<u8>>,
    /// The latest used last. All refer to `workspace`.
    prepared: Vec<(Kind, Prepared)>,
}

impl Engine {
    fn new(device: &CudaDevice) -> Result<Self> {
        let capability = device.cuda_stream().context().compute_capability().w()?;
        let modules = (capability == Gpu::HOPPER).then(|| Modules::load(device));
        let modules = modules.transpose()?;
        let clusters = modules.as_ref().map(|modules| modules.clusters(device));
        let clusters = clusters.transpose()?.unwrap_or(0);
        Ok(Self {
            id: device.id(),
            gpu: Gpu {
                capability,
                clusters,
            },
            modules,
            workspace: None,
            prepared: Vec::new(),
        })
    }

    /// A workspace of at least so many bytes. What was prepared for a smaller one is forgotten.
    fn reserve(&mut self, device: &CudaDevice, bytes: usize) -> Result<()> {
        if self
            .workspace
            .as_ref()
            .is_none_or(|w| w.num_bytes() < bytes)
        {
            self.prepared.clear();
            self.workspace = None;
            // SAFETY: of the workspace, the kernels read what others have written before, and padding
            // that they do not use.
            self.workspace = Some(unsafe { uninitialized(device, bytes) }?);
        }
        Ok(())
    }

    fn prepared(&mut self, device: &CudaDevice, kind: Kind) -> Result<&mut Prepared> {
        let known = self.prepared.iter().position(|(known, _)| *known == kind);
        let entry = if let Some(index) = known {
            self.prepared.remove(index)
        } else {
            let (Some(modules), Some(workspace)) = (&self.modules, &self.workspace) else {
                bail!("there are no kernels, or there is no workspace");
            };
            let stream = device.cuda_stream();
            let (base, _read) = workspace.device_ptr(&stream);
            let prepared = Prepared::new(device, modules, &kind, base, self.gpu.clusters)?;
            if self.prepared.len() == MOST_PREPARED {
                self.prepared.remove(0);
            }
            (kind, prepared)
        };
        self.prepared.push(entry);
        let (_, prepared) = self.prepared.last_mut().expect("one was pushed");
        Ok(prepared)
    }
}
