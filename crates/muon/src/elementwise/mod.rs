//! The element-wise steps: each one pass over memory, in f32, every operation rounded by itself.
//!
//! Operands are contiguous tensors of equal length, of any shape, on one device, f32 where nothing
//! else is said; views of larger buffers are written through. What is written
//! is in a buffer of its own; only the targets of one [`copy_all`], and the weights of one [`apply_updates`], may be
//! views of one buffer, which do not overlap.
//!
//! Elements have the same bits on every device, but for what is no number. A CPU widens half precision first.

mod copies;
mod operands;
mod ops;

#[cfg(feature = "cuda")]
use candle_core::Device;
use candle_core::Tensor;

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{AdamWConfig, Error};

use operands::{check_devices, check_operands, check_written};
use ops::{AccumulateOp, AdamWOp, ApplyOp, MomentumOp};

pub use copies::copy_all;
pub(crate) use operands::shares_storage;
pub(crate) use ops::{AdamWFactors, GradientFactors, MomentumFactors};

/// A gradient of dtype f32, f16 or bf16, times two factors.
///
/// As computed, with each factor rounded to f32 once: `clip·(mean·g)`. A factor of 1 leaves g exact.
#[derive(Debug, Clone, Copy)]
pub struct Gradient<'a> {
    /// The elements.
    pub values: &'a Tensor,
    /// Turns a sum into a mean.
    pub mean: f64,
    /// Bounds the mean's norm.
    pub clip: f64,
}

impl<'a> From<&'a Tensor> for Gradient<'a> {
    /// The gradient as it is.
    fn from(values: &'a Tensor) -> Self {
        let (mean, clip) = (1.0, 1.0);
        Self { values, mean, clip }
    }
}

impl Gradient<'_> {
    fn factors(&self) -> GradientFactors {
        [self.mean as f32, self.clip as f32]
    }
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
    check_operands(&[("the sum", sum), ("the summand", values)], 1)?;
    let factor = factor as f32;
    Ok(sum.inplace_op2(values, &AccumulateOp { factor })?)
}

/// Takes a gradient into the momentum and returns what Newton-Schulz orthogonalizes, a new tensor.
///
/// As computed, with β and 1-β each rounded to f32 once:
/// `h = (1-β)·g`, `M ← β·M + h`, and the result is `β·M + h` with nesterov, else a copy of M.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use polarshard_muon::{Gradient, Update, apply_updates, momentum_update};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (weights, momentum) = (Tensor::new(&[1f32, 1.0], &Device::Cpu)?, Tensor::new(&[0f32, 4.0], &Device::Cpu)?);
/// // The sum over four samples, whose mean is too long by half.
/// let sum = Tensor::new(&[8f32, 0.0], &Device::Cpu)?;
/// let gradient = Gradient { values: &sum, mean: 0.25, clip: 0.5 };
/// let update = momentum_update(&momentum, gradient, 0.5, false)?;
/// assert_eq!(update.to_vec1::<f32>()?, [0.5, 2.0]);
///
/// // One that is not orthogonalized, for once.
/// let update = Update { weights: &weights, orthogonalized: &update, scale: 2.0 };
/// apply_updates(&[update], 0.25, 0.0)?;
/// assert_eq!(weights.to_vec1::<f32>()?, [0.75, 0.0]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// For operands that are not contiguous or not of equal length in buffers of their own, and a momentum
/// that is not f32; the momentum is untouched then.
pub fn momentum_update<'a>(
    momentum: &Tensor,
    gradient: impl Into<Gradient<'a>>,
    beta: f64,
    nesterov: bool,
) -> Result<Tensor, Error> {
    let gradient = gradient.into();
    let operands = [
        ("the momentum", momentum),
        ("the gradient", gradient.values),
    ];
    check_operands(&operands, 1)?;
    let op = MomentumOp::new(MomentumFactors {
        of_gradient: gradient.factors(),
        beta: beta as f32,
        complement: (1.0 - beta) as f32,
        nesterov,
    });
    momentum.inplace_op2(gradient.values, &op)?;
    Ok(op.into_update())
}

/// What is subtracted from weights.
#[derive(Debug, Clone, Copy)]
pub struct Update<'a> {
    /// The weights, in f32.
    pub weights: &'a Tensor,
    /// As it comes from Newton-Schulz, of dtype f32, f16 or bf16.
    pub orthogonalized: &'a Tensor,
    /// See [`UpdateScale`](crate::UpdateScale).
    pub scale: f64,
}

/// Decays weights and subtracts their orthogonalized updates. A device does up to 120 in one launch, if their
/// dtypes do not change between.
///
/// As computed, with `d = 1 - lr·weight_decay` and `s = lr·scale` each rounded to f32 once:
/// `p ← d·p - s·o`. Without decay d is 1, which leaves p exact.
///
/// # Errors
/// For weights that are not contiguous f32, and for an update of another dtype, length or device,
/// or that is not contiguous; for a buffer of weights that is one of updates, too, and for weights that
/// overlap. All weights are untouched then.
pub fn apply_updates(updates: &[Update<'_>], lr: f64, weight_decay: f64) -> Result<(), Error> {
    for update in updates {
        let operands = [
            ("the weights", update.weights),
            ("the update", update.orthogonalized),
        ];
        check_operands(&operands, 1)?;
        check_devices(&operands, "apply")?;
    }
    let pairs = updates.iter().map(|one| (one.weights, one.orthogonalized));
    let pairs: Vec<_> = pairs.collect();
    check_written(&pairs, ["the weights", "the updates"])?;
    let keep = (1.0 - lr * weight_decay) as f32;
    let on_one_device =
        |a: &Update<'_>, b: &Update<'_>| a.weights.device().same_device(b.weights.device());
    for updates in updates.chunk_by(on_one_device) {
        let step = |update: &Update<'_>| (lr * update.scale) as f32;
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = updates[0].weights.device() {
            let updates = updates
                .iter()
                .map(|one| (one.weights, one.orthogonalized, step(one)));
            cuda::apply_all(device, &updates.collect::<Vec<_>>(), keep)?;
            continue;
        }
        for update in updates {
            let op = ApplyOp {
                keep,
                step: step(update),
            };
            update.weights.inplace_op2(update.orthogonalized, &op)?;
        }
    }
    Ok(())
}

/// One AdamW step; `step` counts from 1.
///
/// As computed, with `c1 = 1 - β1ᵗ`, `c2 = 1 - β2ᵗ` and `d = 1 - lr·weight_decay` in f64, rounded
/// to f32 once as are the betas, their complements, lr and eps:
/// `m ← β1·m + (1-β1)·g`, `v ← β2·v + (1-β2)·(g·g)`,
/// `p ← d·p - lr·((m / c1) / (sqrt(v / c2) + eps))`.
///
/// # Errors
/// For operands that are not contiguous or not of equal length in buffers of their own, weights or moments
/// that are not f32, or a `step` of 0; nothing is changed then.
pub fn adamw_update<'a>(
    weights: &Tensor,
    m: &Tensor,
    v: &Tensor,
    gradient: impl Into<Gradient<'a>>,
    step: u64,
    config: &AdamWConfig,
) -> Result<(), Error> {
    let gradient = gradient.into();
    let operands = [
        ("the weights", weights),
        ("the first moment", m),
        ("the second moment", v),
        ("the gradient", gradient.values),
    ];
    check_operands(&operands, 3)?;
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
    let of_gradient = gradient.factors();
    let op = AdamWOp {
        m,
        v,
        of_gradient,
        factors,
    };
    Ok(weights.inplace_op2(gradient.values, &op)?)
}
