use candle_core::{DType, Device, Tensor};
use half::f16;
use polarshard_muon::{
    AdamWConfig, Error, Gradient, Update, accumulate, adamw_update, apply_updates, copy_all,
    momentum_update,
};

use crate::tensors::{apply_update, bits, copy, gaussian};

fn zeros(len: usize) -> Tensor {
    Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap()
}

fn values(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// As values and signs, which tell all but NaNs apart in every dtype.
fn exact(x: &Tensor) -> Vec<(f64, bool)> {
    let values = values(x).into_iter();
    values.map(|x| (x, x.is_sign_negative())).collect()
}

fn assert_close(got: &Tensor, expected: &[f64], bound: f64) {
    for (i, (got, expected)) in values(got).iter().zip(expected).enumerate() {
        assert!(
            (got - expected).abs() < bound,
            "element {i}: {got} for {expected}"
        );
    }
}

/// Values whose sign, smallest digit or overflow a careless copy would lose.
const SPECIAL: [f32; 8] = [
    0.0,
    -0.0,
    1.5,
    -3.0e-5,
    6.0e-8,
    65504.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
];

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn values_are_cast_into_the_middle_of_a_buffer() {
    for (to, from) in FLOATS.iter().flat_map(|to| FLOATS.map(|from| (*to, from))) {
        let all = gaussian(&[30], 1).to_dtype(to).unwrap();
        let special = Tensor::new(&SPECIAL, &Device::Cpu).unwrap();
        // A view that begins and ends within its own buffer, too.
        let values = Tensor::cat(&[&gaussian(&[5], 2), &special, &gaussian(&[5], 3)], 0).unwrap();
        let values = values.to_dtype(from).unwrap().narrow(0, 3, 12).unwrap();
        let buffer = all.copy().unwrap();
        copy(&buffer.narrow(0, 7, 12).unwrap(), &values).unwrap();
        for (start, len, expected) in [
            (0, 7, all.narrow(0, 0, 7).unwrap()),
            (7, 12, values.to_dtype(to).unwrap()),
            (19, 11, all.narrow(0, 19, 11).unwrap()),
        ] {
            let found = buffer.narrow(0, start, len).unwrap();
            assert_eq!(
                exact(&found),
                exact(&expected),
                "{from:?} to {to:?} from {start}"
            );
        }
    }
}

#[test]
fn a_cast_is_to_the_nearest_and_ties_are_to_even() {
    let cases = [
        // Half a unit in the last place of 1, a little more, and one and a half.
        (
            DType::F16,
            2f32.powi(-11),
            [1.0, 1.0 + 2f32.powi(-10), 1.0 + 2f32.powi(-9)],
        ),
        (
            DType::BF16,
            2f32.powi(-8),
            [1.0, 1.0 + 2f32.powi(-7), 1.0 + 2f32.powi(-6)],
        ),
    ];
    for (dtype, half, expected) in cases {
        let values = [1.0 + half, 1.0 + half * 1.01, 1.0 + half * 3.0];
        let target = Tensor::zeros(3, dtype, &Device::Cpu).unwrap();
        copy(&target, &Tensor::new(&values, &Device::Cpu).unwrap()).unwrap();
        let found = target
            .to_dtype(DType::F32)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        assert_eq!(found, expected, "{dtype:?}");
    }
}

/// Not numbers, whose other bits a cast would lose.
#[test]
fn what_is_no_number_is_copied_bit_by_bit() {
    let single = [0x7fa0_1234, 0xffc0_0001u32].map(f32::from_bits);
    let target = zeros(2);
    copy(&target, &Tensor::new(&single, &Device::Cpu).unwrap()).unwrap();
    let found = target.to_vec1::<f32>().unwrap();
    assert_eq!(
        found.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
        single.map(f32::to_bits)
    );

    let half = [0x7d23, 0xfe01u16].map(f16::from_bits);
    let target = Tensor::zeros(2, DType::F16, &Device::Cpu).unwrap();
    copy(&target, &Tensor::new(&half, &Device::Cpu).unwrap()).unwrap();
    let found = target.to_vec1::<f16>().unwrap();
    assert_eq!(
        found.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
        half.map(f16::to_bits)
    );
}

#[test]
fn many_are_copied_at_once_or_none() {
    let (buffer, values) = (zeros(10), gaussian(&[6], 1));
    let half = values.to_dtype(DType::BF16).unwrap();
    let at = |start, len| buffer.narrow(0, start, len).unwrap();
    let nothing = zeros(0);
    copy_all(&[
        (&at(7, 3), &half.narrow(0, 0, 3).unwrap()),
        (&nothing, &zeros(0)),
        (&at(3, 0), &zeros(0)),
        (&at(1, 6), &values),
    ])
    .unwrap();
    let mut expected = vec![0.0];
    expected.extend(values.to_vec1::<f32>().unwrap());
    let half = half.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
    expected.extend(&half[..3]);
    assert_eq!(buffer.to_vec1::<f32>().unwrap(), expected);

    let other = gaussian(&[3], 2);
    let overlapping = [(&at(0, 3), &other), (&at(2, 6), &values)];
    let error = copy_all(&overlapping).unwrap_err().to_string();
    assert_eq!(error, "two of the targets overlap");
    let source = at(8, 2);
    let read_and_written = [(&at(0, 3), &other), (&zeros(2), &source)];
    let error = copy_all(&read_and_written).unwrap_err().to_string();
    assert_eq!(error, "the targets and the values share storage");
    let one_is_short = [(&at(0, 6), &values), (&at(6, 2), &other)];
    let error = copy_all(&one_is_short).unwrap_err().to_string();
    assert_eq!(error, "the values has 3 elements; expected 2");
    assert_eq!(buffer.to_vec1::<f32>().unwrap(), expected);
    copy_all(&[]).unwrap();
}

#[test]
fn copies_are_refused_before_anything_is_written() {
    let (target, values) = (gaussian(&[6], 1), gaussian(&[6], 2));
    let before = bits(&target);
    let double = values.to_dtype(DType::F64).unwrap();
    let strided = Tensor::stack(&[&values, &values], 1).unwrap();
    let strided = strided.narrow(1, 0, 1).unwrap();
    let shared = target.narrow(0, 0, 6).unwrap();
    for (result, message) in [
        (
            copy(&target, &double),
            "the values has dtype F64; expected f32, f16 or bf16",
        ),
        (
            copy(&double, &target),
            "the target has dtype F64; expected f32, f16 or bf16",
        ),
        (
            copy(&target, &gaussian(&[5], 3)),
            "the values has 5 elements; expected 6",
        ),
        (copy(&target, &strided), "the values is not contiguous"),
        (
            copy(&target, &shared),
            "the target and the values share storage",
        ),
    ] {
        assert_eq!(result.unwrap_err().to_string(), message);
    }
    assert_eq!(bits(&target), before);
}

#[test]
fn values_of_every_float_dtype_are_accumulated_into_a_view() {
    let factor = 0.1;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let buffer = gaussian(&[30], 1);
        let values = gaussian(&[50], 2).to_dtype(dtype).unwrap();
        let values = values.narrow(0, 7, 20).unwrap();
        let exact = values.to_dtype(DType::F32).unwrap();
        let mut expected = buffer.to_vec1::<f32>().unwrap();
        for (s, x) in expected[4..24]
            .iter_mut()
            .zip(exact.to_vec1::<f32>().unwrap())
        {
            *s += factor as f32 * x;
        }
        accumulate(&buffer.narrow(0, 4, 20).unwrap(), &values, factor).unwrap();
        assert_eq!(buffer.to_vec1::<f32>().unwrap(), expected, "{dtype:?}");
    }
}

#[test]
fn sums_are_f32_and_values_are_floats() {
    let (sum, values) = (zeros(4), zeros(4));
    let half = sum.to_dtype(DType::F16).unwrap();
    let error = accumulate(&half, &values, 1.0).unwrap_err();
    assert_eq!(error.to_string(), "the sum has dtype F16; expected f32");
    let double = values.to_dtype(DType::F64).unwrap();
    let error = accumulate(&sum, &double, 1.0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the summand has dtype F64; expected f32, f16 or bf16"
    );
    let error = accumulate(&sum, &zeros(3), 1.0).unwrap_err();
    assert_eq!(error.to_string(), "the summand has 3 elements; expected 4");
    let error = accumulate(&sum, &sum.narrow(0, 0, 4).unwrap(), 1.0).unwrap_err();
    assert!(matches!(error, Error::SharedStorage { .. }), "{error}");
}

#[test]
fn momentum_follows_its_formula_over_many_steps() {
    let (len, beta) = (40, 0.95);
    for nesterov in [true, false] {
        let momentum = zeros(len);
        let mut expected = vec![0f64; len];
        for step in 0..20 {
            let gradient = gaussian(&[len], step);
            let update = momentum_update(&momentum, &gradient, beta, nesterov).unwrap();
            let mut expected_update = Vec::new();
            for (m, g) in expected.iter_mut().zip(values(&gradient)) {
                *m = beta * *m + (1.0 - beta) * g;
                expected_update.push(if nesterov {
                    beta * *m + (1.0 - beta) * g
                } else {
                    *m
                });
            }
            assert_close(&momentum, &expected, 1e-6);
            assert_close(&update, &expected_update, 1e-6);
        }
    }
}

#[test]
fn a_gradient_is_multiplied_with_its_factors_one_after_the_other() {
    let (mean, clip) = (1.0 / 3.0, 0.7);
    let sum = gaussian(&[50], 1);
    let factor = |x: &Tensor, f: f64| {
        let product = x.to_vec1::<f32>().unwrap().into_iter();
        let product: Vec<_> = product.map(|x| f as f32 * x).collect();
        Tensor::new(product, &Device::Cpu).unwrap()
    };
    let scaled = factor(&factor(&sum, mean), clip);
    let gradient = Gradient {
        values: &sum,
        mean,
        clip,
    };
    let (found, expected) = (gaussian(&[50], 2), gaussian(&[50], 2));
    let found_update = momentum_update(&found, gradient, 0.9, true).unwrap();
    let expected_update = momentum_update(&expected, &scaled, 0.9, true).unwrap();
    assert_eq!(bits(&found), bits(&expected));
    assert_eq!(bits(&found_update), bits(&expected_update));

    let config = AdamWConfig::default();
    let state = || {
        [
            gaussian(&[50], 3),
            gaussian(&[50], 4),
            gaussian(&[50], 5).sqr().unwrap(),
        ]
    };
    let ([p, m, v], [q, n, w]) = (state(), state());
    adamw_update(&p, &m, &v, gradient, 3, &config).unwrap();
    adamw_update(&q, &n, &w, &scaled, 3, &config).unwrap();
    for (found, expected) in [(p, q), (m, n), (v, w)] {
        assert_eq!(bits(&found), bits(&expected));
    }
}

#[test]
fn the_update_without_nesterov_is_no_view_of_the_momentum() {
    let (momentum, gradient) = (zeros(4), gaussian(&[4], 1));
    let first = momentum_update(&momentum, &gradient, 0.5, false).unwrap();
    let before = bits(&first);
    momentum_update(&momentum, &gradient, 0.5, false).unwrap();
    assert_eq!(bits(&first), before);
}

#[test]
fn weights_decay_and_then_step() {
    let (weights, update) = (gaussian(&[30], 1), gaussian(&[30], 2));
    let expected: Vec<f64> = values(&weights)
        .iter()
        .zip(values(&update))
        .map(|(p, o)| p * (1.0 - 0.1 * 0.3) - 0.1 * (1.5 * o))
        .collect();
    apply_update(&weights, &update, 1.5, 0.1, 0.3).unwrap();
    assert_close(&weights, &expected, 1e-6);
}

#[test]
fn without_decay_weights_are_not_rounded_before_the_step() {
    let (weights, update) = (gaussian(&[30], 1), gaussian(&[30], 2));
    let expected: Vec<u32> = weights
        .to_vec1::<f32>()
        .unwrap()
        .iter()
        .zip(update.to_vec1::<f32>().unwrap())
        .map(|(p, o)| (p - 0.25 * o).to_bits())
        .collect();
    apply_update(&weights, &update, 0.5, 0.5, 0.0).unwrap();
    assert_eq!(bits(&weights), expected);
}

#[test]
fn many_updates_are_applied_at_once_or_none() {
    let (buffer, expected) = (gaussian(&[20], 1), gaussian(&[20], 1));
    let updates = [gaussian(&[5], 2), gaussian(&[9], 3)];
    let half = updates[1].to_dtype(DType::F16).unwrap();
    let at = |x: &Tensor, start, len| x.narrow(0, start, len).unwrap();
    let update = |weights, orthogonalized, scale| Update {
        weights,
        orthogonalized,
        scale,
    };
    let (first, second) = (at(&buffer, 12, 5), at(&buffer, 2, 9));
    let all = [
        update(&first, &updates[0], 0.5),
        update(&second, &half, 2.0),
    ];
    apply_updates(&all, 0.1, 0.3).unwrap();
    apply_update(&at(&expected, 12, 5), &updates[0], 0.5, 0.1, 0.3).unwrap();
    apply_update(&at(&expected, 2, 9), &half, 2.0, 0.1, 0.3).unwrap();
    assert_eq!(bits(&buffer), bits(&expected));

    let overlapping = at(&buffer, 8, 5);
    let twice = [
        update(&overlapping, &updates[0], 1.0),
        update(&second, &half, 1.0),
    ];
    let error = apply_updates(&twice, 0.1, 0.0).unwrap_err().to_string();
    assert_eq!(error, "two of the weights overlap");
    let own = at(&buffer, 0, 5);
    let own = [
        update(&first, &updates[0], 1.0),
        update(&updates[0], &own, 1.0),
    ];
    let error = apply_updates(&own, 0.1, 0.0).unwrap_err().to_string();
    assert_eq!(error, "the weights and the updates share storage");
    assert_eq!(bits(&buffer), bits(&expected));
}

#[test]
fn a_gradient_in_half_precision_counts_as_its_values_in_f32() {
    let config = AdamWConfig::default();
    for dtype in [DType::F16, DType::BF16] {
        let half = gaussian(&[40], 1).to_dtype(dtype).unwrap();
        let exact = half.to_dtype(DType::F32).unwrap();
        let run = |gradient: &Tensor| {
            let state: Vec<_> = (2..6)
                .map(|seed| gaussian(&[40], seed).abs().unwrap())
                .collect();
            let update = momentum_update(&state[0], gradient, 0.9, true).unwrap();
            adamw_update(&state[1], &state[2], &state[3], gradient, 2, &config).unwrap();
            state.iter().chain([&update]).map(bits).collect::<Vec<_>>()
        };
        assert_eq!(run(&half), run(&exact), "{dtype:?}");
    }
}

#[test]
fn an_update_in_half_precision_is_applied_as_its_values_in_f32() {
    for dtype in [DType::F16, DType::BF16] {
        let buffer = gaussian(&[40], 2).to_dtype(dtype).unwrap();
        let update = buffer.narrow(0, 7, 30).unwrap();
        let (weights, expected) = (gaussian(&[30], 1), gaussian(&[30], 1));
        apply_update(&weights, &update, 1.5, 0.1, 0.3).unwrap();
        let update = update.to_dtype(DType::F32).unwrap();
        apply_update(&expected, &update, 1.5, 0.1, 0.3).unwrap();
        assert_eq!(bits(&weights), bits(&expected));
    }
}

#[test]
fn adamw_follows_its_formula_over_many_steps() {
    let len = 40;
    let config = AdamWConfig {
        lr: 0.01,
        weight_decay: 0.1,
        ..AdamWConfig::default()
    };
    let (weights, m, v) = (gaussian(&[len], 100), zeros(len), zeros(len));
    let mut p = values(&weights);
    let (mut first, mut second) = (vec![0f64; len], vec![0f64; len]);
    for step in 1..=20 {
        let gradient = gaussian(&[len], step);
        adamw_update(&weights, &m, &v, &gradient, step, &config).unwrap();
        let t = i32::try_from(step).unwrap();
        for (i, g) in values(&gradient).into_iter().enumerate() {
            p[i] *= 1.0 - config.lr * config.weight_decay;
            first[i] = config.beta1 * first[i] + (1.0 - config.beta1) * g;
            second[i] = config.beta2 * second[i] + (1.0 - config.beta2) * g * g;
            let first_hat = first[i] / (1.0 - config.beta1.powi(t));
            let second_hat = second[i] / (1.0 - config.beta2.powi(t));
            p[i] -= config.lr * first_hat / (second_hat.sqrt() + config.eps);
        }
        assert_close(&weights, &p, 2e-6);
        assert_close(&m, &first, 1e-6);
        assert_close(&v, &second, 1e-6);
    }
}

/// Bias correction makes the first step ±lr, whatever the gradient's size; zero stays.
#[test]
fn the_first_adamw_step_is_the_learning_rate() {
    let weights = zeros(4);
    let gradient = Tensor::new(&[3.0f32, -2e-6, 0.0, 1e9], &Device::Cpu).unwrap();
    let config = AdamWConfig {
        lr: 0.5,
        ..AdamWConfig::default()
    };
    adamw_update(&weights, &zeros(4), &zeros(4), &gradient, 1, &config).unwrap();
    assert_close(&weights, &[-0.5, 0.5, 0.0, -0.5], 1e-4);
}

/// What a sharded caller does: the same steps on slices of larger buffers, with the same bits.
#[test]
fn slices_of_buffers_are_stepped_in_place_with_the_same_bits() {
    let (len, start) = (50, 13);
    let part = |x: &Tensor| x.narrow(0, start, 20).unwrap();
    let config = AdamWConfig {
        weight_decay: 0.1,
        ..AdamWConfig::default()
    };
    let run = |take: &dyn Fn(&Tensor) -> Tensor| {
        let buffers = [gaussian(&[len], 1), zeros(len), zeros(len), zeros(len)];
        let [weights, m, v, momentum] = &buffers;
        for step in 1..=3 {
            let gradient = take(&gaussian(&[len], 10 + step));
            let u = momentum_update(&take(momentum), &gradient, 0.9, true).unwrap();
            apply_update(&take(weights), &u, 1.1, 0.1, 0.2).unwrap();
            adamw_update(&take(weights), &take(m), &take(v), &gradient, step, &config).unwrap();
        }
        buffers
    };
    let whole = run(&|x| x.clone());
    let sliced = run(&part);
    for (whole, sliced) in whole.iter().zip(&sliced) {
        assert_eq!(bits(&part(sliced)), bits(&part(whole)));
    }
    let untouched = bits(&gaussian(&[len], 1));
    assert_eq!(bits(&sliced[0])[..start], untouched[..start]);
    assert_eq!(bits(&sliced[0])[start + 20..], untouched[start + 20..]);
}

#[test]
fn operands_are_checked_before_anything_is_written() {
    let (a, b, c, d) = (
        gaussian(&[6], 1),
        gaussian(&[6], 2),
        gaussian(&[6], 3),
        gaussian(&[6], 4),
    );
    let before = [&a, &b, &c, &d].map(bits);
    let config = AdamWConfig::default();

    let short = gaussian(&[5], 1);
    let error = momentum_update(&a, &short, 0.9, true).unwrap_err();
    assert_eq!(error.to_string(), "the gradient has 5 elements; expected 6");

    let half = b.to_dtype(DType::F16).unwrap();
    let error = apply_update(&half, &a, 1.0, 0.1, 0.0).unwrap_err();
    let message = "the weights has dtype F16; expected f32";
    assert_eq!(error.to_string(), message);
    let integers = b.to_dtype(DType::U32).unwrap();
    let error = apply_update(&a, &integers, 1.0, 0.1, 0.0).unwrap_err();
    let message = "the update has dtype U32; expected f32, f16 or bf16";
    assert_eq!(error.to_string(), message);

    let strided = Tensor::stack(&[&b, &c], 1)
        .unwrap()
        .narrow(1, 0, 1)
        .unwrap();
    let error = adamw_update(&a, &b, &c, &strided, 1, &config).unwrap_err();
    assert_eq!(error.to_string(), "the gradient is not contiguous");

    let buffer = gaussian(&[12], 5);
    let halves = [
        buffer.narrow(0, 0, 6).unwrap(),
        buffer.narrow(0, 6, 6).unwrap(),
    ];
    let error = adamw_update(&a, &halves[0], &halves[1], &b, 1, &config).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the first moment and the second moment share storage"
    );

    let error = adamw_update(&a, &b, &c, &d, 0, &config).unwrap_err();
    assert!(
        matches!(error, Error::Config { field: "step", .. }),
        "{error}"
    );
    assert_eq!([&a, &b, &c, &d].map(bits), before);
}
