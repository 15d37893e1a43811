//! The optimizer in f32 on one device: the same steps in the same roundings as a sharded run, on whole parameters.

use candle_core::{DType, Device, Tensor};
use polarshard_muon::{
    Decision, Error, MatrixShape, Update, adamw_update, apply_updates, momentum_update, survey,
};

use super::{Clipping, Settings};
use crate::model::StepGradients;

/// An unsharded optimizer in f32.
///
/// Gradients are summed over ranks, in rank order, and then over micro-batches, and multiplied once by the inverse of
/// the sum of weights. Where sums are exact in f32, sharded runs have the same bits.
#[derive(Debug)]
pub struct Single {
    /// Changed between steps by schedules.
    pub settings: Settings,
    parameters: Vec<Parameter>,
}

#[derive(Debug)]
struct Parameter {
    shape: Vec<usize>,
    weights: Tensor,
    state: State,
}

#[derive(Debug)]
enum State {
    Muon {
        matrices: Vec<MatrixShape>,
        momentum: Tensor,
    },
    AdamW {
        first: Tensor,
        second: Tensor,
        steps: u64,
    },
}

/// A matrix on its way through a step.
struct Job<'a> {
    shape: &'a MatrixShape,
    weights: Tensor,
    update: Tensor,
}

impl Single {
    /// The trained parameters in registration order, of which copies are made.
    ///
    /// # Errors
    /// Of routing, or of making tensors.
    pub fn new(parameters: &[(String, Tensor)], settings: Settings) -> Result<Self, Error> {
        let shapes: Vec<_> = parameters
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.dims().to_vec()))
            .collect();
        let routing = settings.rules.route(&shapes)?;
        let parameters = routing
            .entries()
            .iter()
            .zip(parameters)
            .map(|(routed, (_, tensor))| {
                let zeros = || Tensor::zeros(tensor.elem_count(), DType::F32, &Device::Cpu);
                let state = match &routed.decision {
                    Decision::Muon(matrices) => State::Muon {
                        matrices: matrices.clone(),
                        momentum: zeros()?,
                    },
                    Decision::AdamW => State::AdamW {
                        first: zeros()?,
                        second: zeros()?,
                        steps: 0,
                    },
                };
                let weights = tensor
                    .detach()
                    .to_dtype(DType::F32)?
                    .flatten_all()?
                    .copy()?;
                Ok(Parameter {
                    shape: tensor.dims().to_vec(),
                    weights,
                    state,
                })
            });
        Ok(Self {
            settings,
            parameters: parameters.collect::<Result<_, Error>>()?,
        })
    }

    /// Copies of the weights, in registration order.
    ///
    /// # Errors
    /// Of making tensors.
    pub fn weights(&self) -> candle_core::Result<Vec<Tensor>> {
        self.parameters
            .iter()
            .map(|parameter| {
                parameter
                    .weights
                    .copy()?
                    .reshape(parameter.shape.as_slice())
            })
            .collect()
    }

    /// One step on the mean over all micro-batches of all ranks.
    ///
    /// # Errors
    /// Of the elementary steps.
    pub fn step(&mut self, gradients: &StepGradients) -> Result<Clipping, Error> {
        let weight: f64 = gradients
            .iter()
            .flatten()
            .map(|micro_batch| micro_batch.weight)
            .sum();
        let mut means = Vec::new();
        let mut squares = 0.0;
        for param in 0..self.parameters.len() {
            let mean = sum(gradients, param)?
                .map(|sum| scaled(&sum, 1.0 / weight))
                .transpose()?;
            if let Some(mean) = &mean {
                squares += survey(mean)?.sum_of_squares;
            }
            means.push(mean);
        }
        let clipping = Clipping::new(squares.sqrt(), self.settings.clip);
        let mut jobs = Vec::new();
        for (parameter, mean) in self.parameters.iter_mut().zip(means) {
            let Some(mean) = mean else { continue };
            let mean = scaled(&mean, clipping.factor)?;
            match &mut parameter.state {
                State::Muon { matrices, momentum } => {
                    for shape in matrices.iter() {
                        let part = |x: &Tensor| x.narrow(0, shape.offset, shape.elem_count());
                        if survey(&part(&mean)?)?.non_zero {
                            let config = &self.settings.muon;
                            let update = momentum_update(
                                &part(momentum)?,
                                &part(&mean)?,
                                config.momentum,
                                config.nesterov,
                            )?;
                            let update = update.reshape((shape.rows, shape.cols))?;
                            jobs.push(Job {
                                shape,
                                weights: part(&parameter.weights)?,
                                update,
                            });
                        }
                    }
                }
                State::AdamW {
                    first,
                    second,
                    steps,
                } => {
                    *steps += 1;
                    adamw_update(
                        &parameter.weights,
                        first,
                        second,
                        &mean,
                        *steps,
                        &self.settings.adamw,
                    )?;
                }
            }
        }
        let config = &self.settings.muon;
        let updates: Vec<_> = jobs.iter().map(|job| job.update.clone()).collect();
        for (job, update) in jobs
            .iter()
            .zip(config.newton_schulz.orthogonalize_all(&updates)?)
        {
            let scale = config.scale.factor(job.shape.rows, job.shape.cols);
            let update = Update {
                weights: &job.weights,
                orthogonalized: &update,
                scale,
            };
            apply_updates(&[update], config.lr, config.weight_decay)?;
        }
        Ok(clipping)
    }
}

/// The sum over ranks, in rank order, and then over micro-batches, of a parameter's gradients times their weights.
fn sum(gradients: &StepGradients, param: usize) -> candle_core::Result<Option<Tensor>> {
    let mut total: Option<Tensor> = None;
    for ranks in gradients {
        let mut sum: Option<Tensor> = None;
        for micro_batch in ranks {
            let Some(gradient) = &micro_batch.gradients[param] else {
                continue;
            };
            let gradient = scaled(&gradient.detach().flatten_all()?, micro_batch.weight)?;
            sum = Some(plus(sum, gradient)?);
        }
        if let Some(sum) = sum {
            total = Some(plus(total, sum)?);
        }
    }
    Ok(total)
}

fn plus(sum: Option<Tensor>, more: Tensor) -> candle_core::Result<Tensor> {
    match sum {
        Some(sum) => sum + more,
        None => Ok(more),
    }
}

/// One rounding, or none.
fn scaled(values: &Tensor, factor: f64) -> candle_core::Result<Tensor> {
    if factor == 1.0 {
        Ok(values.clone())
    } else {
        values.affine(factor, 0.0)
    }
}
