use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use crate::weights::Weights;
use crate::{AdamWConfig, Error, adamw_update, survey_all};

/// The parameters that AdamW trains, and their moments.
#[derive(Debug)]
pub(crate) struct AdamWGroup {
    pub(crate) config: AdamWConfig,
    parameters: Vec<Parameter>,
}

#[derive(Debug)]
struct Parameter {
    weights: Weights,
    /// First and second moment: flat, f32.
    moments: [Tensor; 2],
    /// Steps taken, for the bias correction: its own, since a step without a gradient is none.
    steps: u64,
}

/// A parameter's place in the group, and its gradient.
pub(crate) struct Pending {
    parameter: usize,
    gradient: Tensor,
}

impl AdamWGroup {
    pub(crate) fn new(config: AdamWConfig) -> Result<Self, Error> {
        config.validate()?;
        Ok(Self {
            config,
            parameters: Vec::new(),
        })
    }

    pub(crate) fn push(&mut self, name: String, var: Var) -> Result<(), Error> {
        let weights = Weights::new(name, var)?;
        let moments = [weights.zeros()?, weights.zeros()?];
        self.parameters.push(Parameter {
            weights,
            moments,
            steps: 0,
        });
        Ok(())
    }

    /// All that can fail for the caller's reasons; changes nothing.
    pub(crate) fn prepare(&self, grads: &GradStore) -> Result<Vec<Pending>, Error> {
        self.config.validate()?;
        let mut pending = Vec::new();
        let mut gradients = Vec::new();
        for (parameter, Parameter { weights, .. }) in self.parameters.iter().enumerate() {
            if let Some(gradient) = weights.gradient(grads)? {
                gradients.push(gradient.clone());
                pending.push(Pending {
                    parameter,
                    gradient,
                });
            }
        }
        let mut squares = 0.0;
        for (pending, found) in pending.iter().zip(survey_all(&gradients)?) {
            let weights = &self.parameters[pending.parameter].weights;
            weights.check_finite(found.non_finite)?;
            squares += found.sum_of_squares;
        }
        let norm = squares.sqrt();
        if norm >= AdamWConfig::LARGEST_NORM {
            return Err(Error::GradientNorm { norm });
        }
        Ok(pending)
    }

    pub(crate) fn apply(&mut self, pending: &[Pending]) -> Result<(), Error> {
        for Pending {
            parameter,
            gradient,
        } in pending
        {
            let Parameter {
                weights,
                moments: [m, v],
                steps,
            } = &mut self.parameters[*parameter];
            adamw_update(weights.master(), m, v, gradient, *steps + 1, &self.config)?;
            *steps += 1;
            weights.publish()?;
        }
        Ok(())
    }
}
