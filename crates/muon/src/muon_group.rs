use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use crate::weights::Weights;
use crate::{Error, MatrixShape, MuonConfig, Update, apply_updates, momentum_update, survey_all};

/// The parameters that Muon trains, and their momenta.
#[derive(Debug)]
pub(crate) struct MuonGroup {
    pub(crate) config: MuonConfig,
    parameters: Vec<Parameter>,
}

#[derive(Debug)]
struct Parameter {
    weights: Weights,
    matrices: Vec<MatrixShape>,
    /// Flat, f32.
    momentum: Tensor,
}

/// A matrix to update: its slices of weights, momentum and gradient.
pub(crate) struct Pending<'a> {
    shape: MatrixShape,
    weights: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    parameter: &'a Weights,
}

impl MuonGroup {
    pub(crate) fn new(config: MuonConfig) -> Result<Self, Error> {
        config.validate()?;
        Ok(Self {
            config,
            parameters: Vec::new(),
        })
    }

    pub(crate) fn push(
        &mut self,
        name: String,
        var: Var,
        matrices: Vec<MatrixShape>,
    ) -> Result<(), Error> {
        self.config.newton_schulz.check_device(var.device())?;
        let weights = Weights::new(name, var)?;
        let momentum = weights.zeros()?;
        self.parameters.push(Parameter {
            weights,
            matrices,
            momentum,
        });
        Ok(())
    }

    /// All that can fail for the caller's reasons; changes nothing.
    pub(crate) fn prepare(&self, grads: &GradStore) -> Result<Vec<Pending<'_>>, Error> {
        self.config.validate()?;
        let mut pending = Vec::new();
        let mut gradients = Vec::new();
        for Parameter {
            weights,
            matrices,
            momentum,
        } in &self.parameters
        {
            let Some(gradient) = weights.gradient(grads)? else {
                continue;
            };
            for &shape in matrices {
                let slice = |x: &Tensor| x.narrow(0, shape.offset, shape.elem_count());
                let gradient = slice(&gradient)?;
                gradients.push(gradient.clone());
                pending.push(Pending {
                    shape,
                    weights: slice(weights.master())?,
                    momentum: slice(momentum)?,
                    gradient,
                    parameter: weights,
                });
            }
        }
        let surveyed: Vec<_> = pending.into_iter().zip(survey_all(&gradients)?).collect();
        // A parameter's matrices hold all of its elements.
        for same in surveyed.chunk_by(|(a, _), (b, _)| std::ptr::eq(a.parameter, b.parameter)) {
            let non_finite = same.iter().map(|(_, found)| found.non_finite).sum();
            same[0].0.parameter.check_finite(non_finite)?;
        }
        // Momentum alone would step as far as ever: what is orthogonalized has no scale.
        let updated = surveyed.into_iter().filter(|(_, found)| found.non_zero);
        Ok(updated.map(|(pending, _)| pending).collect())
    }

    pub(crate) fn apply(&self, pending: &[Pending<'_>]) -> Result<(), Error> {
        let MuonConfig {
            lr,
            momentum: beta,
            nesterov,
            weight_decay,
            newton_schulz,
            scale,
        } = &self.config;
        let update = |p: &Pending<'_>| {
            let update = momentum_update(&p.momentum, &p.gradient, *beta, *nesterov)?;
            Ok(update.reshape((p.shape.rows, p.shape.cols))?)
        };
        let updates = pending
            .iter()
            .map(update)
            .collect::<Result<Vec<_>, Error>>()?;
        let updates = newton_schulz.orthogonalize_all_as_iterated(&updates)?;
        let updates = pending
            .iter()
            .zip(&updates)
            .map(|(p, orthogonalized)| Update {
                weights: &p.weights,
                orthogonalized,
                scale: scale.factor(p.shape.rows, p.shape.cols),
            });
        apply_updates(&updates.collect::<Vec<_>>(), *lr, *weight_decay)?;
        for same in pending.chunk_by(|a, b| std::ptr::eq(a.parameter, b.parameter)) {
            same[0].parameter.publish()?;
        }
        Ok(())
    }
}
