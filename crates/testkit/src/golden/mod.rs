//! Reads golden cases: what DeepSpeed did to given gradients. The format is described in `golden/README.md`.

mod case;
mod error;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use safetensors::{Dtype, SafeTensors};
use serde::de::DeserializeOwned;

use crate::model::{MicroBatch, StepGradients};

pub use case::{Case, route};
pub use error::Error;

use case::RawCase;

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
