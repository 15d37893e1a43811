use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use polarshard_muon::{
    AdamWConfig, Muon, MuonConfig, MuonWithAdamW, MuonWithAdamWConfig, MuonWithAdamWGroups,
    NewtonSchulz, Rule, Rules, UpdateScale,
};

use super::{grads, named, var};
use crate::oracle::Matrix;
use crate::tensors::{bits, gaussian};

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

/// Of `sum(w²) / 2` by hand: the gradient is the weights themselves, and is read while they change.
#[test]
fn a_gradient_may_be_a_view_of_its_variable() {
    let make = || [var(&[4, 6], 1), var(&[4], 2)];
    let (viewed, copied) = (make(), make());
    let step = |vars: &[Var; 2], gradient: &dyn Fn(&Var) -> Tensor| {
        let all = vec![named("w", &vars[0]), named("b", &vars[1])];
        let config = MuonWithAdamWConfig::default();
        let mut optimizer = MuonWithAdamW::from_named(all, &Rules::new(), config).unwrap();
        let pairs: Vec<_> = vars.iter().map(|var| (var, gradient(var))).collect();
        optimizer.step(&grads(&pairs)).unwrap();
    };
    step(&viewed, &|var| var.as_detached_tensor());
    step(&copied, &|var| var.copy().unwrap());
    for (viewed, copied) in viewed.iter().zip(&copied) {
        assert_eq!(bits(viewed), bits(copied));
    }
}
