//! Weights whose gradients reach the optimizer during the backward pass.

mod draw;
mod hook;
mod stale;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::{CpuStorage, DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use polarshard_comm::Communicator;
use polarshard_partition::ParamId;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::flat;
use crate::gradients::Socket;
use crate::optimizer::ZeroOptimizer;
use crate::roles::{Role, Roles};
use crate::weights::Weight;

pub(crate) use stale::StaleCheck;

/// The weights of one model on one rank, behind a `VarBuilder`.
///
/// A model built from it needs no changed line: its losses are differentiated through
/// [`ZeroOptimizer::backward`], and each weight's gradient goes to its bucket as soon as candle has it, so that
/// reductions run while the backward pass goes on. Weights are drawn from the seed and their name, so that all ranks
/// start alike.
///
/// ```
/// use std::time::Duration;
///
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, linear};
/// use polarshard_comm::Loopback;
/// use polarshard_partition::WorldSize;
/// use polarshard_zero::{Config, ParamStore, Roles};
///
/// let comm = Loopback::world(WorldSize::new(1)?, Duration::from_secs(10)).remove(0);
/// let store = ParamStore::new(42, Roles::default());
/// let model = linear(8, 4, store.var_builder(DType::F32, &Device::Cpu))?;
/// let mut optimizer = store.optimizer(Box::new(comm), Config::default())?;
///
/// let inputs = Tensor::ones((2, 8), DType::F32, &Device::Cpu)?;
/// let loss = model.forward(&inputs)?.sqr()?.mean_all()?;
/// optimizer.backward(&loss)?;
/// let report = optimizer.step()?;
/// assert_eq!(report.orthogonalized, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ParamStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    seed: u64,
    roles: Roles,
    socket: Arc<Socket>,
    registry: Mutex<Registry>,
}

#[derive(Debug, Default)]
struct Registry {
    /// In the order of the first request.
    entries: Vec<Entry>,
    by_name: BTreeMap<String, usize>,
    /// One element a device, to which the hooks are applied.
    anchors: Vec<Var>,
    sealed: bool,
}

#[derive(Debug, Clone)]
struct Entry {
    name: String,
    tensor: Tensor,
    role: Role,
    param: Arc<OnceLock<ParamId>>,
}

impl ParamStore {
    /// An empty store. `roles` say which of the names that a model will ask for are trained.
    pub fn new(seed: u64, roles: Roles) -> Self {
        let shared = Shared {
            seed,
            roles,
            socket: Arc::default(),
            registry: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// What a model is built from.
    pub fn var_builder(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, device.clone())
    }

    /// The tensor registered under a name. It is the weight itself: a later step shows in it.
    ///
    /// # Errors
    /// [`Error::UnknownName`].
    pub fn get(&self, name: &str) -> Result<Tensor> {
        self.registry()
            .known(name)
            .map(|entry| entry.tensor.clone())
    }

    /// Replaces the values of a registered tensor by others of any dtype, as when weights are loaded before training. Not for
    /// trained weights once the optimizer is made: its masters would not see it.
    ///
    /// # Errors
    /// [`Error::UnknownName`], [`Error::Sealed`], and [`Error::Reregistered`] for another shape.
    pub fn set(&self, name: &str, values: &Tensor) -> Result<()> {
        let registry = self.registry();
        let entry = registry.known(name)?;
        if registry.sealed && matches!(entry.role, Role::Required | Role::Optional) {
            return Err(Error::Sealed {
                name: name.to_string(),
            });
        }
        if entry.tensor.shape() != values.shape() {
            return Err(reregistered(entry, values.shape(), entry.tensor.dtype()));
        }
        // A copy, for they may be views of the tensor itself.
        let values = values.to_dtype(entry.tensor.dtype())?.flatten_all()?;
        let target = entry.tensor.detach().flatten_all()?;
        Ok(flat::write(&target, 0, &values.copy()?)?)
    }

    /// Names in registration order, with their roles.
    pub fn names(&self) -> Vec<(String, Role)> {
        self.registry()
            .entries
            .iter()
            .map(|entry| (entry.name.clone(), entry.role))
            .collect()
    }

    /// Makes the optimizer of all trained weights. After it, no new name can be asked for.
    ///
    /// # Errors
    /// [`Error::NoParameters`], [`Error::UnmatchedPattern`], [`Error::Offload`], [`Error::HasOptimizer`] if the store
    /// has an optimizer, or had one, an invalid [`Config`], and [`Error::Disagreement`] if ranks differ.
    pub fn optimizer(&self, comm: Box<dyn Communicator>, config: Config) -> Result<ZeroOptimizer> {
        // Sealed before ranks wait for each other: one of them may have come here with a clone of this store, and must be
        // refused, not kept waiting for the registry.
        self.registry().seal()?;
        let made = self.sealed_optimizer(comm, config);
        if made.is_err() {
            self.registry().sealed = false;
        }
        made
    }

    fn sealed_optimizer(
        &self,
        comm: Box<dyn Communicator>,
        config: Config,
    ) -> Result<ZeroOptimizer> {
        let entries = self.registry().entries.clone();
        self.shared
            .roles
            .check(&entries.iter().map(|entry| entry.name.as_str()))?;
        let trained: Vec<_> = entries
            .iter()
            .filter(|entry| matches!(entry.role, Role::Required | Role::Optional))
            .collect();
        let weights = trained
            .iter()
            .map(|entry| {
                Weight::new(
                    entry.name.clone(),
                    &entry.tensor,
                    entry.role == Role::Optional,
                )
            })
            .collect::<Result<Vec<_>>>()?;
        let stale = StaleCheck::new(entries.iter().map(|entry| &entry.tensor));
        let optimizer =
            ZeroOptimizer::with_store(weights, stale, &self.shared.socket, comm, config)?;
        for (entry, (param, _)) in trained.into_iter().zip(optimizer.plan().params().iter()) {
            entry.param.get_or_init(|| param);
        }
        Ok(optimizer)
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.shared
            .registry
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn register(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let mut registry = self.registry();
        if let Ok(entry) = registry.known(name) {
            if entry.tensor.shape() != &shape || entry.tensor.dtype() != dtype {
                return Err(reregistered(entry, &shape, dtype));
            }
            return Ok(entry.tensor.clone());
        }
        if registry.sealed {
            return Err(Error::Sealed {
                name: name.to_string(),
            });
        }
        let values = draw::draw(init, self.shared.seed, name, &shape, dtype)?;
        let role = self.shared.roles.of(name);
        let param = Arc::new(OnceLock::new());
        let tensor = match role {
            Role::Frozen => plain(values, &shape, device)?,
            Role::Buffer => Var::from_tensor(&plain(values, &shape, device)?)?.into_inner(),
            Role::Required | Role::Optional => {
                let hook = hook::Hook {
                    name: name.to_string(),
                    shape,
                    values: Mutex::new(Some(values)),
                    socket: Arc::clone(&self.shared.socket),
                    param: Arc::clone(&param),
                };
                registry.anchor(device)?.apply_op1(hook)?
            }
        };
        let index = registry.entries.len();
        registry.entries.push(Entry {
            name: name.to_string(),
            tensor: tensor.clone(),
            role,
            param,
        });
        registry.by_name.insert(name.to_string(), index);
        Ok(tensor)
    }
}

impl SimpleBackend for ParamStore {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        Ok(self.register(shape, name, init, dtype, device)?)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        Ok(Self::get(self, name)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.registry().by_name.contains_key(name)
    }
}

impl Registry {
    fn known(&self, name: &str) -> Result<&Entry> {
        let index = self.by_name.get(name).ok_or_else(|| Error::UnknownName {
            name: name.to_string(),
        })?;
        Ok(&self.entries[*index])
    }

    /// From now on no name can be added, and no second optimizer made.
    fn seal(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.sealed, true) {
            return Err(Error::HasOptimizer);
        }
        Ok(())
    }

    fn anchor(&mut self, device: &Device) -> Result<Tensor> {
        if let Some(anchor) = self
            .anchors
            .iter()
            .find(|anchor| anchor.device().same_device(device))
        {
            return Ok(anchor.as_tensor().clone());
        }
        let anchor = Var::zeros(1, DType::F32, device)?;
        self.anchors.push(anchor.clone());
        Ok(anchor.into_inner())
    }
}

fn plain(values: CpuStorage, shape: &Shape, device: &Device) -> candle_core::Result<Tensor> {
    let storage = candle_core::Storage::Cpu(values);
    let none = candle_core::op::BackpropOp::none();
    Tensor::from_storage(storage, shape.clone(), none, false).to_device(device)
}

fn reregistered(entry: &Entry, shape: &Shape, dtype: DType) -> Error {
    let text = |shape: &Shape, dtype: DType| format!("{:?} {dtype:?}", shape.dims());
    Error::Reregistered {
        name: entry.name.clone(),
        registered: text(entry.tensor.shape(), entry.tensor.dtype()),
        requested: text(shape, dtype),
    }
}
