//! Models and tensors on their way to a device and back.

use candle_core::{DType, Device, Result, Tensor};

use crate::model::{MicroBatch, Model, StepGradients};

/// Without its empty parameter: devices have no empty tensors.
pub fn on_devices(mut model: Model) -> Model {
    model.params.retain(|param| param.elems() > 0);
    model
}

/// Parameters in another dtype on another device.
///
/// # Errors
/// Of candle.
pub fn moved(
    parameters: &[(String, Tensor)],
    dtype: DType,
    to: &Device,
) -> Result<Vec<(String, Tensor)>> {
    let moved =
        |(name, x): &(String, Tensor)| Ok((name.clone(), x.to_dtype(dtype)?.to_device(to)?));
    parameters.iter().map(moved).collect()
}

/// Gradients in another dtype on another device.
///
/// # Errors
/// Of candle.
pub fn moved_gradients(step: &StepGradients, dtype: DType, to: &Device) -> Result<StepGradients> {
    let gradient = |x: &Option<Tensor>| match x {
        Some(x) => Ok(Some(x.to_dtype(dtype)?.to_device(to)?)),
        None => Ok(None),
    };
    let micro_batch = |batch: &MicroBatch| {
        let gradients = batch.gradients.iter().map(gradient);
        Ok(MicroBatch {
            weight: batch.weight,
            gradients: gradients.collect::<Result<_>>()?,
        })
    };
    step.iter()
        .map(|ranks| ranks.iter().map(micro_batch).collect())
        .collect()
}
