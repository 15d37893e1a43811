//! Checks that all ranks were built alike, before the first gradient.

use candle_core::Device;
use polarshard_partition::{Digest, DigestWriter, Plan};

use crate::channel::Channel;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::weights::Weight;

/// Compares digests of all that ranks must have in common, part by part.
///
/// # Errors
/// [`Error::Disagreement`] naming the part and the first rank that differs.
pub(crate) fn agree(
    channel: &mut Channel,
    config: &Config,
    weights: &[Weight],
    plan: &Plan,
    device: &Device,
) -> Result<()> {
    compare(
        channel,
        &[
            (
                "the version of this crate",
                DigestWriter::new().str(env!("CARGO_PKG_VERSION")).finish(),
            ),
            ("their parameters", parameters(weights)),
            (
                "update groups, bucket size, layout, route or policy",
                plan.digest(),
            ),
            ("stage, accumulation or gradient dtype", schedule(config)),
            ("hyper-parameters", hyper_parameters(config, device)),
        ],
    )
}

/// A digest of everything a schedule may change.
pub(crate) fn hyper_parameters(config: &Config, device: &Device) -> Digest {
    let Config {
        muon,
        adamw,
        clip,
        loss_scale,
        ..
    } = config;
    let iteration = &muon.newton_schulz;
    let digest = DigestWriter::new()
        .str(&muon.scale.to_string())
        .str(&iteration.method.to_string())
        .str(&iteration.kernels.to_string())
        .str(iteration.iterate.on(device).as_str())
        .u64(u64::from(muon.nesterov))
        .u64(clip.map_or(0, f64::to_bits));
    let coefficients = iteration.coefficients.steps(iteration.steps);
    [muon.lr, muon.momentum, muon.weight_decay]
        .into_iter()
        .chain(coefficients.into_iter().flatten())
        .chain([
            adamw.lr,
            adamw.beta1,
            adamw.beta2,
            adamw.eps,
            adamw.weight_decay,
            *loss_scale,
        ])
        .fold(digest, |digest, value| digest.u64(value.to_bits()))
        .finish()
}

fn parameters(weights: &[Weight]) -> Digest {
    weights
        .iter()
        .fold(DigestWriter::new(), |digest, weight| {
            let shape = weight
                .shape
                .iter()
                .fold(digest.str(&weight.name), |digest, dim| {
                    digest.u64(*dim as u64)
                });
            shape
                .str(weight.dtype.as_str())
                .u64(u64::from(weight.optional))
        })
        .finish()
}

fn schedule(config: &Config) -> Digest {
    DigestWriter::new()
        .str(&config.stage.to_string())
        .u64(config.accumulate.get() as u64)
        .str(config.gradient_wire.map_or("", |dtype| dtype.as_str()))
        .finish()
}

fn compare(channel: &mut Channel, parts: &[(&'static str, Digest)]) -> Result<()> {
    // Halves of 32 bits, which an f64 holds exactly.
    let halves: Vec<f64> = parts
        .iter()
        .flat_map(|(_, digest)| [(digest.0 >> 32) as f64, (digest.0 & 0xffff_ffff) as f64])
        .collect();
    let rank = channel.rank();
    for (other, theirs) in channel.collect(&halves)?.into_iter().enumerate() {
        for ((what, mine), theirs) in parts.iter().zip(theirs.chunks(2)) {
            let theirs = ((theirs[0] as u64) << 32) | theirs[1] as u64;
            if mine.0 != theirs {
                let other = polarshard_partition::Rank(other);
                return Err(Error::Disagreement {
                    rank,
                    other,
                    what,
                    mine: mine.0,
                    theirs,
                });
            }
        }
    }
    Ok(())
}
