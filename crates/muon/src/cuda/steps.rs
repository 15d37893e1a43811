//! The element-wise steps of `kernels/elementwise.cu`.

use std::cell::RefCell;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Result, Tensor, bail};
use cudarc::driver::PushKernelArg;

use super::element::{Element, by_dtype};
use super::kernels::Kernels;
use super::launch::{launch, over, tensor, uninitialized, view, view_mut};
use crate::elementwise::{AdamWFactors, GradientFactors};

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
    (momentum, layout): PartMut<'_>,
    gradient: Part<'_>,
    factors: GradientFactors,
    beta: f32,
    complement: f32,
    nesterov: bool,
) -> Result<Tensor> {
    let (device, shape) = (gradient.0.device(), layout.shape());
    let elements = shape.elem_count();
    let kernel = Kernels::Elementwise.load(device, "momentum")?;
    let mut momentum = view_mut::<f32>(momentum, layout)?;
    let gradient = view::<f32>(gradient.0, gradient.1)?;
    // SAFETY: the kernel writes each element.
    let mut update = unsafe { uninitialized::<f32>(device, elements) }?;
    let (nesterov, len) = (u32::from(nesterov), elements as u64);
    let mut arguments = kernel.builder();
    arguments
        .arg(&mut momentum)
        .arg(&gradient)
        .arg(&factors)
        .arg(&mut update)
        .arg(&beta)
        .arg(&complement)
        .arg(&nesterov)
        .arg(&len);
    // SAFETY: `momentum(m, g, factors, u, beta, complement, nesterov, n)`; all slices have n elements
    // (`check_operands`).
    unsafe { launch(&mut arguments, over(elements, 1)?) }?;
    Ok(tensor(update, device, shape))
}

/// `p ← keep·p - step·o`.
pub(crate) fn apply(weights: PartMut<'_>, update: Part<'_>, keep: f32, step: f32) -> Result<()> {
    by_dtype!(update.0.dtype(), apply_from(weights, update, keep, step))
}

fn apply_from<T: Element>(
    (weights, layout): PartMut<'_>,
    update: Part<'_>,
    keep: f32,
    step: f32,
) -> Result<()> {
    let elements = layout.shape().elem_count();
    let name = format!("apply_{}", T::SUFFIX);
    let kernel = Kernels::Elementwise.load(update.0.device(), &name)?;
    let mut weights = view_mut::<f32>(weights, layout)?;
    let update = view::<T>(update.0, update.1)?;
    let len = elements as u64;
    let mut arguments = kernel.builder();
    arguments
        .arg(&mut weights)
        .arg(&update)
        .arg(&keep)
        .arg(&step)
        .arg(&len);
    // SAFETY: `apply_*(p, o, keep, step, n)`; both slices have n elements (`check_places`).
    unsafe { launch(&mut arguments, over(elements, 1)?) }
}

/// One AdamW step on weights and the moments `m` and `v`.
pub(crate) fn adamw(
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
    let gradient = view::<f32>(gradient.0, gradient.1)?;
    lend(m, |(m, layout)| {
        let mut m = view_mut::<f32>(m, layout)?;
        lend(v, |(v, layout)| {
            let mut v = view_mut::<f32>(v, layout)?;
            let kernel = Kernels::Elementwise.load(device, "adamw")?;
            let len = elements as u64;
            let mut arguments = kernel.builder();
            arguments
                .arg(&mut weights)
                .arg(&mut m)
                .arg(&mut v)
                .arg(&gradient)
                .arg(&of_gradient)
                .arg(&factors.beta1)
                .arg(&factors.complement1)
                .arg(&factors.correction1)
                .arg(&factors.beta2)
                .arg(&factors.complement2)
                .arg(&factors.correction2)
                .arg(&factors.keep)
                .arg(&factors.lr)
                .arg(&factors.eps)
                .arg(&len);
            // SAFETY: `adamw(p, m, v, g, factors, nine floats in this order, n)`; all slices have n elements
            // (`check_operands`).
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
