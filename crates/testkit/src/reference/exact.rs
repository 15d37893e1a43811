//! The optimizer in f64, by code of its own: of polarshard-muon it uses the routing table and the coefficients' values.

use candle_core::{Result, Tensor};
use polarshard_muon::{Decision, Error, MatrixShape};

use super::{Clipping, Settings, newton_schulz};
use crate::compare::{norm, values64};
use crate::model::StepGradients;

/// An unsharded optimizer in f64, from f32 initial weights.
#[derive(Debug, Clone)]
pub struct Exact {
    /// Changed between steps by schedules.
    pub settings: Settings,
    /// The weights, flat, in registration order.
    pub weights: Vec<Vec<f64>>,
    state: Vec<State>,
}

#[derive(Debug, Clone)]
enum State {
    Muon {
        matrices: Vec<MatrixShape>,
        momentum: Vec<f64>,
    },
    AdamW {
        first: Vec<f64>,
        second: Vec<f64>,
        steps: i32,
    },
}

impl Exact {
    /// The trained parameters in registration order.
    ///
    /// # Errors
    /// Of routing, or of reading the tensors.
    pub fn new(
        parameters: &[(String, Tensor)],
        settings: Settings,
    ) -> std::result::Result<Self, Error> {
        let shapes: Vec<_> = parameters
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.dims().to_vec()))
            .collect();
        let routing = settings.rules.route(&shapes)?;
        let weights = parameters
            .iter()
            .map(|(_, tensor)| values64(tensor))
            .collect::<Result<Vec<_>>>()?;
        let state = routing
            .entries()
            .iter()
            .zip(&weights)
            .map(|(routed, weights)| {
                let zeros = vec![0.0; weights.len()];
                match &routed.decision {
                    Decision::Muon(matrices) => State::Muon {
                        matrices: matrices.clone(),
                        momentum: zeros,
                    },
                    Decision::AdamW => State::AdamW {
                        first: zeros.clone(),
                        second: zeros,
                        steps: 0,
                    },
                }
            });
        Ok(Self {
            settings,
            state: state.collect(),
            weights,
        })
    }

    /// One step on the mean over all micro-batches of all ranks.
    ///
    /// # Errors
    /// Of reading the tensors.
    pub fn step(&mut self, gradients: &StepGradients) -> Result<Clipping> {
        let means = (0..self.weights.len())
            .map(|param| mean(gradients, param))
            .collect::<Result<Vec<_>>>()?;
        let norm = norm(means.iter().flatten().flatten().copied());
        let clipping = Clipping::new(norm, self.settings.clip);
        for ((weights, state), mean) in self.weights.iter_mut().zip(&mut self.state).zip(means) {
            // A parameter for which no gradient came is not updated at all.
            let Some(mut mean) = mean else { continue };
            mean.iter_mut().for_each(|value| *value *= clipping.factor);
            match state {
                State::Muon { matrices, momentum } => {
                    for matrix in matrices {
                        let run = matrix.offset..matrix.offset + matrix.rows * matrix.cols;
                        let (weights, momentum) =
                            (&mut weights[run.clone()], &mut momentum[run.clone()]);
                        muon(&self.settings, matrix, weights, momentum, &mean[run]);
                    }
                }
                State::AdamW {
                    first,
                    second,
                    steps,
                } => {
                    *steps += 1;
                    adamw(&self.settings, weights, first, second, &mean, *steps);
                }
            }
        }
        Ok(clipping)
    }
}

/// The mean gradient of a parameter: by weight over micro-batches and ranks, absent ones counted as zeros; `None` where
/// none came.
fn mean(gradients: &StepGradients, param: usize) -> Result<Option<Vec<f64>>> {
    let mut sum: Option<Vec<f64>> = None;
    let mut weight = 0.0;
    for micro_batch in gradients.iter().flatten() {
        weight += micro_batch.weight;
        let Some(gradient) = &micro_batch.gradients[param] else {
            continue;
        };
        let sum = sum.get_or_insert_with(|| vec![0.0; gradient.elem_count()]);
        for (sum, value) in sum.iter_mut().zip(values64(gradient)?) {
            *sum += micro_batch.weight * value;
        }
    }
    Ok(sum.map(|sum| sum.into_iter().map(|value| value / weight).collect()))
}

fn muon(
    settings: &Settings,
    shape: &MatrixShape,
    weights: &mut [f64],
    momentum: &mut [f64],
    gradient: &[f64],
) {
    if gradient.iter().all(|value| *value == 0.0) {
        return;
    }
    let config = &settings.muon;
    let beta = config.momentum;
    for (momentum, gradient) in momentum.iter_mut().zip(gradient) {
        *momentum += (1.0 - beta) * (gradient - *momentum);
    }
    let ahead = |(momentum, gradient): (&f64, &f64)| match config.nesterov {
        true => beta * momentum + (1.0 - beta) * gradient,
        false => *momentum,
    };
    let update: Vec<f64> = momentum.iter().zip(gradient).map(ahead).collect();
    let iteration = &config.newton_schulz;
    let coefficients = iteration.coefficients.steps(iteration.steps);
    let update = newton_schulz(
        &update,
        shape.rows,
        shape.cols,
        &coefficients,
        iteration.chosen(shape.rows, shape.cols),
    );
    let step = config.lr * config.scale.factor(shape.rows, shape.cols);
    for (weight, update) in weights.iter_mut().zip(update) {
        *weight -= config.lr * config.weight_decay * *weight;
        *weight -= step * update;
    }
}

fn adamw(
    settings: &Settings,
    weights: &mut [f64],
    first: &mut [f64],
    second: &mut [f64],
    gradient: &[f64],
    step: i32,
) {
    let config = &settings.adamw;
    let corrections = (1.0 - config.beta1.powi(step), 1.0 - config.beta2.powi(step));
    for (((weight, first), second), gradient) in
        weights.iter_mut().zip(first).zip(second).zip(gradient)
    {
        *first += (1.0 - config.beta1) * (gradient - *first);
        *second += (1.0 - config.beta2) * (gradient * gradient - *second);
        let update = (*first / corrections.0) / ((*second / corrections.1).sqrt() + config.eps);
        *weight -= config.lr * config.weight_decay * *weight;
        *weight -= config.lr * update;
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use polarshard_muon::{AdamWConfig, Method, MuonConfig, Rules};

    use super::*;
    use crate::model::MicroBatch;

    fn settings(clip: Option<f64>) -> Settings {
        let muon = MuonConfig {
            lr: 0.5,
            weight_decay: 0.1,
            ..MuonConfig::default()
        };
        Settings {
            muon,
            adamw: AdamWConfig {
                lr: 0.25,
                ..AdamWConfig::default()
            },
            rules: Rules::new(),
            clip,
        }
    }

    fn tensor(values: &[f32], shape: &[usize]) -> Tensor {
        Tensor::from_slice(values, shape, &Device::Cpu).unwrap()
    }

    /// One row of gradient g becomes `0.69644 · g / |g|` (the scalar map of 1 under five steps), worked by hand.
    #[test]
    fn a_step_by_hand() {
        let parameters = [
            ("w".to_owned(), tensor(&[1.0, 1.0], &[1, 2])),
            ("b".to_owned(), tensor(&[2.0, 2.0], &[2])),
        ];
        let mut reference = Exact::new(&parameters, settings(None)).unwrap();
        let gradients = vec![
            Some(tensor(&[3.0, 4.0], &[1, 2])),
            Some(tensor(&[-7.0, 0.0], &[2])),
        ];
        let clipping = reference
            .step(&vec![vec![MicroBatch {
                weight: 3.0,
                gradients,
            }]])
            .unwrap();
        assert!((clipping.norm - 74f64.sqrt()).abs() < 1e-12);
        let [w, b] = &reference.weights[..] else {
            unreachable!("two parameters")
        };
        assert!((w[0] - (0.95 - 0.5 * 0.69644 * 0.6)).abs() < 1e-5, "{w:?}");
        assert!((w[1] - (0.95 - 0.5 * 0.69644 * 0.8)).abs() < 1e-5, "{w:?}");
        assert!((b[0] - 2.25).abs() < 1e-9 && b[1] == 2.0, "{b:?}");
    }

    #[test]
    fn the_mean_is_by_weight_and_clipped() {
        let parameters = [("b".to_owned(), tensor(&[0.0], &[1]))];
        let mut reference = Exact::new(&parameters, settings(Some(1.0))).unwrap();
        let batch = |weight, value| MicroBatch {
            weight,
            gradients: vec![Some(tensor(&[value], &[1]))],
        };
        let clipping = reference
            .step(&vec![vec![batch(1.0, 8.0), batch(3.0, 0.0)]])
            .unwrap();
        assert_eq!(
            clipping,
            Clipping {
                norm: 2.0,
                factor: 0.5
            }
        );
    }

    #[test]
    fn nothing_happens_without_a_gradient() {
        let parameters = [
            ("w".to_owned(), tensor(&[1.0, 2.0], &[1, 2])),
            ("v".to_owned(), tensor(&[1.0, 2.0], &[2, 1])),
        ];
        let mut reference = Exact::new(&parameters, settings(None)).unwrap();
        reference.settings.muon.newton_schulz.method = Method::Gram;
        let before = reference.weights.clone();
        let gradients = vec![None, Some(tensor(&[0.0, 0.0], &[2, 1]))];
        reference
            .step(&vec![vec![MicroBatch {
                weight: 1.0,
                gradients,
            }]])
            .unwrap();
        assert_eq!(reference.weights, before);
    }
}
