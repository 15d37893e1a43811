use candle_core::{Tensor, Var};
use candle_nn::Optimizer;
use polarshard_muon::{AdamWConfig, MuonConfig, MuonWithAdamW, MuonWithAdamWConfig, Rules};

use super::{named, var};
use crate::oracle::{self, Matrix};

/// Least squares `mean((X Wᵀ + b - Y)²)`, W by Muon and b by AdamW, against the same in float64 by
/// hand. Near the optimum gradients are differences of rounded numbers, and each f32 run goes its
/// own way: only its loss is checked there.
#[test]
fn a_regression_follows_its_float64_trajectory_and_converges() {
    let (samples, inputs, outputs) = (64, 10, 6);
    let x = Matrix::gaussian(samples, inputs, 1);
    let target = Matrix::gaussian(outputs, inputs, 2);
    let y = x.times(&target.transpose()).to_tensor();
    let x = x.to_tensor();
    let (w, b) = (var(&[outputs, inputs], 3), var(&[outputs], 4));
    let loss = || -> candle_core::Result<Tensor> {
        let prediction = x.matmul(&w.t()?)?.broadcast_add(&b)?;
        (prediction - &y)?.sqr()?.mean_all()
    };
    let first_loss = loss().unwrap().to_scalar::<f32>().unwrap();
    let mut config = MuonWithAdamWConfig::default();
    config.muon.lr = 0.3;
    config.muon.weight_decay = 0.01;
    config.adamw.lr = 0.15;
    let vars = vec![named("layer.weight", &w), named("layer.bias", &b)];
    let mut optimizer = MuonWithAdamW::from_named(vars, &Rules::new(), config.clone()).unwrap();
    let mut reference = Reference::new(&x, &y, &w, &b, config);
    for step in 0..200 {
        // A schedule: both groups follow it.
        let lr = 0.3 * (1.0 - f64::from(step) / 200.0);
        optimizer.set_learning_rate(lr);
        optimizer.backward_step(&loss().unwrap()).unwrap();
        if step < 20 {
            reference.step(lr, 0.5 * lr);
            let error = Matrix::from_tensor(&w).error_against(&reference.w);
            assert!(error < 1e-5, "step {step}: weights are off by {error:e}");
            let bias = Matrix::from_tensor(&b.unsqueeze(0).unwrap());
            let error = bias.error_against(&reference.b);
            assert!(error < 1e-5, "step {step}: biases are off by {error:e}");
        }
    }
    let last_loss = loss().unwrap().to_scalar::<f32>().unwrap();
    assert!(
        last_loss < 1e-3 * first_loss,
        "{last_loss} after {first_loss}"
    );
}

/// The whole training step in float64.
struct Reference {
    x: Matrix,
    y: Matrix,
    w: Matrix,
    b: Matrix,
    momentum: Matrix,
    m: Vec<f64>,
    v: Vec<f64>,
    t: i32,
    config: MuonWithAdamWConfig,
}

impl Reference {
    fn new(x: &Tensor, y: &Tensor, w: &Var, b: &Var, config: MuonWithAdamWConfig) -> Self {
        let w = Matrix::from_tensor(w);
        let b = Matrix::from_tensor(&b.unsqueeze(0).unwrap());
        Self {
            x: Matrix::from_tensor(x),
            y: Matrix::from_tensor(y),
            momentum: Matrix::zeros(w.rows, w.cols),
            m: vec![0.0; b.cols],
            v: vec![0.0; b.cols],
            t: 0,
            w,
            b,
            config,
        }
    }

    fn step(&mut self, muon_lr: f64, adamw_lr: f64) {
        let ones = Matrix {
            rows: self.x.rows,
            cols: 1,
            data: vec![1.0; self.x.rows],
        };
        let prediction = self
            .x
            .times(&self.w.transpose())
            .blend(1.0, 1.0, &ones.times(&self.b));
        let residual = prediction.blend(1.0, -1.0, &self.y);
        let factor = 2.0 / residual.data.len() as f64;
        let residual = residual.blend(factor, 0.0, &residual);
        let w_gradient = residual.transpose().times(&self.x);
        let b_gradient = ones.transpose().times(&residual);

        let MuonConfig {
            momentum: beta,
            weight_decay,
            ..
        } = self.config.muon;
        self.momentum = self.momentum.blend(beta, 1.0 - beta, &w_gradient);
        let update = self.momentum.blend(beta, 1.0 - beta, &w_gradient);
        let update = oracle::newton_schulz(&update, &[[3.4445, -4.7750, 2.0315]; 5]);
        let scale = (self.w.rows as f64 / self.w.cols as f64).max(1.0).sqrt();
        self.w = self
            .w
            .blend(1.0 - muon_lr * weight_decay, -muon_lr * scale, &update);

        let AdamWConfig {
            beta1, beta2, eps, ..
        } = self.config.adamw;
        self.t += 1;
        for (i, g) in b_gradient.data.into_iter().enumerate() {
            self.m[i] = beta1 * self.m[i] + (1.0 - beta1) * g;
            self.v[i] = beta2 * self.v[i] + (1.0 - beta2) * g * g;
            let m = self.m[i] / (1.0 - beta1.powi(self.t));
            let v = self.v[i] / (1.0 - beta2.powi(self.t));
            self.b.data[i] -= adamw_lr * m / (v.sqrt() + eps);
        }
    }
}
