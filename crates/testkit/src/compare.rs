//! How far results are from what they should be, with the parameter named.

use candle_core::{DType, Tensor};

/// A parameter and its error.
#[derive(Debug, Clone, PartialEq)]
pub struct Off {
    /// The parameter.
    pub name: String,
    /// Its relative Frobenius error.
    pub error: f64,
}

/// The relative Frobenius error `‖found - expected‖ / ‖expected‖`, in f64; 0 where both are zero or empty, NaN where an
/// element is not a number.
///
/// # Panics
/// If the lengths differ.
pub fn relative(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "the lengths differ");
    let difference = norm(
        found
            .iter()
            .zip(expected)
            .map(|(found, expected)| found - expected),
    );
    let scale = norm(expected.iter().copied());
    if difference == 0.0 {
        0.0
    } else {
        // A NaN with a sign, as ∞ - ∞ has one, would be ordered below all numbers.
        (difference / scale).abs()
    }
}

/// What a step has changed, element by element.
pub fn change(before: &[f64], after: &[f64]) -> Vec<f64> {
    before
        .iter()
        .zip(after)
        .map(|(before, after)| after - before)
        .collect()
}

/// The Frobenius norm, in f64.
pub fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

/// The parameter with the largest relative error. An error that is no number is the largest of all.
///
/// # Panics
/// If there is no parameter, or the lengths of one differ.
pub fn worst<'a>(parameters: impl IntoIterator<Item = (&'a str, &'a [f64], &'a [f64])>) -> Off {
    parameters
        .into_iter()
        .map(|(name, found, expected)| Off {
            name: name.to_owned(),
            error: relative(found, expected),
        })
        .max_by(|a, b| a.error.total_cmp(&b.error))
        .expect("there is a parameter")
}

/// The first element of which the bits differ: its index, and both values. Lengths that differ count as a difference at
/// the end of the shorter one.
///
/// # Errors
/// Of reading the tensors.
pub fn first_difference(
    found: &Tensor,
    expected: &Tensor,
) -> candle_core::Result<Option<(usize, f32, f32)>> {
    let (found, expected) = (values(found)?, values(expected)?);
    let at = (0..found.len().max(expected.len())).find(|at| {
        let bits = |values: &[f32]| values.get(*at).map(|value| value.to_bits());
        bits(&found) != bits(&expected)
    });
    let value = |values: &[f32], at: usize| values.get(at).copied().unwrap_or(f32::NAN);
    Ok(at.map(|at| (at, value(&found, at), value(&expected, at))))
}

/// The elements of a tensor of any shape, in order, as f32.
///
/// # Errors
/// Of reading the tensor.
pub fn values(tensor: &Tensor) -> candle_core::Result<Vec<f32>> {
    tensor
        .detach()
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1()
}

/// The same as f64.
///
/// # Errors
/// Of reading the tensor.
pub fn values64(tensor: &Tensor) -> candle_core::Result<Vec<f64>> {
    Ok(values(tensor)?.into_iter().map(f64::from).collect())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn errors_are_relative_to_what_is_expected() {
        assert_eq!(relative(&[3.0, 4.0], &[0.0, 4.0]), 0.75);
        assert_eq!(relative(&[0.0], &[0.0]), 0.0);
        assert_eq!(relative(&[1.0], &[0.0]), f64::INFINITY);
        assert!(relative(&[f64::NAN], &[1.0]).is_nan());
        let found = worst([
            ("a", &[1.0][..], &[2.0][..]),
            ("b", &[f64::NAN], &[1.0]),
            ("c", &[5.0], &[1.0]),
        ]);
        assert_eq!(found.name, "b");
        let infinite = std::hint::black_box(f64::INFINITY);
        for found in [1.0, infinite] {
            let found = worst([("a", &[found][..], &[infinite][..]), ("b", &[5.0], &[1.0])]);
            assert_eq!(found.name, "a");
        }
    }

    #[test]
    fn bits_differ_where_values_may_not() {
        let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
        let zeros = tensor(&[1.0, 0.0]);
        assert_eq!(
            first_difference(&zeros, &tensor(&[1.0, 0.0])).unwrap(),
            None
        );
        let (at, found, expected) = first_difference(&zeros, &tensor(&[1.0, -0.0]))
            .unwrap()
            .unwrap();
        assert_eq!((at, found.to_bits(), expected.to_bits()), (1, 0, 1 << 31));
        assert_eq!(
            first_difference(&zeros, &tensor(&[1.0]))
                .unwrap()
                .map(|found| found.0),
            Some(1)
        );
    }
}
