//! The operation whose output is a weight and whose backward pass hands its gradient over.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use polarshard_partition::ParamId;

use crate::gradients::Socket;

/// Applied once, at registration, to a one-element variable: the forward pass yields the weight's storage, so the
/// weight exists once; the backward pass receives the complete gradient once, also of a tied weight, and lets nothing
/// pass on to the variable.
pub(super) struct Hook {
    pub(super) name: String,
    pub(super) shape: Shape,
    /// Yielded by the forward pass.
    pub(super) values: Mutex<Option<CpuStorage>>,
    pub(super) socket: Arc<Socket>,
    /// The weight's id, known once the optimizer is made.
    pub(super) param: Arc<OnceLock<ParamId>>,
}

impl CustomOp1 for Hook {
    fn name(&self) -> &'static str {
        "polarshard-weight"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((self.take()?, self.shape.clone()))
    }

    /// The values were drawn on the host, where every device draws the same, and go to the anchor's device.
    fn cuda_fwd(&self, anchor: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let values = anchor
            .device()
            .storage_from_cpu_storage_owned(self.take()?)?;
        Ok((values, self.shape.clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.socket
            .deliver(self.param.get().copied(), &self.name, gradient)?;
        Ok(None)
    }
}

impl Hook {
    fn take(&self) -> Result<CpuStorage> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        match values.take() {
            Some(values) => Ok(values),
            None => bail!("the weight `{}` was registered twice", self.name),
        }
    }
}
