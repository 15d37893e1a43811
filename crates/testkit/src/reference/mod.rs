//! Optimizers of one device without shards: what every sharded run is compared with.

mod exact;
mod iteration;
mod single;

pub use exact::Exact;
pub use iteration::newton_schulz;
pub use single::Single;

use polarshard_muon::{AdamWConfig, MuonConfig, Rules};
use polarshard_zero::Config;

/// The settings that a result depends on; how a run is sharded is not among them.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Of the update group `muon`.
    pub muon: MuonConfig,
    /// Of the update group `adamw`.
    pub adamw: AdamWConfig,
    /// Which parameter is in which.
    pub rules: Rules,
    /// The greatest global norm of the mean gradient.
    pub clip: Option<f64>,
}

impl Settings {
    /// Those of a sharded run.
    pub fn of(config: &Config) -> Self {
        let Config {
            muon,
            adamw,
            rules,
            clip,
            ..
        } = config.clone();
        Self {
            muon,
            adamw,
            rules,
            clip,
        }
    }
}

/// The norm of a step's mean gradient, and what was done about it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clipping {
    /// The global norm before clipping.
    pub norm: f64,
    /// What the mean gradient was multiplied with.
    pub factor: f64,
}

impl Clipping {
    fn new(norm: f64, most: Option<f64>) -> Self {
        let factor = most
            .filter(|most| norm > *most)
            .map_or(1.0, |most| most / norm);
        Self { norm, factor }
    }
}
