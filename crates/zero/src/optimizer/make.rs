//! How an optimizer is made.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};

use candle_core::Var;
use candle_nn::VarMap;
use polarshard_comm::Communicator;

use super::{Rates, Source, ZeroOptimizer};
use crate::channel::Channel;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::flat;
use crate::gradients::{Inbox, Intake, Socket};
use crate::roles::{Role, Roles};
use crate::setup::Setup;
use crate::step::Stepper;
use crate::store::StaleCheck;
use crate::weights::Weight;

impl ZeroOptimizer {
    /// Makes an optimizer of named variables, in list order. Frozen ones and buffers are left alone.
    ///
    /// # Errors
    /// [`Error::NoParameters`], [`Error::DuplicateName`], [`Error::SharedVariable`], [`Error::UnmatchedPattern`],
    /// [`Error::Offload`], an invalid [`Config`], and [`Error::Disagreement`] if ranks differ.
    pub fn from_named(
        variables: Vec<(String, Var)>,
        roles: &Roles,
        comm: Box<dyn Communicator>,
        config: Config,
    ) -> Result<Self> {
        roles.check(&variables.iter().map(|(name, _)| name.as_str()))?;
        let (mut names, mut storages) = (BTreeSet::new(), BTreeMap::new());
        for (name, variable) in &variables {
            if !names.insert(name) {
                return Err(Error::DuplicateName { name: name.clone() });
            }
            if let Some(first) = storages.insert(flat::address(variable), name) {
                return Err(Error::SharedVariable {
                    first: first.clone(),
                    second: name.clone(),
                });
            }
        }
        let mut weights = Vec::new();
        let mut sources = Vec::new();
        for (name, variable) in variables {
            let role = roles.of(&name);
            if matches!(role, Role::Required | Role::Optional) {
                weights.push(Weight::new(
                    name,
                    variable.as_tensor(),
                    role == Role::Optional,
                )?);
                sources.push(variable);
            }
        }
        Self::new(weights, Source::Variables(sources), comm, config)
    }

    /// Makes an optimizer of a `VarMap`'s variables, sorted by name.
    ///
    /// # Errors
    /// As [`from_named`](Self::from_named).
    pub fn from_var_map(
        map: &VarMap,
        roles: &Roles,
        comm: Box<dyn Communicator>,
        config: Config,
    ) -> Result<Self> {
        let mut variables: Vec<_> = {
            let data = map.data().lock().unwrap_or_else(PoisonError::into_inner);
            data.iter()
                .map(|(name, variable)| (name.clone(), variable.clone()))
                .collect()
        };
        variables.sort_by(|(left, _), (right, _)| left.cmp(right));
        Self::from_named(variables, roles, comm, config)
    }

    pub(crate) fn with_store(
        weights: Vec<Weight>,
        stale: StaleCheck,
        socket: &Socket,
        comm: Box<dyn Communicator>,
        config: Config,
    ) -> Result<Self> {
        let optimizer = Self::new(weights, Source::Store(stale), comm, config)?;
        socket.connect(&optimizer.inbox);
        Ok(optimizer)
    }

    fn new(
        weights: Vec<Weight>,
        source: Source,
        comm: Box<dyn Communicator>,
        config: Config,
    ) -> Result<Self> {
        let mut channel = Channel::new(comm);
        let setup = Setup::new(&mut channel, &weights, config)?;
        let weights = Arc::new(weights);
        let stepper = Stepper::new(&channel, &setup, &weights)?;
        let inbox = Inbox::new(Intake::new(channel, &setup, Arc::clone(&weights))?);
        let Setup {
            routing,
            plan,
            config,
            ..
        } = setup;
        Ok(Self {
            inbox,
            source,
            weights,
            plan,
            routing,
            stepper,
            rates: Rates {
                muon: config.muon.lr,
                adamw: config.adamw.lr,
            },
            config,
            steps: 0,
            ended: None,
        })
    }
}
