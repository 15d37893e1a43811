//! The operations behind the steps, on a CPU and on a CUDA device.

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
        with_floats((sum, layout), (values, values_layout), |s, x| {
            *s += self.factor * x;
        })
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

pub(super) struct MomentumOp {
    factors: GradientFactors,
    beta: f32,
    complement: f32,
    nesterov: bool,
    update: OnceCell<Tensor>,
}

impl MomentumOp {
    pub(super) fn new(
        factors: GradientFactors,
        beta: f32,
        complement: f32,
        nesterov: bool,
    ) -> Self {
        Self {
            factors,
            beta,
            complement,
            nesterov,
            update: OnceCell::new(),
        }
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
        let gradient = slice(gradient, gradient_layout)?;
        let update: Vec<f32> = momentum
            .zip(gradient)
            .map(|(m, g)| {
                let h = self.complement * scaled(*g, self.factors);
                *m = self.beta * *m + h;
                if self.nesterov {
                    self.beta * *m + h
                } else {
                    *m
                }
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
        let (factors, beta, complement) = (self.factors, self.beta, self.complement);
        let update = cuda::momentum(momentum, gradient, factors, beta, complement, self.nesterov)?;
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
        with_floats((weights, layout), (update, update_layout), |p, o| {
            *p = self.keep * *p - self.step * o;
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        weights: &mut CudaStorage,
        layout: &Layout,
        update: &CudaStorage,
        update_layout: &Layout,
    ) -> CandleResult<()> {
        cuda::apply(
            (weights, layout),
            (update, update_layout),
            self.keep,
            self.step,
        )
    }
}

fn scaled(gradient: f32, [mean, clip]: GradientFactors) -> f32 {
    clip * (mean * gradient)
}

/// The scalars of an AdamW step, each rounded to f32 once.
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
        let gradient = slice(gradient, gradient_layout)?.iter();
        let gradient = gradient.map(|g| scaled(*g, self.of_gradient));
        self.m.inplace_op1(&Lend::new(|m: &mut [f32]| {
            self.v.inplace_op1(&Lend::new(|v: &mut [f32]| {
                self.factors.run(weights, m, v, gradient.clone());
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

impl AdamWFactors {
    fn run(
        &self,
        weights: &mut [f32],
        m: &mut [f32],
        v: &mut [f32],
        gradient: impl Iterator<Item = f32>,
    ) {
        for (((p, m), v), g) in weights.iter_mut().zip(m).zip(v).zip(gradient) {
            *m = self.beta1 * *m + self.complement1 * g;
            *v = self.beta2 * *v + self.complement2 * (g * g);
            let update = (*m / self.correction1) / ((*v / self.correction2).sqrt() + self.eps);
            *p = self.keep * *p - self.lr * update;
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

/// Changes each element of a target in f32 with that of values in f32, f16 or bf16.
pub(super) fn with_floats(
    (target, layout): (&mut CpuStorage, &Layout),
    (values, values_layout): (&CpuStorage, &Layout),
    change: impl Fn(&mut f32, f32),
) -> CandleResult<()> {
    let target = slice_mut(target, layout)?.iter_mut();
    let Some((start, end)) = values_layout.contiguous_offsets() else {
        bail!("expected contiguous values");
    };
    match values {
        CpuStorage::F32(x) => target.zip(&x[start..end]).for_each(|(t, x)| change(t, *x)),
        CpuStorage::F16(x) => target
            .zip(&x[start..end])
            .for_each(|(t, x)| change(t, x.to_f32())),
        CpuStorage::BF16(x) => target
            .zip(&x[start..end])
            .for_each(|(t, x)| change(t, x.to_f32())),
        _ => bail!("expected f32, f16 or bf16"),
    }
    Ok(())
}

fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> CandleResult<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(x), Some((start, end))) => Ok(&x[start..end]),
        _ => bail!("expected contiguous f32"),
    }
}

fn slice_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> CandleResult<&'a mut [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(x), Some((start, end))) => Ok(&mut x[start..end]),
        _ => bail!("expected contiguous f32"),
    }
}
