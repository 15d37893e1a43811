//! Matrices into one normalized stack for the iteration, and out of it.

#[cfg(feature = "cuda")]
use candle_core::Device;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
use crate::cuda;

/// Matrices `wide`, n × m each, and `tall`, m × n each and turned over, as one stack
/// `(wide + tall, n, m)` in `dtype`, each divided by its Frobenius norm. All are contiguous f32 on
/// one device, with n and m at least 1.
///
/// As computed, for each matrix: e is the exponent of its largest magnitude; every element is
/// multiplied by 2⁻ᵉ, which is exact but for elements 2¹²⁶ times smaller than the largest; the
/// norm is the root of the sum of their squares in f64, rounded to f32; every element is divided by
/// it, in f32. A zero matrix stays zero; one that is not finite becomes NaN throughout.
pub(crate) fn normalize(
    wide: &[Tensor],
    tall: &[Tensor],
    sides: (usize, usize),
    dtype: DType,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(Device::Cuda(device)) = wide.first().or(tall.first()).map(Tensor::device) {
        return cuda::normalize(device, wide, tall, sides, dtype);
    }
    let turned = tall.iter().map(|x| x.t()?.contiguous());
    let all = wide.iter().cloned().map(Ok).chain(turned);
    let stack = Tensor::stack(&all.collect::<Result<Vec<_>>>()?, 0)?;
    debug_assert_eq!(stack.dims()[1..], [sides.0, sides.1]);
    stack.apply_op1_no_bwd(&Normalize)?.to_dtype(dtype)
}

/// A contiguous stack `(batch, n, m)` in f32, each matrix turned over: `(batch, m, n)`.
pub(crate) fn widen_transposed(stack: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if stack.device().is_cuda() {
        return cuda::widen_transposed(stack);
    }
    stack.t()?.contiguous()?.to_dtype(DType::F32)
}

struct Normalize;

impl CustomOp1 for Normalize {
    fn name(&self) -> &'static str {
        "newton-schulz-normalize"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (CpuStorage::F32(x), Some((start, end))) = (storage, layout.contiguous_offsets())
        else {
            bail!("{}: expected contiguous f32", self.name());
        };
        let (_, rows, cols) = layout.shape().dims3()?;
        let mut out = x[start..end].to_vec();
        for matrix in out.chunks_exact_mut(rows * cols) {
            normalize_one(matrix);
        }
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }
}

fn normalize_one(matrix: &mut [f32]) {
    if matrix.iter().any(|x| !x.is_finite()) {
        return matrix.fill(f32::NAN);
    }
    let largest = matrix.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    if largest == 0.0 {
        return;
    }
    let scale = inverse_power_of_two(largest);
    let mut squares = 0f64;
    for x in matrix.iter_mut() {
        *x = (f64::from(*x) * scale) as f32;
        squares += f64::from(*x) * f64::from(*x);
    }
    let norm = squares.sqrt() as f32;
    for x in matrix {
        *x /= norm;
    }
}

/// 2⁻ᵉ for a positive finite `x` in [2ᵉ, 2ᵉ⁺¹). In f64, where subnormal f32 values are normal and
/// no such power is out of range.
fn inverse_power_of_two(x: f32) -> f64 {
    const BIAS: u64 = 1023;
    const FRACTION_BITS: u32 = 52;
    let biased = f64::from(x).to_bits() >> FRACTION_BITS;
    f64::from_bits((2 * BIAS - biased) << FRACTION_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_exact_at_both_ends() {
        for (x, expected) in [
            (1.0, 1.0),
            (1.999, 1.0),
            (2.0, 0.5),
            (f32::MAX, 2f64.powi(-127)),
            (f32::MIN_POSITIVE, 2f64.powi(126)),
            (f32::from_bits(1), 2f64.powi(149)),
        ] {
            assert_eq!(inverse_power_of_two(x), expected, "{x:e}");
        }
    }

    #[test]
    fn the_norm_is_one_at_any_scale() {
        for scale in [1.0, 1e37, 1e-38, f32::from_bits(1)] {
            let mut matrix = [3.0 * scale, -4.0 * scale];
            normalize_one(&mut matrix);
            let [a, b] = matrix;
            assert!(
                (a - 0.6).abs() < 1e-6 && (b + 0.8).abs() < 1e-6,
                "{scale:e}: {matrix:?}"
            );
        }
    }

    #[test]
    fn zero_stays_and_non_finite_spreads() {
        let mut zero = [0.0, -0.0];
        normalize_one(&mut zero);
        assert_eq!(zero, [0.0, 0.0]);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut matrix = [1.0, bad];
            normalize_one(&mut matrix);
            assert!(matrix.iter().all(|x| x.is_nan()));
        }
    }
}
