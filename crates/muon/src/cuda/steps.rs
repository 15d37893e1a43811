//! The element-wise steps of `kernels/elementwise.cu`.

use std::cell::RefCell;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDevice;
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Result, Tensor, bail};
use cudarc::driver::{DeviceRepr, PushKernelArg};

use super::element::{Element, by_dtype};
use super::kernels::Kernels;
use super::launch::{blocks, launch, over, tensor, uninitialized, view, view_mut};
use super::many::{Chunks, TENSORS, Tensors};
use crate::elementwise::{AdamWFactors, GradientFactors, MomentumFactors};

/// A storage and the part of it that is meant.
type Part<'a> = (&'a CudaStorage, &'a Layout);
/// The same, to be written.
type PartMut<'a> = (&'a mut CudaStorage, &'a Layout);

/// `s ← s + factor·x`.
pub(crate) fn accumulate(sum: PartMut<'_>, values: Part<'_>, factor: f32) -> Result<()> {
    by_dtype!(values.0.dtype(), accumulate_from(sum, values, factor))
}

fn accumulate_from<T: Element>(
    (sum, layout): PartMut<'_>,
    values: Part<'_>,
    factor: f32,
) -> Result<()> {
    let device = values.0.device();
    let elements = layout.shape().elem_count();
    let kernel = Kernels::Elementwise.load(device, &format!("accumulate_{}", T::SUFFIX))?;
    let mut sum = view_mut::<f32>(sum, layout)?;
    let values = view::<T>(values.0, values.1)?;
    let len = elements as u64;
    let mut arguments = kernel.builder();
    arguments.arg(&mut sum).arg(&values).arg(&factor).arg(&len);
    // SAFETY: `accumulate_*(s, x, factor, n)`; both slices have n elements (`check_places`).
    unsafe { launch(&mut arguments, over(elements, 1)?) }
}

/// `h = (1-β)·g`, `M ← β·M + h`; returns `β·M + h` with nesterov, else a copy of M.
pub(crate) fn momentum(
    momentum: PartMut<'_>,
    gradient: Part<'_>,
    factors: &MomentumFactors,
) -> Result<Tensor> {
    by_dtype!(
        gradient.0.dtype(),
        momentum_from(momentum, gradient, factors)
    )
}

fn momentum_from<T: Element>(
    (momentum, layout): PartMut<'_>,
    gradient: Part<'_>,
    factors: &MomentumFactors,
) -> Result<Tensor> {
    let (device, shape) = (gradient.0.device(), layout.shape());
    let elements = shape.elem_count();
    let kernel = Kernels::Elementwise.load(device, &format!("momentum_{}", T::SUFFIX))?;
    let mut momentum = view_mut::<f32>(momentum, layout)?;
    let gradient = view::<T>(gradient.0, gradient.1)?;
    // SAFETY: the kernel writes each element.
    let mut update = unsafe { uninitialized::<f32>(device, elements) }?;
    let (nesterov, len) = (u32::from(factors.nesterov), elements as u64);
    let mut arguments = kernel.builder();
    arguments
        .arg(&mut momentum)
        .arg(&gradient)
        .arg(&factors.of_gradient)
        .arg(&mut update)
        .arg(&factors.beta)
        .arg(&factors.complement)
        .arg(&nesterov)
        .arg(&len);
    // SAFETY: `momentum_*(m, g, factors, u, beta, complement, nesterov, n)`; all slices have n elements
    // (`check_places`).
    unsafe { launch(&mut arguments, over(elements, 1)?) }?;
    Ok(tensor(update, device, shape))
}

/// Elements of a block that applies updates.
const CHUNK: u32 = 1 << 13;

/// `p ← keep·p - step·o` of weights, updates of one dtype, and their steps; all on one device.
pub(crate) fn apply_all(
    device: &CudaDevice,
    updates: &[(&Tensor, &Tensor, f32)],
    keep: f32,
) -> Result<()> {
    let alike = |a: &(_, &Tensor, _), b: &(_, &Tensor, _)| a.1.dtype() == b.1.dtype();
    for updates in updates.chunk_by(alike).flat_map(|all| all.chunks(TENSORS)) {
        let dtype = updates[0].1.dtype();
        by_dtype!(dtype, apply_from(device, updates, keep))?;
    }
    Ok(())
}

fn apply_from<T: Element>(
    device: &CudaDevice,
    updates: &[(&Tensor, &Tensor, f32)],
    keep: f32,
) -> Result<()> {
    let kernel = Kernels::Elementwise.load(device, &format!("apply_{}", T::SUFFIX))?;
    let weights = Tensors::new(device, updates.iter().map(|(weights, ..)| *weights))?;
    let lengths = updates.iter().map(|(weights, ..)| weights.elem_count());
    let chunks = Chunks::new(lengths, CHUNK)?;
    let orthogonalized = Tensors::new(device, updates.iter().map(|(_, update, _)| *update))?;
    let mut steps = [0f32; TENSORS];
    for (slot, (.., step)) in steps.iter_mut().zip(updates) {
        *slot = *step;
    }
    let mut arguments = kernel.builder();
    arguments
        .arg(&weights.addresses)
        .arg(&orthogonalized.addresses)
        .arg(&steps)
        .arg(&keep)
        .arg(&chunks);
    // SAFETY: `apply_*(weights, updates, steps, keep, chunks)`, with arrays of the sizes of `many.cuh`;
    // the addresses are of live tensors of these lengths, f32 and `T`, and what is written is read by no
    // update of the call and written by no other one (`check_written`).
    unsafe { launch(&mut arguments, blocks(chunks.blocks(), 1)?) }
}

// SAFETY: it is the `AdamWFactors` of `elementwise.cu`, and any bits are one.
unsafe impl DeviceRepr for AdamWFactors {}

/// One AdamW step on weights and the moments `m` and `v`.
pub(crate) fn adamw(
    weights: PartMut<'_>,
    m: &Tensor,
    v: &Tensor,
    gradient: Part<'_>,
    of_gradient: GradientFactors,
    factors: &AdamWFactors,
) -> Result<()> {
    by_dtype!(
        gradient.0.dtype(),
        adamw_from(weights, m, v, gradient, of_gradient, factors)
    )
}

fn adamw_from<T: Element>(
    (weights, layout): PartMut<'_>,
    m: &Tensor,
    v: &Tensor,
    gradient: Part<'_>,
    of_gradient: GradientFactors,
    factors: &AdamWFactors,
) -> Result<()> {
    // candle lends one tensor of an operation for writing; the moments are lent one inside the other.
    let (device, elements) = (gradient.0.device(), layout.shape().elem_count());
    let mut weights = view_mut::<f32>(weights, layout)?;
    let gradient = view::<T>(gradient.0, gradient.1)?;
    lend(m, |(m, layout)| {
        let mut m = view_mut::<f32>(m, layout)?;
        lend(v, |(v, layout)| {
            let mut v = view_mut::<f32>(v, layout)?;
            let kernel = Kernels::Elementwise.load(device, &format!("adamw_{}", T::SUFFIX))?;
            let len = elements as u64;
            let mut arguments = kernel.builder();
            arguments
                .arg(&mut weights)
                .arg(&mut m)
                .arg(&mut v)
                .arg(&gradient)
                .arg(&of_gradient)
                .arg(factors)
                .arg(&len);
            // SAFETY: `adamw_*(p, m, v, g, factors, scalars, n)`; all slices have n elements
            // (`check_places`).
            unsafe { launch(&mut arguments, over(elements, 1)?) }
        })
    })
}

/// Lends a tensor's storage to a function, for writing.
fn lend(x: &Tensor, f: impl FnMut(PartMut<'_>) -> Result<()>) -> Result<()> {
    x.inplace_op1(&Lend(RefCell::new(f)))
}

struct Lend<F>(RefCell<F>);

impl<F: FnMut(PartMut<'_>) -> Result<()>> InplaceOp1 for Lend<F> {
    fn name(&self) -> &'static str {
        "lend"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("expected a tensor on a CUDA device")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        (*self.0.borrow_mut())((storage, layout))
    }
}
