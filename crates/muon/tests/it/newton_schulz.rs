use candle_core::{DType, Device, Tensor};
use polarshard_muon::{Coefficients, Method, NewtonSchulz};

use crate::oracle::{self, Matrix, composite};
use crate::tensors::bits;

fn with(method: Method, coefficients: Coefficients) -> NewtonSchulz {
    NewtonSchulz {
        method,
        coefficients,
        ..NewtonSchulz::default()
    }
}

const SHAPES: [(usize, usize); 6] = [(48, 48), (48, 64), (32, 96), (96, 32), (16, 256), (100, 17)];

#[test]
fn agrees_with_float64_over_shapes_and_methods() {
    for (rows, cols) in SHAPES {
        let x = Matrix::gaussian(rows, cols, 1).to_tensor();
        for coefficients in [
            Coefficients::KellerJordan,
            Coefficients::PolarExpress,
            Coefficients::You,
        ] {
            let steps = coefficients.steps(5);
            let expected = oracle::newton_schulz(&Matrix::from_tensor(&x), &steps);
            for method in [Method::Auto, Method::Standard, Method::Gram] {
                let ns = with(method, coefficients.clone());
                let got = Matrix::from_tensor(&ns.orthogonalize(&x).unwrap());
                let error = got.error_against(&expected);
                assert!(
                    error < 1e-4,
                    "{rows}x{cols} {method} {coefficients:?}: {error:e}"
                );
            }
        }
    }
}

#[test]
fn agrees_with_both_oracles_over_spectra() {
    let (rows, cols) = (40, 120);
    for (name, spectrum) in oracle::spectra(rows) {
        let x = Matrix::with_spectrum(rows, cols, &spectrum, 7).to_tensor();
        let exact = Matrix::from_tensor(&x);
        for coefficients in [Coefficients::KellerJordan, Coefficients::PolarExpress] {
            let steps = coefficients.steps(5);
            let expected = oracle::newton_schulz(&exact, &steps);
            let by_svd = oracle::by_svd(&exact, &steps);
            assert!(
                by_svd.error_against(&expected) < 1e-9,
                "{name}: the oracles differ"
            );
            for method in [Method::Standard, Method::Gram] {
                let ns = with(method, coefficients.clone());
                let got = Matrix::from_tensor(&ns.orthogonalize(&x).unwrap());
                let error = got.error_against(&expected);
                assert!(error < 1e-3, "{name} {method}: {error:e}");
            }
        }
    }
}

#[test]
fn other_numbers_of_steps_agree_with_float64() {
    let x = Matrix::gaussian(20, 70, 2).to_tensor();
    for steps in 1..=9 {
        let expected =
            oracle::newton_schulz(&Matrix::from_tensor(&x), &Coefficients::You.steps(steps));
        for method in [Method::Standard, Method::Gram] {
            let ns = NewtonSchulz {
                steps,
                ..with(method, Coefficients::You)
            };
            let got = Matrix::from_tensor(&ns.orthogonalize(&x).unwrap());
            let error = got.error_against(&expected);
            assert!(error < 1e-4, "{steps} steps, {method}: {error:e}");
        }
    }
}

/// Keller Jordan's map has its values of [0.005, 1] in [0.6818, 1.1544], and none over 1.2024.
#[test]
fn singular_values_land_in_the_range_of_the_map() {
    let spectrum: Vec<f64> = (0..40).map(|i| 1.0 - 0.02 * f64::from(i)).collect();
    let x = Matrix::with_spectrum(40, 90, &spectrum, 3).to_tensor();
    let got = NewtonSchulz::default().orthogonalize(&x).unwrap();
    for s in Matrix::from_tensor(&got).singular_values() {
        assert!((0.6817..=1.1545).contains(&s), "{s}");
    }
    for (name, spectrum) in oracle::spectra(40) {
        let x = Matrix::with_spectrum(40, 90, &spectrum, 4).to_tensor();
        let got = NewtonSchulz::default().orthogonalize(&x).unwrap();
        let largest = Matrix::from_tensor(&got).singular_values()[0];
        assert!(largest < 1.2025, "{name}: {largest}");
    }
}

#[test]
fn scale_does_not_matter() {
    let x = Matrix::gaussian(24, 60, 5);
    let ns = NewtonSchulz::default();
    let expected = Matrix::from_tensor(&ns.orthogonalize(&x.to_tensor()).unwrap());
    for exponent in -38..=37 {
        let scaled = x.blend(10f64.powi(exponent), 0.0, &x).to_tensor();
        let got = Matrix::from_tensor(&ns.orthogonalize(&scaled).unwrap());
        let error = got.error_against(&expected);
        assert!(error < 1e-4, "1e{exponent}: {error:e}");
    }
}

#[test]
fn powers_of_two_change_no_bit() {
    let x = Matrix::gaussian(24, 60, 6).to_tensor();
    let smallest = x.abs().unwrap().flatten_all().unwrap().min(0).unwrap();
    assert!(smallest.to_scalar::<f32>().unwrap() > 2f32.powi(-20));
    let ns = NewtonSchulz::default();
    let expected = bits(&ns.orthogonalize(&x).unwrap());
    for exponent in [-106, -60, -1, 1, 17, 100, 125] {
        let scaled = (&x * 2f64.powi(exponent)).unwrap();
        assert_eq!(
            bits(&ns.orthogonalize(&scaled).unwrap()),
            expected,
            "2^{exponent}"
        );
    }
}

#[test]
fn zero_gives_exactly_zero_and_harms_no_neighbour() {
    let ns = NewtonSchulz::default();
    let zero = Tensor::zeros((6, 20), DType::F32, &Device::Cpu).unwrap();
    let x = Matrix::gaussian(6, 20, 8).to_tensor();
    let nan = (&x / 0.0).unwrap();
    let stack = Tensor::stack(&[&zero, &x, &nan], 0).unwrap();
    let got = ns.orthogonalize(&stack).unwrap();
    assert!(bits(&got.get(0).unwrap()).iter().all(|&x| x == 0));
    assert_eq!(
        bits(&got.get(1).unwrap()),
        bits(&ns.orthogonalize(&x).unwrap())
    );
    let third = Matrix::from_tensor(&got.get(2).unwrap());
    assert!(third.data.iter().all(|x| x.is_nan()));
}

/// The only singular value of these is normalized to 1.
#[test]
fn rows_columns_and_single_elements() {
    for coefficients in [Coefficients::KellerJordan, Coefficients::PolarExpress] {
        let target = composite(1.0, &coefficients.steps(5));
        for (rows, cols) in [(1, 1), (1, 30), (30, 1)] {
            for method in [Method::Standard, Method::Gram] {
                let x = Matrix::gaussian(rows, cols, 9);
                let expected = x.blend(target / x.norm(), 0.0, &x);
                let ns = with(method, coefficients.clone());
                let got = Matrix::from_tensor(&ns.orthogonalize(&x.to_tensor()).unwrap());
                let error = got.error_against(&expected);
                assert!(error < 1e-5, "{rows}x{cols} {method}: {error:e}");
            }
        }
    }
}

#[test]
fn tall_is_the_transpose_of_wide() {
    let ns = NewtonSchulz::default();
    for (rows, cols) in [(10, 12), (10, 40), (1, 9)] {
        let x = Matrix::gaussian(rows, cols, 10).to_tensor();
        let wide = ns.orthogonalize(&x).unwrap();
        let tall = ns
            .orthogonalize(&x.t().unwrap().contiguous().unwrap())
            .unwrap();
        assert_eq!(tall.dims(), [cols, rows]);
        assert_eq!(bits(&tall.t().unwrap()), bits(&wide), "{rows}x{cols}");
    }
    let square = Matrix::gaussian(20, 20, 11).to_tensor();
    let a = Matrix::from_tensor(&ns.orthogonalize(&square).unwrap());
    let b = Matrix::from_tensor(&ns.orthogonalize(&square.t().unwrap()).unwrap());
    assert!(b.transpose().error_against(&a) < 1e-4);
}

/// The input is a view with other strides, or in half precision, which is exact in f32.
#[test]
fn strides_and_dtypes_of_the_input_do_not_matter() {
    let ns = NewtonSchulz::default();
    let x = Matrix::gaussian(12, 30, 12)
        .to_tensor()
        .to_dtype(DType::BF16)
        .unwrap();
    let plain = x.to_dtype(DType::F32).unwrap();
    let expected = bits(&ns.orthogonalize(&plain).unwrap());
    assert_eq!(bits(&ns.orthogonalize(&x).unwrap()), expected);

    let transposed = plain.t().unwrap().contiguous().unwrap().t().unwrap();
    assert!(!transposed.is_contiguous());
    assert_eq!(bits(&ns.orthogonalize(&transposed).unwrap()), expected);

    let wider = Tensor::cat(&[&plain, &plain], 1).unwrap();
    assert_eq!(
        bits(&ns.orthogonalize(&wider.narrow(1, 30, 30).unwrap()).unwrap()),
        expected
    );
}

#[test]
fn the_input_is_not_modified_and_the_output_is_its_own() {
    let ns = NewtonSchulz::default();
    let x = Matrix::gaussian(4, 4, 13).to_tensor();
    let before = bits(&x);
    let outputs = ns.orthogonalize_all(&[x.clone(), x.clone()]).unwrap();
    assert_eq!(bits(&x), before);
    for out in outputs.iter().chain([&ns.orthogonalize(&x).unwrap()]) {
        assert!(out.is_contiguous() && out.dtype() == DType::F32);
    }
}

#[test]
fn numbers_of_steps_that_cannot_be_meant_are_refused() {
    let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
    for (steps, expected) in [
        (0, "steps = 0 must be from 1 to 99"),
        (100, "steps = 100 must be from 1 to 99"),
        (1 << 62, "must be from 1 to 99"),
        (usize::MAX, "must be from 1 to 99"),
    ] {
        let ns = NewtonSchulz {
            steps,
            ..NewtonSchulz::default()
        };
        let one = ns.orthogonalize(&x).unwrap_err();
        let many = ns.orthogonalize_all(std::slice::from_ref(&x)).unwrap_err();
        let none = ns.orthogonalize_all(&[]).unwrap_err();
        for error in [one, many, none] {
            assert!(error.to_string().contains(expected), "{error}");
        }
        assert!(steps < 1 << 62 || ns.flops(2, 3) == u64::MAX);
    }
}

#[test]
fn empty_matrices_and_lists_are_left_empty() {
    let ns = NewtonSchulz::default();
    for shape in [&[0, 4][..], &[4, 0], &[0, 3, 4], &[2, 3, 0]] {
        let x = Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
        assert_eq!(ns.orthogonalize(&x).unwrap().dims(), shape);
    }
    assert!(ns.orthogonalize_all(&[]).unwrap().is_empty());
    let empty = Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(ns.orthogonalize_all(&[empty]).unwrap()[0].dims(), [0, 3]);
}
