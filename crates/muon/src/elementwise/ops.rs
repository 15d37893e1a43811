//! The operations behind the steps, on a CPU and on a CUDA device.

use std::borrow::Cow;
use std::cell::{OnceCell, RefCell};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{
    CpuStorage, Device, InplaceOp1, InplaceOp2, Layout, Result as CandleResult, Tensor, bail,
};

#[cfg(feature = "cuda")]
use crate::cuda;

pub(super) struct AccumulateOp {
    pub(super) factor: f32,
}

impl InplaceOp2 for AccumulateOp {
    fn name(&self) -> &'static str {
        "accumulate"
    }

    fn cpu_fwd(
        &self,
        sum: &mut CpuStorage,
        layout: &Layout,
        values: &CpuStorage,
        values_layout: &Layout,
    ) -> CandleResult<()> {
        let values = floats(values, values_layout)?;
        for (s, x) in slice_mut(sum, layout)?.iter_mut().zip(&*values) {
            *s += self.factor * x;
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        sum: &mut CudaStorage,
        layout: &Layout,
        values: &CudaStorage,
        values_layout: &Layout,
    ) -> CandleResult<()> {
        cuda::accumulate((sum, layout), (values, values_layout), self.factor)
    }
}

/// What a gradient is multiplied with, one after the other.
pub(crate) type GradientFactors = [f32; 2];

/// The scalars of a momentum step, each rounded to f32 once.
#[derive(Clone, Copy)]
pub(crate) struct MomentumFactors {
    pub(crate) of_gradient: GradientFactors,
    pub(crate) beta: f32,
    pub(crate) complement: f32,
    pub(crate) nesterov: bool,
}

pub(super) struct MomentumOp {
    factors: MomentumFactors,
    update: OnceCell<Tensor>,
}

impl MomentumOp {
    pub(super) fn new(factors: MomentumFactors) -> Self {
        let update = OnceCell::new();
        Self { factors, update }
    }

    /// The result of the operation, after it has run.
    pub(super) fn into_update(self) -> Tensor {
        self.update
            .into_inner()
            .expect("the operation fills its result")
    }
}

impl InplaceOp2 for MomentumOp {
    fn name(&self) -> &'static str {
        "muon-momentum"
    }

    fn cpu_fwd(
        &self,
        momentum: &mut CpuStorage,
        layout: &Layout,
        gradient: &CpuStorage,
        gradient_layout: &Layout,
    ) -> CandleResult<()> {
        let momentum = slice_mut(momentum, layout)?.iter_mut();
        let gradient = floats(gradient, gradient_layout)?;
        let f = &self.factors;
        let update: Vec<f32> = momentum
            .zip(&*gradient)
            .map(|(m, g)| {
                let h = f.complement * scaled(*g, f.of_gradient);
                *m = f.beta * *m + h;
                if f.nesterov { f.beta * *m + h } else { *m }
            })
            .collect();
        let update = Tensor::from_vec(update, layout.shape(), &Device::Cpu)?;
        self.update.set(update).expect("an operation runs once");
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        momentum: &mut CudaStorage,
        layout: &Layout,
        gradient: &CudaStorage,
        gradient_layout: &Layout,
    ) -> CandleResult<()> {
        let (momentum, gradient) = ((momentum, layout), (gradient, gradient_layout));
        let update = cuda::momentum(momentum, gradient, &self.factors)?;
        self.update.set(update).expect("an operation runs once");
        Ok(())
    }
}

pub(super) struct ApplyOp {
    pub(super) keep: f32,
    pub(super) step: f32,
}

impl InplaceOp2 for ApplyOp {
    fn name(&self) -> &'static str {
        "muon-apply"
    }

    fn cpu_fwd(
        &self,
        weights: &mut CpuStorage,
        layout: &Layout,
        update: &CpuStorage,
        update_layout: &Layout,
    ) -> CandleResult<()> {
        let update = floats(update, update_layout)?;
        for (p, o) in slice_mut(weights, layout)?.iter_mut().zip(&*update) {
            *p = self.keep * *p - self.step * o;
        }
        Ok(())
    }
}

fn scaled(gradient: f32, [mean, clip]: GradientFactors) -> f32 {
    clip * (mean * gradient)
}

/// The scalars of an AdamW step, each rounded to f32 once.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AdamWFactors {
    pub(crate) beta1: f32,
    pub(crate) complement1: f32,
    pub(crate) correction1: f32,
    pub(crate) beta2: f32,
    pub(crate) complement2: f32,
    pub(crate) correction2: f32,
    pub(crate) keep: f32,
    pub(crate) lr: f32,
    pub(crate) eps: f32,
}

/// candle lends one tensor of an operation for writing; the moments are lent one inside the other.
pub(super) struct AdamWOp<'a> {
    pub(super) m: &'a Tensor,
    pub(super) v: &'a Tensor,
    pub(super) of_gradient: GradientFactors,
    pub(super) factors: AdamWFactors,
}

impl InplaceOp2 for AdamWOp<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(
        &self,
        weights: &mut CpuStorage,
        layout: &Layout,
        gradient: &CpuStorage,
        gradient_layout: &Layout,
    ) -> CandleResult<()> {
        let weights = slice_mut(weights, layout)?;
        let gradient = floats(gradient, gradient_layout)?;
        self.m.inplace_op1(&Lend::new(|m: &mut [f32]| {
            self.v.inplace_op1(&Lend::new(|v: &mut [f32]| {
                self.run(weights, m, v, &gradient);
                Ok(())
            }))
        }))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        weights: &mut CudaStorage,
        layout: &Layout,
        gradient: &CudaStorage,
        gradient_layout: &Layout,
    ) -> CandleResult<()> {
        let (weights, gradient) = ((weights, layout), (gradient, gradient_layout));
        cuda::adamw(
            weights,
            self.m,
            self.v,
            gradient,
            self.of_gradient,
            &self.factors,
        )
    }
}

impl AdamWOp<'_> {
    fn run(&self, weights: &mut [f32], m: &mut [f32], v: &mut [f32], gradient: &[f32]) {
        let f = &self.factors;
        for (((p, m), v), g) in weights.iter_mut().zip(m).zip(v).zip(gradient) {
            let g = scaled(*g, self.of_gradient);
            *m = f.beta1 * *m + f.complement1 * g;
            *v = f.beta2 * *v + f.complement2 * (g * g);
            let update = (*m / f.correction1) / ((*v / f.correction2).sqrt() + f.eps);
            *p = f.keep * *p - f.lr * update;
        }
    }
}

/// Lends the elements of a tensor to a closure.
struct Lend<F>(RefCell<F>);

impl<F: FnMut(&mut [f32]) -> CandleResult<()>> Lend<F> {
    fn new(f: F) -> Self {
        Self(RefCell::new(f))
    }
}

impl<F: FnMut(&mut [f32]) -> CandleResult<()>> InplaceOp1 for Lend<F> {
    fn name(&self) -> &'static str {
        "lend"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> CandleResult<()> {
        let mut f = self.0.borrow_mut();
        (*f)(slice_mut(storage, layout)?)
    }
}

/// The elements of a layout, of dtype f32, f16 or bf16, in f32.
fn floats<'a>(storage: &'a CpuStorage, layout: &Layout) -> CandleResult<Cow<'a, [f32]>> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("expected contiguous values");
    };
    Ok(match storage {
        CpuStorage::F32(x) => Cow::Borrowed(&x[start..end]),
        CpuStorage::F16(x) => x[start..end].iter().map(|x| x.to_f32()).collect(),
        CpuStorage::BF16(x) => x[start..end].iter().map(|x| x.to_f32()).collect(),
        _ => bail!("expected f32, f16 or bf16"),
    })
}

fn slice_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> CandleResult<&'a mut [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(x), Some((start, end))) => Ok(&mut x[start..end]),
        _ => bail!("expected contiguous f32"),
    }
}
