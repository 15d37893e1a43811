//! What is asked of gradients: of each as it comes, and of all at the end of a step.

use candle_core::Tensor;
use polarshard_partition::ParamId;

use super::Intake;
use crate::error::{Error, Result};

impl Intake {
    /// Whether a gradient is the first one of its parameter in this micro-batch, and fits it.
    pub(super) fn check_gradient(&self, param: ParamId, gradient: &Tensor) -> Result<()> {
        let weight = &self.weights[param.index()];
        let (rank, name) = (self.rank(), weight.name.clone());
        if self.cycle.arrived[param.index()] {
            return Err(Error::RepeatedGradient { rank, name });
        }
        if gradient.dims() != weight.shape {
            let found = gradient.dims().to_vec();
            return Err(Error::GradientShape {
                rank,
                name,
                expected: weight.shape.clone(),
                found,
            });
        }
        if gradient.dtype() != weight.dtype {
            return Err(Error::GradientDtype {
                rank,
                name,
                expected: weight.dtype,
                found: gradient.dtype(),
            });
        }
        let (expected, found) = (
            weight.values().device().location(),
            gradient.device().location(),
        );
        if expected != found {
            return Err(Error::GradientDevice {
                rank,
                name,
                expected,
                found,
            });
        }
        Ok(())
    }

    /// Whether every parameter that needs a gradient had one in a micro-batch of the step.
    ///
    /// # Errors
    /// [`Error::MissingGradient`] naming those that had none.
    pub(super) fn check_complete(&self) -> Result<()> {
        let names: Vec<_> = self
            .weights
            .iter()
            .zip(&self.cycle.present)
            .filter(|(weight, present)| !weight.optional && !**present && weight.elems() > 0)
            .map(|(weight, _)| weight.name.clone())
            .collect();
        if names.is_empty() {
            return Ok(());
        }
        let rank = self.rank();
        Err(Error::MissingGradient { rank, names })
    }
}
