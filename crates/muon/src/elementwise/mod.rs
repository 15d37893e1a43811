//! The element-wise steps: each one pass over memory, in f32, every operation rounded by itself.
//!
//! Operands are contiguous tensors of equal length, of any shape, on one device, f32 where nothing
//! else is said; views of larger buffers are written through. No two operands of a call may be views of one buffer.
//!
//! Elements have the same bits on every device.

mod copies;
mod operands;
mod ops;

use candle_core::{DType, Tensor};

use crate::{AdamWConfig, Error};

use copies::{CopyOp, WidenOp};
use operands::{FLOATS, check_dtypes, check_operands, check_places};
use ops::{AccumulateOp, AdamWOp, ApplyOp, MomentumOp};

pub(crate) use operands::shares_storage;
pub(crate) use ops::AdamWFactors;

/// Writes values over those of a target of their dtype, bit by bit.
///
/// # Errors
/// For a target that is not contiguous, and for values of another dtype, length or device, that are
/// not contiguous or in the same buffer; the target is untouched then.
pub fn copy(target: &Tensor, values: &Tensor) -> Result<(), Error> {
    let dtype = target.dtype();
    let (target, values) = (("the target", target), ("the values", values));
    check_dtypes(&[values], &[dtype], dtype.as_str())?;
    check_places(&[target, values])?;
    Ok(target.1.inplace_op2(values.1, &CopyOp)?)
}

/// Writes values of dtype f32, f16 or bf16 over those of a target in f32, each exactly.
///
/// # Errors
/// For a target that is not contiguous f32, and for values of another dtype, length or device, that
/// are not contiguous or in the same buffer; the target is untouched then.
pub fn widen(target: &Tensor, values: &Tensor) -> Result<(), Error> {
    let (target, values) = (("the target", target), ("the values", values));
    check_dtypes(&[target], &[DType::F32], "f32")?;
    check_dtypes(&[values], &FLOATS, "f32, f16 or bf16")?;
    check_places(&[target, values])?;
    Ok(target.1.inplace_op2(values.1, &WidenOp)?)
}

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
    let op = MomentumOp::new(beta as f32, (1.0 - beta) as f32, nesterov);
    momentum.inplace_op2(gradient, &op)?;
    Ok(op.into_update())
}

/// Decays weights and subtracts an orthogonalized update of dtype f32, f16 or bf16.
///
/// As computed, with `d = 1 - lr·weight_decay` and `s = lr·scale` each rounded to f32 once:
/// `p ← d·p - s·o`. Without decay d is 1, which leaves p exact.
///
/// # Errors
/// For weights that are not contiguous f32, and for an update of another dtype, length or device,
/// that is not contiguous or in the same buffer; the weights are untouched then.
pub fn apply_update(
    weights: &Tensor,
    orthogonalized: &Tensor,
    scale: f64,
    lr: f64,
    weight_decay: f64,
) -> Result<(), Error> {
    let operands = [("the weights", weights), ("the update", orthogonalized)];
    check_dtypes(&operands[..1], &[DType::F32], "f32")?;
    check_dtypes(&operands[1..], &FLOATS, "f32, f16 or bf16")?;
    check_places(&operands)?;
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
    let factors = AdamWFactors {
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
    Ok(weights.inplace_op2(gradient, &AdamWOp { m, v, factors })?)
}
