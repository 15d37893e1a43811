//! The settings of a run, and which of them are reproduced.

use std::num::NonZeroUsize;
use std::path::Path;

use polarshard_muon::Method;
use polarshard_partition::{Route, Stage, WorldSize};
use serde::Deserialize;

use super::Error;

/// The settings of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// Ranks.
    pub world: WorldSize,
    /// The ZeRO stage.
    pub stage: Stage,
    /// The iteration.
    pub method: Method,
    /// How gradients were reduced.
    pub route: Route,
    /// Micro-batches in a step.
    pub accumulate: NonZeroUsize,
    /// Whether reductions overlapped the backward pass.
    pub overlap: bool,
    /// Elements of a bucket.
    pub bucket_size: NonZeroUsize,
    /// The weight decay of both groups.
    pub weight_decay: f64,
    /// Muon's learning rate.
    pub muon_lr: f64,
    /// AdamW's.
    pub adamw_lr: f64,
    /// Optimizer steps.
    pub steps: usize,
}

/// The route that DeepSpeed's switches `reduce_scatter`, `use_multi_rank_bucket_allreduce` and `contiguous_gradients`
/// amount to.
pub fn route(reduce_scatter: bool, multi_rank: bool, contiguous: bool) -> Route {
    match (reduce_scatter && contiguous, multi_rank) {
        (false, _) => Route::AllReduce,
        (true, true) => Route::BucketAllReduce,
        (true, false) => Route::ReduceToOwner,
    }
}

/// `case`, as it is written.
#[derive(Debug, Deserialize)]
pub(super) struct RawCase {
    world: usize,
    stage: u64,
    ns: String,
    rs: bool,
    multi: bool,
    gas: usize,
    overlap: bool,
    contiguous: bool,
    bucket: usize,
    wd: f64,
    lr: f64,
    adam_lr: f64,
    steps: usize,
    #[serde(default)]
    clip: f64,
    #[serde(default = "one")]
    scale: f64,
    #[serde(default = "fp32")]
    dtype: String,
}

fn one() -> f64 {
    1.0
}

fn fp32() -> String {
    "fp32".to_owned()
}

impl RawCase {
    pub(super) fn checked(self, path: &Path) -> Result<Case, Error> {
        let bad = |key, value: String, expected| Error::Unsupported {
            path: path.to_path_buf(),
            key,
            value,
            expected,
        };
        if self.clip != 0.0 {
            return Err(bad(
                "clip",
                self.clip.to_string(),
                "0: DeepSpeed clips the orthogonalized update, we do not",
            ));
        }
        if self.scale != 1.0 {
            return Err(bad(
                "scale",
                self.scale.to_string(),
                "1: DeepSpeed divides the orthogonalized update by it",
            ));
        }
        if self.dtype != "fp32" {
            return Err(bad("dtype", self.dtype, "fp32"));
        }
        let stage = match self.stage {
            1 => Stage::One,
            2 => Stage::Two,
            other => return Err(bad("stage", other.to_string(), "1 or 2")),
        };
        let method = match self.ns.as_str() {
            "gram" => Method::Gram,
            "standard" => Method::Standard,
            other => return Err(bad("ns", other.to_owned(), "gram or standard")),
        };
        let positive = |key, value: usize| {
            NonZeroUsize::new(value).ok_or_else(|| bad(key, value.to_string(), "1 or more"))
        };
        Ok(Case {
            world: WorldSize::new(self.world)
                .map_err(|_| bad("world", self.world.to_string(), "1 or more"))?,
            stage,
            method,
            route: route(self.rs, self.multi, self.contiguous),
            accumulate: positive("gas", self.gas)?,
            overlap: self.overlap,
            bucket_size: positive("bucket", self.bucket)?,
            weight_decay: self.wd,
            muon_lr: self.lr,
            adamw_lr: self.adam_lr,
            steps: self.steps,
        })
    }
}
