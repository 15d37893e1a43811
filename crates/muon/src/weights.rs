use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};

use crate::Error;
use crate::elementwise::shares_storage;

/// A variable and its fp32 master, as one flat tensor.
#[derive(Debug)]
pub(crate) struct Weights {
    name: String,
    var: Var,
    /// Of an f32 variable, a view of the variable itself.
    master: Tensor,
}

impl Weights {
    pub(crate) fn new(name: String, var: Var) -> Result<Self, Error> {
        let dtype = var.dtype();
        if !is_trainable(dtype) {
            return Err(Error::DType {
                what: name,
                dtype,
                expected: "f32, f16 or bf16",
            });
        }
        if !var.is_contiguous() {
            return Err(Error::NotContiguous { what: name });
        }
        let master = var
            .as_detached_tensor()
            .flatten_all()?
            .to_dtype(DType::F32)?;
        Ok(Self { name, var, master })
    }

    pub(crate) fn master(&self) -> &Tensor {
        &self.master
    }

    /// A flat f32 tensor of zeros, for a moment.
    pub(crate) fn zeros(&self) -> Result<Tensor, Error> {
        Ok(self.master.zeros_like()?)
    }

    /// The gradient as a flat f32 tensor, if there is one; its values are still to be checked.
    pub(crate) fn gradient(&self, grads: &GradStore) -> Result<Option<Tensor>, Error> {
        let Some(gradient) = grads.get(&self.var) else {
            return Ok(None);
        };
        if gradient.shape() != self.var.shape() {
            return Err(Error::GradientShape {
                name: self.name.clone(),
                gradient: gradient.shape().clone(),
                parameter: self.var.shape().clone(),
            });
        }
        if !is_trainable(gradient.dtype()) {
            let what = format!("the gradient of {}", self.name);
            let dtype = gradient.dtype();
            return Err(Error::DType {
                what,
                dtype,
                expected: "f32, f16 or bf16",
            });
        }
        // A gradient may still carry its graph, which would grow with every step.
        let gradient = gradient
            .detach()
            .to_dtype(DType::F32)?
            .contiguous()?
            .flatten_all()?;
        if shares_storage(&gradient, &self.master) {
            return Ok(Some(gradient.copy()?));
        }
        Ok(Some(gradient))
    }

    /// Refuses a gradient with elements that are not finite.
    pub(crate) fn check_finite(&self, non_finite: u64) -> Result<(), Error> {
        match non_finite {
            0 => Ok(()),
            count => Err(Error::NonFiniteGradient {
                name: self.name.clone(),
                count,
            }),
        }
    }

    /// Rounds the master into the variable.
    pub(crate) fn publish(&self) -> Result<(), Error> {
        if self.var.dtype() != DType::F32 {
            let rounded = self
                .master
                .to_dtype(self.var.dtype())?
                .reshape(self.var.shape())?;
            self.var.set(&rounded)?;
        }
        Ok(())
    }
}

fn is_trainable(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}
