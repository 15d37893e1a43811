//! Newton-Schulz in f64 loops, by the published formulas.

use polarshard_muon::Method;

/// The iteration on a `rows` × `cols` matrix, of `coefficients` `[a, b, c]` a step: normalized by its Frobenius norm,
/// transposed if it is tall, and back. `Gram` iterates on the Gram matrix and restarts before the third step; a square
/// matrix, and every other method, takes the plain iteration. A zero matrix stays zero.
pub fn newton_schulz(
    matrix: &[f64],
    rows: usize,
    cols: usize,
    coefficients: &[[f64; 3]],
    method: Method,
) -> Vec<f64> {
    let norm = crate::compare::norm(matrix.iter().copied());
    if norm == 0.0 {
        return matrix.to_vec();
    }
    let x = Matrix {
        rows,
        cols,
        values: matrix.iter().map(|value| value / norm).collect(),
    };
    let tall = rows > cols;
    let x = if tall { x.transposed() } else { x };
    let x = if method == Method::Gram && rows != cols {
        gram(x, coefficients)
    } else {
        standard(x, coefficients)
    };
    if tall {
        x.transposed().values
    } else {
        x.values
    }
}

/// `X ← aX + (bA + cA²)X` with `A = XXᵀ`.
fn standard(mut x: Matrix, coefficients: &[[f64; 3]]) -> Matrix {
    for [a, b, c] in coefficients {
        let gram = x.times(&x.transposed());
        let polynomial = gram.scaled(*b).plus(&gram.times(&gram).scaled(*c));
        x = x.scaled(*a).plus(&polynomial.times(&x));
    }
    x
}

/// The product of the steps' polynomials is gathered in Q, and R is the Gram matrix of QX throughout.
fn gram(mut x: Matrix, coefficients: &[[f64; 3]]) -> Matrix {
    const RESTART: usize = 2;
    let mut r = x.times(&x.transposed());
    let mut q = Matrix::identity(x.rows);
    for (step, [a, b, c]) in coefficients.iter().enumerate() {
        if step == RESTART {
            x = q.times(&x);
            r = x.times(&x.transposed());
            q = Matrix::identity(x.rows);
        }
        let polynomial = Matrix::identity(x.rows)
            .scaled(*a)
            .plus(&r.scaled(*b))
            .plus(&r.times(&r).scaled(*c));
        q = polynomial.times(&q);
        r = polynomial.times(&r).times(&polynomial);
    }
    q.times(&x)
}

struct Matrix {
    rows: usize,
    cols: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn identity(n: usize) -> Self {
        let values = (0..n * n)
            .map(|at| if at % n == at / n { 1.0 } else { 0.0 })
            .collect();
        Self {
            rows: n,
            cols: n,
            values,
        }
    }

    fn transposed(&self) -> Self {
        let values = (0..self.values.len())
            .map(|at| self.values[at % self.rows * self.cols + at / self.rows])
            .collect();
        Self {
            rows: self.cols,
            cols: self.rows,
            values,
        }
    }

    fn times(&self, other: &Self) -> Self {
        let mut values = vec![0.0; self.rows * other.cols];
        for (row, sums) in self
            .values
            .chunks_exact(self.cols)
            .zip(values.chunks_exact_mut(other.cols))
        {
            for (factor, theirs) in row.iter().zip(other.values.chunks_exact(other.cols)) {
                for (sum, value) in sums.iter_mut().zip(theirs) {
                    *sum += factor * value;
                }
            }
        }
        Self {
            rows: self.rows,
            cols: other.cols,
            values,
        }
    }

    fn scaled(&self, factor: f64) -> Self {
        Self {
            values: self.values.iter().map(|value| factor * value).collect(),
            ..*self
        }
    }

    fn plus(&self, other: &Self) -> Self {
        Self {
            values: self
                .values
                .iter()
                .zip(&other.values)
                .map(|(a, b)| a + b)
                .collect(),
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use polarshard_muon::Coefficients;

    use super::*;
    use crate::compare::relative;

    /// A matrix of two singular values shows what the scalar polynomial does to each.
    #[test]
    fn singular_values_follow_the_polynomial() {
        let rows = Coefficients::KellerJordan.steps(5);
        let (s, t) = (0.6, 0.8);
        let scalar = |s: f64| {
            rows.iter()
                .fold(s, |s, [a, b, c]| a * s + b * s.powi(3) + c * s.powi(5))
        };
        let expected = [scalar(s), 0.0, 0.0, 0.0, 0.0, scalar(t)];
        for method in [Method::Standard, Method::Gram] {
            let wide = newton_schulz(&[3.0 * s, 0.0, 0.0, 0.0, 0.0, 3.0 * t], 2, 3, &rows, method);
            assert!(relative(&wide, &expected) < 1e-13, "{wide:?}");
            let tall = newton_schulz(&[3.0 * s, 0.0, 0.0, 3.0 * t, 0.0, 0.0], 3, 2, &rows, method);
            assert!(
                relative(&tall, &[scalar(s), 0.0, 0.0, scalar(t), 0.0, 0.0]) < 1e-13,
                "{tall:?}"
            );
        }
    }

    #[test]
    fn both_methods_are_one_polynomial() {
        let matrix: Vec<f64> = (0..35)
            .map(|at| f64::from((at * at * 7 + at) % 23) - 11.0)
            .collect();
        let rows = Coefficients::You.steps(5);
        let [standard, gram] =
            [Method::Standard, Method::Gram].map(|m| newton_schulz(&matrix, 5, 7, &rows, m));
        assert!(relative(&gram, &standard) < 1e-12);
    }
}
