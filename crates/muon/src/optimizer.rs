//! Optimizers of one device.

use candle_core::backprop::GradStore;
use candle_core::{Result as CandleResult, Var};
use candle_nn::Optimizer;

use crate::adamw_group::AdamWGroup;
use crate::muon_group::MuonGroup;
use crate::rules::suggested_matrices;
use crate::{Decision, Error, MatrixShape, MuonConfig, MuonWithAdamWConfig, RoutingTable, Rules};

/// Muon for variables that are all matrices, stacks of them (3-D) or convolutions (4-D and above).
///
/// Momenta and master weights are f32 whatever the variables' dtype; masters start from the
/// variables' values, and the variables get them rounded. The master of an f32 variable is the
/// variable itself; another one must not be written by anyone else.
///
/// A variable without a gradient is not updated at all, nor is a matrix whose gradient is all zero.
/// A step that returns an error for a gradient of another shape or dtype, or with elements that are
/// not finite, has changed nothing.
#[derive(Debug)]
pub struct Muon {
    group: MuonGroup,
}

impl Optimizer for Muon {
    type Config = MuonConfig;

    fn new(vars: Vec<Var>, config: MuonConfig) -> CandleResult<Self> {
        let mut group = MuonGroup::new(config)?;
        let mut seen = Seen::default();
        for (index, var) in vars.into_iter().enumerate() {
            let name = format!("variable {index}");
            seen.insert(&name, &var)?;
            let matrices = matrices(&name, &var)?;
            group.push(name, var, matrices)?;
        }
        Ok(Self { group })
    }

    fn step(&mut self, grads: &GradStore) -> CandleResult<()> {
        let pending = self.group.prepare(grads)?;
        Ok(self.group.apply(&pending)?)
    }

    fn learning_rate(&self) -> f64 {
        self.group.config.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.group.config.lr = lr;
    }
}

/// Muon for hidden matrices and AdamW for the rest, as the [`Rules`] say.
///
/// As [`Muon`], but that AdamW steps on a gradient of zeros, and that gradients of its parameters from
/// [`AdamWConfig::LARGEST_NORM`](crate::AdamWConfig::LARGEST_NORM) on are an error. The learning rate is Muon's; AdamW's
/// follows it at the ratio of the configuration, so that one schedule serves both.
#[derive(Debug)]
pub struct MuonWithAdamW {
    muon: MuonGroup,
    adamw: AdamWGroup,
    /// AdamW's learning rate over Muon's.
    ratio: f64,
    routing: RoutingTable,
}

/// What [`MuonWithAdamW`] needs to be made by [`Optimizer::new`], which is given no names.
#[derive(Debug, Clone, Default)]
pub struct MuonWithAdamWGroups {
    /// The hyper-parameters.
    pub config: MuonWithAdamWConfig,
    /// The variables that Muon trains: matrices, stacks (3-D) or convolutions (4-D and above).
    pub muon: Vec<Var>,
    /// The variables that AdamW trains.
    pub adamw: Vec<Var>,
}

impl MuonWithAdamW {
    /// An optimizer of variables, routed by their names and shapes.
    ///
    /// # Errors
    /// Those of [`Rules::route`] and of [`MuonWithAdamWConfig::validate`], a learning rate of zero
    /// for Muon, a variable under two names, and variables that are not contiguous or of another
    /// dtype than f32, f16 and bf16.
    pub fn from_named(
        vars: Vec<(String, Var)>,
        rules: &Rules,
        config: MuonWithAdamWConfig,
    ) -> Result<Self, Error> {
        let mut seen = Seen::default();
        for (name, var) in &vars {
            seen.insert(name, var)?;
        }
        let shapes: Vec<_> = vars
            .iter()
            .map(|(name, var)| (name.clone(), var.dims().to_vec()))
            .collect();
        let mut optimizer = Self::without_parameters(config, rules.route(&shapes)?)?;
        let decisions: Vec<_> = optimizer
            .routing
            .entries()
            .iter()
            .map(|routed| routed.decision.clone())
            .collect();
        for ((name, var), decision) in vars.into_iter().zip(decisions) {
            match decision {
                Decision::Muon(matrices) => optimizer.muon.push(name, var, matrices)?,
                Decision::AdamW => optimizer.adamw.push(name, var)?,
            }
        }
        Ok(optimizer)
    }

    /// Which parameter is trained by what; empty if there were no names.
    #[must_use]
    pub fn routing(&self) -> &RoutingTable {
        &self.routing
    }

    fn from_groups(vars: &[Var], groups: MuonWithAdamWGroups) -> Result<Self, Error> {
        let mut optimizer = Self::without_parameters(groups.config, RoutingTable::new(Vec::new()))?;
        let mut given = Seen::default();
        for (index, var) in vars.iter().enumerate() {
            given.insert(&format!("variable {index}"), var)?;
        }
        let mut listed = Seen::default();
        for (index, var) in groups.muon.into_iter().enumerate() {
            let name = format!("muon variable {index}");
            listed.insert(&name, &var)?;
            given.require(&name, &var)?;
            let matrices = matrices(&name, &var)?;
            optimizer.muon.push(name, var, matrices)?;
        }
        for (index, var) in groups.adamw.into_iter().enumerate() {
            let name = format!("adamw variable {index}");
            listed.insert(&name, &var)?;
            given.require(&name, &var)?;
            optimizer.adamw.push(name, var)?;
        }
        for (index, var) in vars.iter().enumerate() {
            if listed.find(var).is_none() {
                let name = format!("variable {index}");
                return Err(Error::NotInAGroup {
                    name,
                    shape: var.dims().to_vec(),
                });
            }
        }
        Ok(optimizer)
    }

    fn without_parameters(
        config: MuonWithAdamWConfig,
        routing: RoutingTable,
    ) -> Result<Self, Error> {
        let MuonWithAdamWConfig { muon, adamw } = config;
        if muon.lr == 0.0 {
            let requirement = "positive: the learning rate of adamw is kept in proportion to it";
            return Err(Error::Config {
                field: "muon.lr",
                value: muon.lr,
                requirement,
            });
        }
        let ratio = adamw.lr / muon.lr;
        Ok(Self {
            muon: MuonGroup::new(muon)?,
            adamw: AdamWGroup::new(adamw)?,
            ratio,
            routing,
        })
    }
}

impl Optimizer for MuonWithAdamW {
    type Config = MuonWithAdamWGroups;

    /// Each of `vars` must be in one of the two groups, and the groups must hold no others.
    fn new(vars: Vec<Var>, config: MuonWithAdamWGroups) -> CandleResult<Self> {
        Ok(Self::from_groups(&vars, config)?)
    }

    fn step(&mut self, grads: &GradStore) -> CandleResult<()> {
        let (muon, adamw) = (self.muon.prepare(grads)?, self.adamw.prepare(grads)?);
        self.muon.apply(&muon)?;
        Ok(self.adamw.apply(&adamw)?)
    }

    fn learning_rate(&self) -> f64 {
        self.muon.config.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.muon.config.lr = lr;
        self.adamw.config.lr = lr * self.ratio;
    }
}

fn matrices(name: &str, var: &Var) -> Result<Vec<MatrixShape>, Error> {
    match suggested_matrices(var.dims()) {
        Some(matrices) if var.elem_count() > 0 => Ok(matrices),
        _ => Err(Error::NotForMuon {
            name: name.to_owned(),
            shape: var.dims().to_vec(),
        }),
    }
}

/// Variables by identity, with the names that they were first seen by.
#[derive(Default)]
struct Seen(Vec<(Var, String)>);

impl Seen {
    fn find(&self, var: &Var) -> Option<&str> {
        self.0
            .iter()
            .find(|(seen, _)| seen.id() == var.id())
            .map(|(_, name)| name.as_str())
    }

    fn insert(&mut self, name: &str, var: &Var) -> Result<(), Error> {
        if let Some(first) = self.find(var) {
            return Err(Error::SharedVariable {
                first: first.to_owned(),
                second: name.to_owned(),
            });
        }
        self.0.push((var.clone(), name.to_owned()));
        Ok(())
    }

    fn require(&self, name: &str, var: &Var) -> Result<(), Error> {
        match self.find(var) {
            Some(_) => Ok(()),
            None => Err(Error::NotGiven {
                name: name.to_owned(),
                shape: var.dims().to_vec(),
            }),
        }
    }
}
