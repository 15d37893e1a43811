//! Reads golden cases: what DeepSpeed did to given gradients. The format is described in `golden/README.md`.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use polarshard_muon::Method;
use polarshard_partition::{Route, Stage, WorldSize};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::model::{MicroBatch, StepGradients};

/// Why a file is no golden case, or not one that can be reproduced. All name the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not in the safetensors format.
    #[error("{}: not a safetensors file: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Why.
        source: safetensors::SafeTensorError,
    },
    /// Something is not there.
    #[error("{}: there is no {what} `{key}`", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// `metadata` or `tensor`.
        what: &'static str,
        /// Its key.
        key: String,
    },
    /// The value of a key of the metadata is not what it should be.
    #[error("{}: metadata `{key}`: {source}", path.display())]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// Why.
        source: serde_json::Error,
    },
    /// A setting that is not reproduced, or has no meaning.
    #[error("{}: `{key}` is {value}, expected {expected}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The setting.
        key: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// A tensor has another dtype than F32.
    #[error("{}: tensor `{key}` is {dtype:?}, expected F32", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        key: String,
        /// Its dtype.
        dtype: Dtype,
    },
    /// A tensor has another shape than its parameter.
    #[error("{}: tensor `{key}` has shape {found:?}, its parameter has {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        key: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape of `init/NAME`.
        expected: Vec<usize>,
    },
    /// A tensor cannot be made.
    #[error("{}: tensor `{key}`: {source}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        key: String,
        /// Why.
        source: Box<candle_core::Error>,
    },
}

/// A golden case.
#[derive(Debug)]
pub struct Golden {
    /// The file that it was read from.
    pub path: PathBuf,
    /// Its settings.
    pub case: Case,
    /// The update groups, Muon's first.
    pub groups: [Group; 2],
    /// The parameters before the run, in `order`.
    pub initial: Vec<(String, Tensor)>,
    /// The gradients of each step.
    pub gradients: Vec<StepGradients>,
    /// The parameters after each step, in `order`.
    pub after: Vec<Vec<Tensor>>,
}

/// Where an update group's parameters were.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its parameters, in flat order.
    pub names: Vec<String>,
    /// The owners of each.
    pub owners: Vec<Vec<usize>>,
    /// Elements of a shard; 0 for a group without parameters.
    pub shard_len: usize,
}

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

impl Golden {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Error`], if it cannot be read, is incomplete, or is of a run that is not reproduced.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref().to_path_buf();
        let bytes = std::fs::read(&path).map_err(|source| Error::Read {
            path: path.clone(),
            source,
        })?;
        let format = |source| Error::Format {
            path: path.clone(),
            source,
        };
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(format)?;
        let file = File {
            path: &path,
            metadata: header
                .metadata()
                .iter()
                .flatten()
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect(),
            tensors: SafeTensors::deserialize(&bytes).map_err(format)?,
        };

        let case = file.json::<RawCase>("case")?.checked(&path)?;
        let groups = file.groups()?;
        let names = || groups.iter().flat_map(|group| &group.names);
        let initial = names()
            .map(|name| Ok((name.clone(), file.tensor(&format!("init/{name}"), None)?)))
            .collect::<Result<Vec<_>, Error>>()?;
        let of_parameters = |prefix: &str| -> Result<Vec<Tensor>, Error> {
            let tensor = |(name, init): &(String, Tensor)| {
                file.tensor(&format!("{prefix}/{name}"), Some(init.dims()))
            };
            initial.iter().map(tensor).collect()
        };
        let micro_batch = |step, micro, rank| -> Result<MicroBatch, Error> {
            let gradients = of_parameters(&format!("grad/{step}/{micro}/{rank}"))?;
            Ok(MicroBatch {
                weight: 1.0,
                gradients: gradients.into_iter().map(Some).collect(),
            })
        };
        let step_gradients = |step| -> Result<StepGradients, Error> {
            let ranks = |micro| {
                (0..case.world.get())
                    .map(|rank| micro_batch(step, micro, rank))
                    .collect()
            };
            (0..case.accumulate.get()).map(ranks).collect()
        };
        let gradients = (0..case.steps)
            .map(step_gradients)
            .collect::<Result<_, _>>()?;
        let after = (0..case.steps)
            .map(|step| of_parameters(&format!("after/{step}")))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            case,
            groups,
            initial,
            gradients,
            after,
            path,
        })
    }
}

/// A file whose header was read.
struct File<'a> {
    path: &'a Path,
    metadata: BTreeMap<String, String>,
    tensors: SafeTensors<'a>,
}

impl File<'_> {
    fn json<T: DeserializeOwned>(&self, key: &'static str) -> Result<T, Error> {
        let text = self
            .metadata
            .get(key)
            .ok_or_else(|| self.missing("metadata", key))?;
        serde_json::from_str(text).map_err(|source| Error::Metadata {
            path: self.path.to_path_buf(),
            key,
            source,
        })
    }

    fn groups(&self) -> Result<[Group; 2], Error> {
        let order: [Vec<String>; 2] = self.json("order")?;
        let owners: BTreeMap<usize, Vec<Vec<usize>>> = self.json("partition_ids")?;
        let lens: Vec<usize> = self.json("partition_size")?;
        // DeepSpeed drops a group without parameters, and numbers what is left.
        let filled = order.iter().filter(|names| !names.is_empty()).count();
        let mut numbers = 0..;
        let mut group = |names: Vec<String>| {
            let counted = !names.is_empty() || lens.len() > filled;
            let Some(number) = counted.then(|| numbers.next()).flatten() else {
                return Ok(Group {
                    names,
                    owners: Vec::new(),
                    shard_len: 0,
                });
            };
            let owners = owners.get(&number).cloned().unwrap_or_default();
            if owners.len() != names.len() {
                let value = format!("of {} parameters in group {number}", owners.len());
                return Err(self.unsupported(
                    "partition_ids",
                    value,
                    "one list for each parameter of `order`",
                ));
            }
            let Some(shard_len) = lens.get(number).copied() else {
                let value = format!("of {} groups", lens.len());
                return Err(self.unsupported(
                    "partition_size",
                    value,
                    "one for each group of `order`",
                ));
            };
            Ok(Group {
                names,
                owners,
                shard_len,
            })
        };
        let [muon, adamw] = order;
        Ok([group(muon)?, group(adamw)?])
    }

    fn tensor(&self, key: &str, expected: Option<&[usize]>) -> Result<Tensor, Error> {
        let path = self.path.to_path_buf();
        let view = self
            .tensors
            .tensor(key)
            .map_err(|_| self.missing("tensor", key))?;
        if view.dtype() != Dtype::F32 {
            return Err(Error::Dtype {
                path,
                key: key.to_owned(),
                dtype: view.dtype(),
            });
        }
        if let Some(expected) = expected.filter(|expected| *expected != view.shape()) {
            let (found, expected) = (view.shape().to_vec(), expected.to_vec());
            return Err(Error::Shape {
                path,
                key: key.to_owned(),
                found,
                expected,
            });
        }
        let values: Vec<f32> = view
            .data()
            .as_chunks()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        Tensor::from_vec(values, view.shape(), &Device::Cpu).map_err(|source| Error::Tensor {
            path,
            key: key.to_owned(),
            source: Box::new(source),
        })
    }

    fn missing(&self, what: &'static str, key: &str) -> Error {
        Error::Missing {
            path: self.path.to_path_buf(),
            what,
            key: key.to_owned(),
        }
    }

    fn unsupported(&self, key: &'static str, value: String, expected: &'static str) -> Error {
        Error::Unsupported {
            path: self.path.to_path_buf(),
            key,
            value,
            expected,
        }
    }
}

/// `case`, as it is written.
#[derive(Debug, Deserialize)]
struct RawCase {
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
    fn checked(self, path: &Path) -> Result<Case, Error> {
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
