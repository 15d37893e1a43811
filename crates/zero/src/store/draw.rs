//! Initial weights, drawn from a seed and a name alone: every rank draws the same, in any order.

use candle_core::{CpuStorage, DType, Shape};
use candle_nn::init::{Init, NormalOrUniform};
use half::{bf16, f16};
use polarshard_partition::DigestWriter;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, Uniform};

/// Draws the values of a weight, in the distributions of `candle_nn::Init`.
///
/// # Errors
/// A distribution without meaning (a negative deviation, bounds that are out of order, a fan of zero), or a dtype that
/// cannot be trained.
pub(super) fn draw(
    init: Init,
    seed: u64,
    name: &str,
    shape: &Shape,
    dtype: DType,
) -> candle_core::Result<CpuStorage> {
    let mut rng = ChaCha8Rng::seed_from_u64(DigestWriter::new().u64(seed).str(name).finish().0);
    let len = shape.elem_count();
    let mut uniform = |low: f64, high: f64| -> candle_core::Result<Vec<f32>> {
        let distribution = Uniform::new(low, high).map_err(candle_core::Error::wrap)?;
        Ok((0..len)
            .map(|_| distribution.sample(&mut rng) as f32)
            .collect())
    };
    let values = match init {
        Init::Const(value) => vec![value as f32; len],
        Init::Uniform { lo, up } => uniform(lo, up)?,
        Init::Randn { mean, stdev } => normal(&mut rng, mean, stdev, len)?,
        Init::Kaiming {
            dist,
            fan,
            non_linearity,
        } => {
            let deviation = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Uniform => {
                    uniform(-3f64.sqrt() * deviation, 3f64.sqrt() * deviation)?
                }
                NormalOrUniform::Normal => normal(&mut rng, 0.0, deviation, len)?,
            }
        }
    };
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(values),
        DType::F16 => CpuStorage::F16(values.into_iter().map(f16::from_f32).collect()),
        DType::BF16 => CpuStorage::BF16(values.into_iter().map(bf16::from_f32).collect()),
        other => candle_core::bail!(
            "`{name}` is asked for in {other:?}; f32, f16 and bf16 can be trained"
        ),
    })
}

fn normal(
    rng: &mut ChaCha8Rng,
    mean: f64,
    deviation: f64,
    len: usize,
) -> candle_core::Result<Vec<f32>> {
    let distribution = Normal::new(mean, deviation).map_err(candle_core::Error::wrap)?;
    Ok((0..len).map(|_| distribution.sample(rng) as f32).collect())
}
