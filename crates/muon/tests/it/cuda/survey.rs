use candle_core::{DType, Device, Tensor};
use polarshard_muon::{Survey, survey, survey_all};

use super::{Table, device};
use crate::tensors::gaussian;

/// More tensors than a launch takes, of all dtypes, and lengths on both sides of a chunk of 2¹⁵.
fn tensors() -> Vec<Tensor> {
    let lengths = [1, 2, 31, 1000, 32_767, 32_768, 32_769, 100_001];
    let dtypes = [DType::F32, DType::F16, DType::BF16, DType::F64];
    (0..300)
        .map(|i| {
            let len = lengths[i % lengths.len()];
            let x = gaussian(&[len], i as u64);
            let x = match i % 7 {
                0 => x.zeros_like().unwrap(),
                3 => (x * 1e-4).unwrap(),
                _ => x,
            };
            x.to_dtype(dtypes[i / 8 % dtypes.len()]).unwrap()
        })
        .collect()
}

fn relative(got: f64, expected: f64) -> f64 {
    if got == expected {
        0.0
    } else {
        (got - expected).abs() / expected.abs()
    }
}

fn same_bits(a: &Survey, b: &Survey) -> bool {
    a.sum_of_squares.to_bits() == b.sum_of_squares.to_bits()
        && (a.non_finite, a.non_zero) == (b.non_finite, b.non_zero)
}

#[test]
#[ignore = "needs a GPU"]
fn surveys_are_those_of_the_cpu_and_do_not_depend_on_their_neighbours() {
    let device = device();
    let mut table = Table::new("surveys, CUDA against CPU");
    let here = tensors();
    let there: Vec<_> = here.iter().map(|x| x.to_device(&device).unwrap()).collect();
    let (expected, got) = (survey_all(&here).unwrap(), survey_all(&there).unwrap());
    let again = survey_all(&there).unwrap();
    let largest = expected
        .iter()
        .zip(&got)
        .map(|(a, b)| relative(b.sum_of_squares, a.sum_of_squares))
        .fold(0.0, f64::max);
    table.line(
        "300 tensors: largest relative error of a sum",
        &format!("{largest:.1e}"),
        largest < 1e-12,
    );
    let counts = expected.iter().zip(&got);
    let counts = counts.filter(|(a, b)| (a.non_finite, a.non_zero) != (b.non_finite, b.non_zero));
    let counts = counts.count();
    table.line("other counts", &counts.to_string(), counts == 0);
    let other = got.iter().zip(&again).filter(|(a, b)| !same_bits(a, b));
    let other = other.count();
    table.line("other bits in a second run", &other.to_string(), other == 0);
    let other = there
        .iter()
        .zip(&got)
        .filter(|(x, all)| !same_bits(&survey(x).unwrap(), all))
        .count();
    table.line("other bits alone", &other.to_string(), other == 0);
    // Behind one element they are not aligned for wide accesses.
    let moved = |x: &Tensor| {
        let behind = Tensor::cat(&[&x.narrow(0, 0, 1).unwrap(), x], 0).unwrap();
        behind.narrow(0, 1, x.elem_count()).unwrap()
    };
    let other = there
        .iter()
        .zip(&got)
        .filter(|(x, all)| !same_bits(&survey(&moved(x)).unwrap(), all))
        .count();
    table.line("other bits elsewhere", &other.to_string(), other == 0);
    table.finish();
}

#[test]
#[ignore = "needs a GPU"]
fn views_bad_elements_and_mixed_devices() {
    let device = device();
    let x = Tensor::new(&[f32::NAN, 1.0, 2.0, f32::INFINITY, -0.0], &device).unwrap();
    let inner = x.narrow(0, 1, 2).unwrap();
    let here = Tensor::new(&[3f32], &Device::Cpu).unwrap();
    let empty = x.narrow(0, 2, 0).unwrap();
    let zero = x.narrow(0, 4, 1).unwrap();
    let found = survey_all(&[x, inner, here, empty, zero]).unwrap();
    assert_eq!(found[0].non_finite, 2);
    assert!(!found[0].sum_of_squares.is_finite());
    let expected = |sum_of_squares, non_zero| Survey {
        sum_of_squares,
        non_finite: 0,
        non_zero,
    };
    assert_eq!(found[1], expected(5.0, true));
    assert_eq!(found[2], expected(9.0, true));
    assert_eq!(found[3], expected(0.0, false));
    assert_eq!(found[4], expected(0.0, false));
}
