//! What the user chooses.

use std::num::NonZeroUsize;

use candle_core::{DType, Device, DeviceLocation};
use polarshard_muon::{AdamWConfig, MuonConfig, Rules};
use polarshard_partition::{Costs, Placement, Policy, Route, Stage};

use crate::error::{Error, Result};

/// The settings of a sharded optimizer. They must be the same on all ranks.
#[derive(Debug, Clone)]
pub struct Config {
    /// What is sharded: optimizer state, or gradients too.
    pub stage: Stage,
    /// Where parameters lie in the flat spaces.
    pub placement: Placement,
    /// How gradients are reduced.
    pub route: Route,
    /// How split matrices get whole.
    pub policy: Policy,
    /// The size at which a bucket closes, in elements.
    pub bucket_size: NonZeroUsize,
    /// Micro-batches in a step.
    pub accumulate: NonZeroUsize,
    /// Whether a bucket is reduced while the backward pass goes on; if not, the pass waits for it.
    pub overlap: bool,
    /// The greatest global norm of the mean gradient; a greater one is scaled down to it.
    pub clip: Option<f64>,
    /// What the losses are multiplied with before they are differentiated.
    pub loss_scale: f64,
    /// The dtype in which gradients are reduced, where it is not the weight's.
    pub gradient_wire: Option<DType>,
    /// Which parameters are orthogonalized.
    pub rules: Rules,
    /// Settings of the update group `muon`.
    pub muon: MuonConfig,
    /// Settings of the update group `adamw`.
    pub adamw: AdamWConfig,
    /// Where the optimizer's state is asked to live. Another device than the weights' is refused.
    pub optimizer_device: Option<DeviceLocation>,
    /// What the machine can do, if placement, route and policy are to be chosen by it; the three settings above are
    /// ignored then.
    pub planned: Option<Costs>,
    /// The rank whose weights all ranks start from. Without it, ranks must start from the same weights.
    pub broadcast_from: Option<usize>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            stage: Stage::Two,
            placement: Placement::default(),
            route: Route::default(),
            policy: Policy::default(),
            bucket_size: NonZeroUsize::new(25_000_000).expect("it is not zero"),
            accumulate: NonZeroUsize::MIN,
            overlap: true,
            clip: None,
            loss_scale: 1.0,
            gradient_wire: None,
            rules: Rules::default(),
            muon: MuonConfig::default(),
            adamw: AdamWConfig::default(),
            optimizer_device: None,
            planned: None,
            broadcast_from: None,
        }
    }
}

impl Config {
    /// The settings under which DeepSpeed's update is reproduced: its flat layout, copies to all owners, its
    /// coefficients, and the Gram iteration for every matrix that is not square.
    pub fn deepspeed() -> Self {
        let mut config = Self {
            placement: Placement::Flat,
            policy: Policy::CopyToOwners,
            ..Self::default()
        };
        config.muon.newton_schulz.method = polarshard_muon::Method::Gram;
        config
    }

    /// With placement, route and policy chosen for the model, the world and the machine.
    pub fn planned(self, costs: Costs) -> Self {
        Self {
            planned: Some(costs),
            ..self
        }
    }

    pub(crate) fn validate(&self, world: usize, device: &Device) -> Result<()> {
        hyper_parameters(&self.muon, &self.adamw, device)?;
        // The other group's rate is kept in proportion to it.
        positive("muon.lr", self.muon.lr)?;
        positive("loss_scale", self.loss_scale)?;
        if let Some(clip) = self.clip {
            positive("clip", clip)?;
        }
        if let Some(dtype) = self.gradient_wire
            && !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        {
            return Err(invalid(
                "gradient_wire",
                &dtype.as_str(),
                "f32, f16 or bf16",
            ));
        }
        match self.broadcast_from {
            Some(rank) if rank >= world => {
                Err(invalid("broadcast_from", &rank, "a rank of the world"))
            }
            _ => Ok(()),
        }
    }
}

/// Checks what may change between steps, for weights on a device.
pub(crate) fn hyper_parameters(
    muon: &MuonConfig,
    adamw: &AdamWConfig,
    device: &Device,
) -> Result<()> {
    muon.validate()?;
    adamw.validate()?;
    Ok(muon.newton_schulz.check_device(device)?)
}

pub(crate) fn positive(field: &'static str, value: f64) -> Result<()> {
    if value.is_finite() && value > 0.0 {
        Ok(())
    } else {
        Err(invalid(field, &value, "positive and finite"))
    }
}

fn invalid(field: &'static str, value: &impl ToString, wanted: &'static str) -> Error {
    Error::InvalidConfig {
        field,
        value: value.to_string(),
        wanted,
    }
}
