use crate::Error;

/// The polynomials of the iteration: step i maps each singular value s to `a·s + b·s³ + c·s⁵`.
///
/// All sets take singular values in (0, 1] close to 1 within five steps; they differ in how steep
/// they start (small values reach 1 sooner) and how far from 1 they end.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub enum Coefficients {
    /// `(3.4445, -4.7750, 2.0315)` at every step, by Keller Jordan; ends within 0.68 to 1.16 for
    /// values from 0.005. The same polynomial repeats for any number of steps.
    #[default]
    KellerJordan,
    /// Polar Express (arXiv 2505.16932), each step's polynomial evaluated at s / 1.05, so that a
    /// largest value rounded to just over 1 does not diverge. From five steps on, the last repeats.
    PolarExpress,
    /// Five polynomials by Jiacheng You. From five steps on, the last repeats.
    You,
    /// Any others, made by [`Coefficients::custom`]. The last one repeats.
    Custom(CustomCoefficients),
}

/// Coefficients that were checked: at least one step, all finite.
#[derive(Debug, Clone, PartialEq)]
pub struct CustomCoefficients(Vec<[f64; 3]>);

const KELLER_JORDAN: [[f64; 3]; 1] = [[3.4445, -4.7750, 2.0315]];

const YOU: [[f64; 3]; 5] = [
    [4.0848, -6.8946, 2.9270],
    [3.9505, -6.3029, 2.6377],
    [3.7418, -5.5913, 2.3037],
    [2.8769, -3.1427, 1.2046],
    [2.8366, -3.0525, 1.2012],
];

/// As published; [`polar_express`] divides by powers of [`POLAR_EXPRESS_SAFETY`].
const POLAR_EXPRESS: [[f64; 3]; 5] = [
    [8.28721201814563, -23.595886519098837, 17.300387312530933],
    [4.107059111542203, -2.9478499167379106, 0.5448431082926601],
    [3.9486908534822946, -2.908902115962949, 0.5518191394370137],
    [3.3184196573706015, -2.488488024314874, 0.51004894012372],
    [2.300652019954817, -1.6689039845747493, 0.4188073119525673],
];
const POLAR_EXPRESS_SAFETY: f64 = 1.05;

impl Coefficients {
    /// Coefficients `[a, b, c]` of one's own, a row a step.
    ///
    /// # Errors
    /// [`Error::NoCoefficients`] without a row, [`Error::NonFiniteCoefficients`] for a row with an
    /// element that is not finite in f32.
    pub fn custom(rows: Vec<[f64; 3]>) -> Result<Self, Error> {
        if rows.is_empty() {
            return Err(Error::NoCoefficients);
        }
        for (step, &row) in rows.iter().enumerate() {
            if !row.iter().all(|x| (*x as f32).is_finite()) {
                return Err(Error::NonFiniteCoefficients { step, row });
            }
        }
        Ok(Self::Custom(CustomCoefficients(rows)))
    }

    /// The rows `[a, b, c]` of the first `n` steps.
    #[must_use]
    pub fn steps(&self, n: usize) -> Vec<[f64; 3]> {
        let rows: Vec<_> = match self {
            Self::KellerJordan => KELLER_JORDAN.to_vec(),
            Self::PolarExpress => POLAR_EXPRESS.iter().map(polar_express).collect(),
            Self::You => YOU.to_vec(),
            Self::Custom(CustomCoefficients(rows)) => rows.clone(),
        };
        let last = rows.last().copied().into_iter().cycle();
        rows.iter().copied().chain(last).take(n).collect()
    }
}

/// p(s / safety) has the coefficients `a/s, b/s³, c/s⁵`.
fn polar_express(&[a, b, c]: &[f64; 3]) -> [f64; 3] {
    let s = POLAR_EXPRESS_SAFETY;
    [a / s, b / s.powi(3), c / s.powi(5)]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The composite polynomial of five steps at `s`.
    fn map(coefficients: &Coefficients, s: f64) -> f64 {
        let rows = coefficients.steps(5);
        rows.iter()
            .fold(s, |s, [a, b, c]| s * (a + s * s * (b + s * s * c)))
    }

    #[test]
    fn keller_jordan_maps_values_as_published() {
        let table = [
            (0.001, 0.47054),
            (0.01, 0.69892),
            (0.1, 0.71212),
            (1.0, 0.69644),
        ];
        for (s, expected) in table {
            let got = map(&Coefficients::KellerJordan, s);
            assert!((got - expected).abs() < 1e-5, "{s}: {got}");
        }
    }

    /// Ranges over values from 1e-3 to 1 of the composite, and the slope at 0.
    #[test]
    fn sets_stay_in_their_published_ranges() {
        let sets = [
            (Coefficients::KellerJordan, 485.0, 0.471, 1.202),
            (Coefficients::You, 493.0, 0.475, 1.145),
            (Coefficients::PolarExpress, 804.0, 0.729, 1.124),
        ];
        for (set, slope, low, high) in sets {
            let got = map(&set, 1e-9) / 1e-9;
            assert!((got - slope).abs() < 1.0, "{set:?}: slope {got}");
            let values = (0..=30_000).map(|i| map(&set, 10f64.powf(-f64::from(i) / 10_000.0)));
            let (min, max) = values.fold((f64::MAX, f64::MIN), |(a, b), x| (a.min(x), b.max(x)));
            assert!((min - low).abs() < 1e-3, "{set:?}: min {min}");
            assert!((max - high).abs() < 1e-3, "{set:?}: max {max}");
        }
    }

    #[test]
    fn the_last_row_repeats_and_a_prefix_is_a_prefix() {
        let set = Coefficients::custom(vec![[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).unwrap();
        assert_eq!(set.steps(1), [[1.0, 2.0, 3.0]]);
        assert_eq!(set.steps(4)[3], [4.0, 5.0, 6.0]);
        assert_eq!(Coefficients::You.steps(7)[6], YOU[4]);
        assert_eq!(Coefficients::KellerJordan.steps(3), [KELLER_JORDAN[0]; 3]);
    }

    #[test]
    fn custom_rows_are_checked() {
        assert!(matches!(
            Coefficients::custom(vec![]),
            Err(Error::NoCoefficients)
        ));
        for bad in [f64::NAN, 1e39] {
            let rows = vec![[1.0, 0.0, 0.0], [1.0, bad, 0.0]];
            let error = Coefficients::custom(rows).unwrap_err();
            assert!(matches!(
                error,
                Error::NonFiniteCoefficients { step: 1, .. }
            ));
        }
    }
}
