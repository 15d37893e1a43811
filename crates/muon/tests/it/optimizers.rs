use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use polarshard_muon::{
    AdamWConfig, Coefficients, Muon, MuonConfig, MuonWithAdamW, MuonWithAdamWConfig,
    MuonWithAdamWGroups, NewtonSchulz, Rule, Rules, UpdateScale,
};

use crate::oracle::{self, Matrix};

fn grads(pairs: &[(&Var, Tensor)]) -> GradStore {
    let mut grads = GradStore::default();
    for (var, gradient) in pairs {
        grads.insert(var.as_tensor(), gradient.clone());
    }
    grads
}

fn gaussian(shape: &[usize], seed: u64) -> Tensor {
    let x = Matrix::gaussian(1, shape.iter().product(), seed).to_tensor();
    x.reshape(shape).unwrap()
}

fn var(shape: &[usize], seed: u64) -> Var {
    Var::from_tensor(&gaussian(shape, seed)).unwrap()
}

fn bits(x: &Tensor) -> Vec<u32> {
    let x = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    x.to_vec1::<f32>()
        .unwrap()
        .into_iter()
        .map(f32::to_bits)
        .collect()
}

fn named(name: &str, var: &Var) -> (String, Var) {
    (name.to_owned(), var.clone())
}

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
        if step < 25 {
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

/// The matrices of a parameter are trained as if each were a parameter.
#[test]
fn splits_stacks_and_convolutions_are_their_matrices() {
    let (stack, conv) = (var(&[3, 8, 5], 1), var(&[6, 4, 3, 3], 2));
    let (fused, heads) = (var(&[12, 7], 3), var(&[12, 7], 4));
    let copy = |x: &Tensor| Var::from_tensor(&x.contiguous().unwrap().copy().unwrap()).unwrap();
    let parts = |x: &Tensor| -> Vec<Tensor> {
        let rows = |start, len| x.narrow(0, start, len).unwrap();
        match x.dims() {
            [3, 8, 5] => (0..3).map(|i| x.get(i).unwrap()).collect(),
            [6, 4, 3, 3] => vec![x.reshape((6, 36)).unwrap()],
            _ => vec![rows(0, 8), rows(8, 2), rows(10, 2)],
        }
    };
    let thirds =
        |x: &Tensor| -> Vec<Tensor> { (0..3).map(|i| x.narrow(0, 4 * i, 4).unwrap()).collect() };
    let split = |whole: &[Tensor; 4]| -> Vec<Tensor> {
        let [a, b, c, d] = whole;
        [parts(a), parts(b), parts(c), thirds(d)].concat()
    };
    let whole = [&stack, &conv, &fused, &heads];
    let apart: Vec<_> = split(&whole.map(|v| v.as_tensor().clone()))
        .iter()
        .map(copy)
        .collect();

    let config = MuonConfig {
        weight_decay: 0.1,
        ..MuonConfig::default()
    };
    let rules = Rules::new()
        .with("fused", Rule::SplitRows(vec![8, 2, 2]))
        .with("heads", Rule::Heads(3));
    let names = ["stack", "conv", "fused", "heads"];
    let vars = names
        .iter()
        .zip(whole)
        .map(|(name, var)| named(name, var))
        .collect();
    let both = MuonWithAdamWConfig {
        muon: config.clone(),
        ..Default::default()
    };
    let mut together = MuonWithAdamW::from_named(vars, &rules, both).unwrap();
    let mut separate = Muon::new(apart.clone(), config).unwrap();
    for step in 0..3 {
        let gradients = whole.map(|var| gaussian(var.dims(), 10 + step));
        let split_gradients = split(&gradients);
        let pairs: Vec<_> = whole.into_iter().zip(gradients).collect();
        together.step(&grads(&pairs)).unwrap();
        let pairs: Vec<_> = apart.iter().zip(split_gradients).collect();
        separate.step(&grads(&pairs)).unwrap();
    }
    let got = split(&whole.map(|v| v.as_tensor().clone()));
    for (got, expected) in got.iter().zip(&apart) {
        assert_eq!(bits(got), bits(expected), "{:?}", got.dims());
    }
}

/// One step from a zero momentum is `lr · scale · NS(G)`.
#[test]
fn every_scale_takes_the_flattened_shape() {
    let gradient = gaussian(&[8, 3, 2, 2], 1);
    let o = NewtonSchulz::default()
        .orthogonalize(&gradient.reshape((8, 12)).unwrap())
        .unwrap();
    let scales = [
        (UpdateScale::Original, 1.0),
        (UpdateScale::MatchRmsAdamW, 0.2 * 12f64.sqrt()),
        (UpdateScale::Spectral, (8f64 / 12.0).sqrt()),
        (UpdateScale::None, 1.0),
    ];
    for (scale, factor) in scales {
        let weights = Var::zeros((8, 3, 2, 2), DType::F32, &Device::Cpu).unwrap();
        let config = MuonConfig {
            scale,
            ..MuonConfig::default()
        };
        let mut optimizer = Muon::new(vec![weights.clone()], config).unwrap();
        optimizer
            .step(&grads(&[(&weights, gradient.clone())]))
            .unwrap();
        let got = Matrix::from_tensor(&weights.reshape((8, 12)).unwrap());
        let o = Matrix::from_tensor(&o);
        assert!(
            got.error_against(&o.blend(-0.02 * factor, 0.0, &o)) < 1e-4,
            "{scale}"
        );
    }
}

/// Steps far below the resolution of bf16 add up in the masters.
#[test]
fn half_precision_variables_follow_an_f32_master() {
    for dtype in [DType::BF16, DType::F16] {
        let rounded = |x: Tensor| x.to_dtype(dtype).unwrap();
        let half = [&[6, 4][..], &[6]].map(|shape| rounded(gaussian(shape, 1)));
        let half = half.map(|x| Var::from_tensor(&x).unwrap());
        let single = [0, 1].map(|i| {
            let x = half[i].to_dtype(DType::F32).unwrap();
            Var::from_tensor(&x).unwrap()
        });
        let before = bits(&half[0]);
        let config = MuonWithAdamWConfig {
            muon: MuonConfig {
                lr: 1e-5,
                ..MuonConfig::default()
            },
            adamw: AdamWConfig {
                lr: 1e-5,
                ..AdamWConfig::default()
            },
        };
        let make = |[w, b]: &[Var; 2]| {
            let vars = vec![named("weight", w), named("bias", b)];
            MuonWithAdamW::from_named(vars, &Rules::new(), config.clone()).unwrap()
        };
        let (mut half_optimizer, mut single_optimizer) = (make(&half), make(&single));
        for step in 0..400 {
            let gradients = [&[6, 4][..], &[6]].map(|shape| rounded(gaussian(shape, 7)));
            let singles = gradients
                .each_ref()
                .map(|g| g.to_dtype(DType::F32).unwrap());
            half_optimizer
                .step(&grads(&half.iter().zip(gradients).collect::<Vec<_>>()))
                .unwrap();
            single_optimizer
                .step(&grads(&single.iter().zip(singles).collect::<Vec<_>>()))
                .unwrap();
            for (half, single) in half.iter().zip(&single) {
                assert_eq!(
                    bits(half),
                    bits(&rounded(single.as_tensor().clone())),
                    "step {step}"
                );
            }
        }
        assert_ne!(bits(&half[0]), before);
    }
}

/// A twin that never saw the gradient of zeros, or the missing one, takes the same later steps.
#[test]
fn muon_skips_zero_gradients_by_matrix_and_adamw_steps() {
    let shape = [2, 5, 3];
    let (stack, bias) = (var(&shape, 1), var(&[4], 2));
    let config = MuonWithAdamWConfig {
        muon: MuonConfig {
            weight_decay: 0.1,
            ..MuonConfig::default()
        },
        adamw: AdamWConfig {
            weight_decay: 0.1,
            ..AdamWConfig::default()
        },
    };
    let vars = vec![named("stack", &stack), named("bias", &bias)];
    let mut optimizer = MuonWithAdamW::from_named(vars, &Rules::new(), config.clone()).unwrap();
    let second = Var::from_tensor(&stack.get(1).unwrap().copy().unwrap()).unwrap();
    let mut twin = Muon::new(vec![second.clone()], config.muon).unwrap();

    let full = gaussian(&shape, 3);
    optimizer.step(&grads(&[(&stack, full.clone())])).unwrap();
    twin.step(&grads(&[(&second, full.get(1).unwrap())]))
        .unwrap();

    let second_before = bits(&stack.get(1).unwrap());
    let first_before = bits(&stack.get(0).unwrap());
    let bias_before = bits(&bias);
    let half_zero = Tensor::stack(
        &[
            full.get(0).unwrap(),
            full.get(1).unwrap().zeros_like().unwrap(),
        ],
        0,
    )
    .unwrap();
    let zero = bias.zeros_like().unwrap();
    optimizer
        .step(&grads(&[(&stack, half_zero), (&bias, zero)]))
        .unwrap();
    assert_eq!(
        bits(&stack.get(1).unwrap()),
        second_before,
        "neither step nor decay"
    );
    assert_ne!(bits(&stack.get(0).unwrap()), first_before);
    assert_ne!(bits(&bias), bias_before, "adamw decays");

    let bias_before = bits(&bias);
    optimizer.step(&grads(&[(&stack, full.clone())])).unwrap();
    twin.step(&grads(&[(&second, full.get(1).unwrap())]))
        .unwrap();
    assert_eq!(
        bits(&stack.get(1).unwrap()),
        bits(&second),
        "its momentum was left"
    );
    assert_eq!(
        bits(&bias),
        bias_before,
        "without a gradient nothing happens"
    );
}

#[test]
fn a_step_that_fails_changes_nothing() {
    let shapes = [&[5, 3][..], &[4, 4], &[6]];
    let make = || {
        let vars = [0, 1, 2].map(|i| var(shapes[i], i as u64));
        let all = vec![
            named("a", &vars[0]),
            named("b", &vars[1]),
            named("c", &vars[2]),
        ];
        let config = MuonWithAdamWConfig::default();
        (
            MuonWithAdamW::from_named(all, &Rules::new(), config).unwrap(),
            vars,
        )
    };
    let (mut optimizer, vars) = make();
    let (mut twin, twin_vars) = make();
    let good = [0, 1, 2].map(|i| gaussian(shapes[i], 10 + i as u64));
    let store = |vars: &[Var; 3], gradients: &[Tensor; 3]| {
        grads(
            &vars
                .iter()
                .zip(gradients.iter().cloned())
                .collect::<Vec<_>>(),
        )
    };
    optimizer.step(&store(&vars, &good)).unwrap();
    twin.step(&store(&twin_vars, &good)).unwrap();

    let with = |index: usize, bad: Tensor| {
        let mut gradients = good.clone();
        gradients[index] = bad;
        gradients
    };
    let nan = (&good[2] / 0.0).unwrap();
    let cases = [
        (
            with(1, gaussian(&[4, 3], 1)),
            "gradient of b has shape [4, 3]",
        ),
        (
            with(1, good[1].to_dtype(DType::U32).unwrap()),
            "gradient of b has dtype U32",
        ),
        (
            with(2, nan),
            "gradient of c has 6 elements that are not finite",
        ),
        (with(2, gaussian(&[5], 1)), "gradient of c has shape [5]"),
    ];
    for (gradients, expected) in cases {
        let message = optimizer
            .step(&store(&vars, &gradients))
            .unwrap_err()
            .to_string();
        assert!(message.contains(expected), "{message}");
    }
    optimizer.set_learning_rate(f64::NAN);
    let message = optimizer
        .step(&store(&vars, &good))
        .unwrap_err()
        .to_string();
    assert!(message.contains("muon.lr = NaN"), "{message}");
    optimizer.set_learning_rate(0.02);

    let later = [0, 1, 2].map(|i| gaussian(shapes[i], 20 + i as u64));
    optimizer.step(&store(&vars, &later)).unwrap();
    twin.step(&store(&twin_vars, &later)).unwrap();
    for (var, twin) in vars.iter().zip(&twin_vars) {
        assert_eq!(bits(var), bits(twin));
    }
}

#[test]
fn the_learning_rates_keep_their_ratio() {
    let (w, b) = (var(&[3, 3], 1), var(&[3], 2));
    let config = MuonWithAdamWConfig {
        muon: MuonConfig {
            lr: 0.1,
            ..MuonConfig::default()
        },
        adamw: AdamWConfig {
            lr: 0.02,
            ..AdamWConfig::default()
        },
    };
    let vars = vec![named("w", &w), named("b", &b)];
    let mut optimizer = MuonWithAdamW::from_named(vars, &Rules::new(), config).unwrap();
    // Through zero, as a warm-up starts.
    optimizer.set_learning_rate(0.0);
    optimizer.set_learning_rate(0.3);
    assert_eq!(optimizer.learning_rate(), 0.3);
    let before = Matrix::from_tensor(&b.unsqueeze(0).unwrap());
    optimizer.step(&grads(&[(&b, gaussian(&[3], 3))])).unwrap();
    let moved = Matrix::from_tensor(&b.unsqueeze(0).unwrap()).blend(1.0, -1.0, &before);
    // The first step of AdamW is the learning rate itself.
    assert!(
        moved.data.iter().all(|x| (x.abs() - 0.06).abs() < 1e-5),
        "{moved:?}"
    );
}

#[test]
fn by_groups_and_by_names_are_the_same_optimizer() {
    let make = || (var(&[4, 6], 1), var(&[4], 2));
    let ((w1, b1), (w2, b2)) = (make(), make());
    let config = MuonWithAdamWConfig::default();
    let vars = vec![named("w", &w1), named("b", &b1)];
    let mut by_names = MuonWithAdamW::from_named(vars, &Rules::new(), config.clone()).unwrap();
    let groups = MuonWithAdamWGroups {
        config,
        muon: vec![w2.clone()],
        adamw: vec![b2.clone()],
    };
    let mut by_groups = MuonWithAdamW::new(vec![b2.clone(), w2.clone()], groups).unwrap();
    for step in 0..3 {
        let (w, b) = (gaussian(&[4, 6], 10 + step), gaussian(&[4], 20 + step));
        by_names
            .step(&grads(&[(&w1, w.clone()), (&b1, b.clone())]))
            .unwrap();
        by_groups.step(&grads(&[(&w2, w), (&b2, b)])).unwrap();
    }
    assert_eq!((bits(&w1), bits(&b1)), (bits(&w2), bits(&b2)));
}

#[test]
fn constructors_refuse_what_they_cannot_train() {
    let (w, b) = (var(&[3, 3], 1), var(&[3], 2));
    let groups = |muon: &[&Var], adamw: &[&Var]| MuonWithAdamWGroups {
        config: MuonWithAdamWConfig::default(),
        muon: muon.iter().map(|&v| v.clone()).collect(),
        adamw: adamw.iter().map(|&v| v.clone()).collect(),
    };
    let new = |vars: &[&Var], groups| {
        let vars = vars.iter().map(|&v| v.clone()).collect();
        MuonWithAdamW::new(vars, groups).unwrap_err().to_string()
    };
    let from_named = |vars, config| {
        MuonWithAdamW::from_named(vars, &Rules::new(), config)
            .unwrap_err()
            .to_string()
    };
    let default = MuonWithAdamWConfig::default;
    let mut zero_lr = default();
    zero_lr.muon.lr = 0.0;
    let mut bad_beta = default();
    bad_beta.adamw.beta1 = 2.0;
    let mut half = default();
    half.muon.newton_schulz.iterate = DType::BF16;
    let double = Var::zeros((2, 2), DType::F64, &Device::Cpu).unwrap();
    let muon = |vars, config| Muon::new(vars, config).unwrap_err().to_string();
    let no_steps = NewtonSchulz {
        steps: 0,
        coefficients: Coefficients::You,
        ..Default::default()
    };
    let cases = [
        (
            new(&[&w, &b], groups(&[&w], &[])),
            "variable 1 of shape [3] is in neither group",
        ),
        (
            new(&[&w], groups(&[&w], &[&b])),
            "adamw variable 0 of shape [3] is in a group, but was not",
        ),
        (
            new(&[&w], groups(&[&w], &[&w])),
            "adamw variable 0 is the same variable as muon variable 0",
        ),
        (
            new(&[&w, &w], groups(&[&w], &[])),
            "variable 1 is the same variable as variable 0",
        ),
        (
            new(&[&b], groups(&[&b], &[])),
            "muon variable 0 of shape [3] is no matrix",
        ),
        (
            from_named(vec![named("a", &w), named("b", &w)], default()),
            "b is the same variable as a",
        ),
        (
            from_named(vec![named("a", &w), named("a", &b)], default()),
            "parameter \"a\" is listed twice",
        ),
        (
            from_named(vec![named("a", &w)], zero_lr),
            "muon.lr = 0 must be positive",
        ),
        (
            from_named(vec![named("a", &w)], bad_beta),
            "adamw.beta1 = 2 must be in [0, 1)",
        ),
        (
            from_named(vec![named("a", &w)], half),
            "newton-schulz cannot iterate in BF16 on Cpu",
        ),
        (
            from_named(vec![named("a", &double)], default()),
            "a has dtype F64",
        ),
        (
            muon(vec![b.clone()], MuonConfig::default()),
            "variable 0 of shape [3] is no matrix",
        ),
        (
            muon(vec![w.clone(), w.clone()], MuonConfig::default()),
            "variable 1 is the same variable",
        ),
        (
            muon(
                vec![w.clone()],
                MuonConfig {
                    newton_schulz: no_steps,
                    ..Default::default()
                },
            ),
            "muon.newton_schulz.steps = 0",
        ),
    ];
    for (message, expected) in cases {
        assert!(message.contains(expected), "{message:?} for {expected:?}");
    }
}
