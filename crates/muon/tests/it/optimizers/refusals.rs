use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use polarshard_muon::{
    Coefficients, Muon, MuonConfig, MuonWithAdamW, MuonWithAdamWConfig, MuonWithAdamWGroups,
    NewtonSchulz, Precision, Rules,
};

use super::{grads, named, var};
use crate::tensors::{bits, gaussian};

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
        (
            with(2, (good[2].ones_like().unwrap() * 4.2e18).unwrap()),
            "gradients of adamw's parameters have norm 1.028",
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
    half.muon.newton_schulz.iterate = Precision::BF16;
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
