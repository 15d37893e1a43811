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
    let values = match values(&mut rng, init, shape) {
        Ok(values) => values,
        Err(reason) => candle_core::bail!("`{name}` cannot be drawn from {init:?}: {reason}"),
    };
    let limit = match dtype {
        DType::F16 => f64::from(f16::MAX),
        DType::BF16 => f64::from(bf16::MAX),
        _ => f64::from(f32::MAX),
    };
    // Not a number is within nothing.
    if !values.iter().all(|value| f64::from(value.abs()) <= limit) {
        candle_core::bail!("`{name}` cannot be drawn from {init:?}: {dtype:?} does not hold it");
    }
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(values),
        DType::F16 => CpuStorage::F16(values.into_iter().map(f16::from_f32).collect()),
        DType::BF16 => CpuStorage::BF16(values.into_iter().map(bf16::from_f32).collect()),
        other => candle_core::bail!(
            "`{name}` is asked for in {other:?}; f32, f16 and bf16 can be trained"
        ),
    })
}

/// The values, or why the distribution has none.
fn values(rng: &mut ChaCha8Rng, init: Init, shape: &Shape) -> Result<Vec<f32>, String> {
    let len = shape.elem_count();
    match init {
        Init::Const(value) => Ok(vec![value as f32; len]),
        Init::Uniform { lo, up } => uniform(rng, lo, up, len),
        Init::Randn { mean, stdev } => normal(rng, mean, stdev, len),
        Init::Kaiming {
            dist,
            fan,
            non_linearity,
        } => {
            let deviation = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Uniform => {
                    let bound = 3f64.sqrt() * deviation;
                    uniform(rng, -bound, bound, len)
                }
                NormalOrUniform::Normal => normal(rng, 0.0, deviation, len),
            }
        }
    }
}

fn uniform(rng: &mut ChaCha8Rng, low: f64, high: f64, len: usize) -> Result<Vec<f32>, String> {
    let distribution = Uniform::new(low, high).map_err(|error| error.to_string())?;
    Ok((0..len).map(|_| distribution.sample(rng) as f32).collect())
}

fn normal(rng: &mut ChaCha8Rng, mean: f64, deviation: f64, len: usize) -> Result<Vec<f32>, String> {
    // Of a negative deviation `Normal` makes the same distribution, mirrored.
    if deviation < 0.0 {
        return Err("its deviation is negative".to_owned());
    }
    let distribution = Normal::new(mean, deviation).map_err(|error| error.to_string())?;
    Ok((0..len).map(|_| distribution.sample(rng) as f32).collect())
}

#[cfg(test)]
mod tests {
    use candle_nn::init::{FanInOut, NonLinearity};

    use super::*;

    #[test]
    fn what_cannot_be_drawn_is_named() {
        let kaiming = |dist| Init::Kaiming {
            dist,
            fan: FanInOut::FanIn,
            non_linearity: NonLinearity::Linear,
        };
        let randn = |stdev| Init::Randn { mean: 0.0, stdev };
        for (init, shape) in [
            (randn(-1.0), (2, 3)),
            (randn(f64::NAN), (2, 3)),
            (Init::Uniform { lo: 1.0, up: 0.0 }, (2, 3)),
            (
                Init::Randn {
                    mean: f64::NAN,
                    stdev: 1.0,
                },
                (2, 3),
            ),
            (Init::Const(f64::NAN), (2, 3)),
            (Init::Const(1e300), (2, 3)),
            (kaiming(NormalOrUniform::Uniform), (2, 0)),
            (kaiming(NormalOrUniform::Normal), (2, 0)),
        ] {
            let error = draw(init, 0, "head.weight", &shape.into(), DType::F32).unwrap_err();
            let said = error.to_string();
            assert!(
                said.contains("`head.weight` cannot be drawn from"),
                "{said}"
            );
        }
        let half = draw(
            Init::Const(1e5),
            0,
            "head.weight",
            &(2, 3).into(),
            DType::F16,
        )
        .unwrap_err();
        assert!(half.to_string().contains("F16 does not hold it"), "{half}");
        let error = draw(randn(1.0), 0, "ids", &(2, 3).into(), DType::U32).unwrap_err();
        assert!(
            error.to_string().contains("`ids` is asked for in U32"),
            "{error}"
        );
        let still = draw(randn(0.0), 0, "head.weight", &(2, 3).into(), DType::F32).unwrap();
        assert!(matches!(still, CpuStorage::F32(values) if values == [0.0; 6]));
    }
}
