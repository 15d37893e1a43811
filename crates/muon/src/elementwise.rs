//! The element-wise steps: each one pass over memory, in f32, every operation rounded by itself.
//!
//! Operands are contiguous f32 tensors of equal length, of any shape, on one device; views of larger
//! buffers are written through. No two operands of a call may be views of one buffer.
//!
//! Elements have the same bits on every device.

use std::cell::{OnceCell, RefCell};

use candle_core::{
    CpuStorage, DType, InplaceOp1, InplaceOp2, Layout, Result as CandleResult, Storage, Tensor,
    bail,
};

use crate::{AdamWConfig, Error};

/// Adds values of dtype f32, f16 or bf16 to a sum in f32.
///
/// As computed, with the factor rounded to f32 once: `s ← s + factor·x`. A factor of 1 leaves x
/// exact.
///
/// # Errors
/// For a sum that is not contiguous f32, and for values of another dtype, length or device, that
/// are not contiguous or in the same buffer; the sum is untouched then.
pub fn accumulate(sum: &Tensor, values: &Tensor, factor: f64) -> Result<(), Error> {
    let (sum, values) = (("the sum", sum), ("the summand", values));
    check_dtypes(&[sum], &[DType::F32], "f32")?;
    check_dtypes(&[values], &FLOATS, "f32, f16 or bf16")?;
    check_places(&[sum, values])?;
    let factor = factor as f32;
    Ok(sum.1.inplace_op2(values.1, &AccumulateOp { factor })?)
}

/// Takes a gradient into the momentum and returns what Newton-Schulz orthogonalizes, a new tensor.
///
/// As computed, with β and 1-β each rounded to f32 once:
/// `h = (1-β)·g`, `M ← β·M + h`, and the result is `β·M + h` with nesterov, else a copy of M.
///
/// # Errors
/// For operands that are not contiguous f32 of equal length in buffers of their own; the momentum
/// is untouched then.
pub fn momentum_update(
    momentum: &Tensor,
    gradient: &Tensor,
    beta: f64,
    nesterov: bool,
) -> Result<Tensor, Error> {
    check_operands(&[("the momentum", momentum), ("the gradient", gradient)])?;
    let op = MomentumOp {
        beta: beta as f32,
        complement: (1.0 - beta) as f32,
        nesterov,
        update: OnceCell::new(),
    };
    momentum.inplace_op2(gradient, &op)?;
    Ok(op
        .update
        .into_inner()
        .expect("the operation fills its result"))
}

/// Decays weights and subtracts an orthogonalized update.
///
/// As computed, with `d = 1 - lr·weight_decay` and `s = lr·scale` each rounded to f32 once:
/// `p ← d·p - s·o`. Without decay d is 1, which leaves p exact.
///
/// # Errors
/// For operands that are not contiguous f32 of equal length in buffers of their own; the weights
/// are untouched then.
pub fn apply_update(
    weights: &Tensor,
    orthogonalized: &Tensor,
    scale: f64,
    lr: f64,
    weight_decay: f64,
) -> Result<(), Error> {
    check_operands(&[("the weights", weights), ("the update", orthogonalized)])?;
    let op = ApplyOp {
        keep: (1.0 - lr * weight_decay) as f32,
        step: (lr * scale) as f32,
    };
    Ok(weights.inplace_op2(orthogonalized, &op)?)
}

/// One AdamW step; `step` counts from 1.
///
/// As computed, with `c1 = 1 - β1ᵗ`, `c2 = 1 - β2ᵗ` and `d = 1 - lr·weight_decay` in f64, rounded
/// to f32 once as are the betas, their complements, lr and eps:
/// `m ← β1·m + (1-β1)·g`, `v ← β2·v + (1-β2)·(g·g)`,
/// `p ← d·p - lr·((m / c1) / (sqrt(v / c2) + eps))`.
///
/// # Errors
/// For operands that are not contiguous f32 of equal length in buffers of their own, or a `step`
/// of 0; nothing is changed then.
pub fn adamw_update(
    weights: &Tensor,
    m: &Tensor,
    v: &Tensor,
    gradient: &Tensor,
    step: u64,
    config: &AdamWConfig,
) -> Result<(), Error> {
    check_operands(&[
        ("the weights", weights),
        ("the first moment", m),
        ("the second moment", v),
        ("the gradient", gradient),
    ])?;
    if step == 0 {
        return Err(Error::Config {
            field: "step",
            value: 0.0,
            requirement: "at least 1",
        });
    }
    let AdamWConfig {
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
    } = *config;
    let op = AdamWOp {
        m,
        v,
        beta1: beta1 as f32,
        complement1: (1.0 - beta1) as f32,
        correction1: (1.0 - beta1.powf(step as f64)) as f32,
        beta2: beta2 as f32,
        complement2: (1.0 - beta2) as f32,
        correction2: (1.0 - beta2.powf(step as f64)) as f32,
        keep: (1.0 - lr * weight_decay) as f32,
        lr: lr as f32,
        eps: eps as f32,
    };
    Ok(weights.inplace_op2(gradient, &op)?)
}

/// Whether two tensors are views of one buffer.
pub(crate) fn shares_storage(a: &Tensor, b: &Tensor) -> bool {
    // One guard at a time: two of the same lock could wait for each other.
    let address = |x: &Tensor| std::ptr::from_ref::<Storage>(&x.storage_and_layout().0).addr();
    address(a) == address(b)
}

type Operand<'a> = (&'static str, &'a Tensor);

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The first operand is one that is written; the others are measured by it.
fn check_operands(operands: &[Operand<'_>]) -> Result<(), Error> {
    check_dtypes(operands, &[DType::F32], "f32")?;
    check_places(operands)
}

fn check_dtypes(
    operands: &[Operand<'_>],
    taken: &[DType],
    expected: &'static str,
) -> Result<(), Error> {
    match operands.iter().find(|(_, x)| !taken.contains(&x.dtype())) {
        None => Ok(()),
        Some((what, x)) => Err(Error::DType {
            what: (*what).to_owned(),
            dtype: x.dtype(),
            expected,
        }),
    }
}

fn check_places(operands: &[Operand<'_>]) -> Result<(), Error> {
    let expected = operands[0].1.elem_count();
    for (i, &(what, x)) in operands.iter().enumerate() {
        if !x.is_contiguous() {
            return Err(Error::NotContiguous {
                what: what.to_owned(),
            });
        }
        let found = x.elem_count();
        if found != expected {
            return Err(Error::Length {
                what: what.to_owned(),
                found,
                expected,
            });
        }
        if let Some(&(first, _)) = operands[..i].iter().find(|(_, y)| shares_storage(x, y)) {
            return Err(Error::SharedStorage {
                first,
                second: what,
            });
        }
    }
    Ok(())
}

struct AccumulateOp {
    factor: f32,
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
        let sum = slice_mut(sum, layout)?;
        let Some((start, end)) = values_layout.contiguous_offsets() else {
            bail!("{}: expected contiguous values", self.name());
        };
        match values {
            CpuStorage::F32(x) => self.run(sum, x[start..end].iter().copied()),
            CpuStorage::F16(x) => self.run(sum, x[start..end].iter().map(|x| x.to_f32())),
            CpuStorage::BF16(x) => self.run(sum, x[start..end].iter().map(|x| x.to_f32())),
            _ => bail!("{}: expected f32, f16 or bf16", self.name()),
        }
        Ok(())
    }
}

impl AccumulateOp {
    fn run(&self, sum: &mut [f32], values: impl Iterator<Item = f32>) {
        for (s, x) in sum.iter_mut().zip(values) {
            *s += self.factor * x;
        }
    }
}

struct MomentumOp {
    beta: f32,
    complement: f32,
    nesterov: bool,
    update: OnceCell<Tensor>,
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
                let h = self.complement * g;
                *m = self.beta * *m + h;
                if self.nesterov {
                    self.beta * *m + h
                } else {
                    *m
                }
            })
            .collect();
        let update = Tensor::from_vec(update, layout.shape(), &candle_core::Device::Cpu)?;
        self.update.set(update).expect("an operation runs once");
        Ok(())
    }
}

struct ApplyOp {
    keep: f32,
    step: f32,
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
        let weights = slice_mut(weights, layout)?.iter_mut();
        for (p, o) in weights.zip(slice(update, update_layout)?) {
            *p = self.keep * *p - self.step * o;
        }
        Ok(())
    }
}

/// candle lends one tensor of an operation for writing; the moments are lent one inside the other.
struct AdamWOp<'a> {
    m: &'a Tensor,
    v: &'a Tensor,
    beta1: f32,
    complement1: f32,
    correction1: f32,
    beta2: f32,
    complement2: f32,
    correction2: f32,
    keep: f32,
    lr: f32,
    eps: f32,
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
        let gradient = slice(gradient, gradient_layout)?;
        self.m.inplace_op1(&Lend::new(|m: &mut [f32]| {
            self.v.inplace_op1(&Lend::new(|v: &mut [f32]| {
                self.run(weights, m, v, gradient);
                Ok(())
            }))
        }))
    }
}

impl AdamWOp<'_> {
    fn run(&self, weights: &mut [f32], m: &mut [f32], v: &mut [f32], gradient: &[f32]) {
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
