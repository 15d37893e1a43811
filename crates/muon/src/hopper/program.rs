//! An iteration as a list of products.

use std::collections::BTreeSet;

use crate::Method;
use crate::iteration::RESTART;
use crate::newton_schulz::saturating_product;

/// A stack of the workspace: X and Y are n × m, the others n × n and symmetric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Buffer {
    X,
    Y,
    R,
    Z,
    Q,
    T,
    S,
}

impl Buffer {
    pub(crate) const ALL: [Self; 7] = [
        Self::X,
        Self::Y,
        Self::R,
        Self::Z,
        Self::Q,
        Self::T,
        Self::S,
    ];

    /// Whether it is n × n and symmetric; else it is n × m.
    pub(crate) fn is_symmetric(self) -> bool {
        !matches!(self, Self::X | Self::Y)
    }
}

/// The factors of a product, laid out as `Scalars` in `kernels/hopper/tasks.cuh`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub(crate) struct Scalars {
    /// Not zero.
    pub(crate) alpha: f32,
    pub(crate) from_a: f32,
    pub(crate) from_b: f32,
    pub(crate) diagonal: f32,
}

/// `D = alpha A B + from_a A + from_b B + diagonal I`; D is neither A nor B.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Product {
    pub(crate) a: Buffer,
    /// Read as its transpose where D is symmetric, which matters for X Xᵀ alone.
    pub(crate) b: Buffer,
    pub(crate) d: Buffer,
    pub(crate) scalars: Scalars,
}

impl Product {
    pub(crate) fn is_symmetric(&self) -> bool {
        self.d.is_symmetric()
    }
}

/// What X is multiplied by while it is iterated: a power of two, so that no bit of a result depends
/// on it but where elements of X or R would be subnormal in f16, as they are in very large matrices.
/// Laid down in `kernels/hopper/normalize.cu` as well.
const SCALE: f64 = 16.0;

/// The iteration with coefficients `[a, b, c]` a step, at least one, on what lies in X. Its result is
/// the last product's. The polynomials are those of [`iteration`](crate::iteration), where `a I` is
/// kept beside the first factor since a restart, instead of being added to it.
pub(crate) fn program(method: Method, rows: &[[f64; 3]]) -> Vec<Product> {
    let mut program = match method {
        Method::Gram => gram(rows),
        Method::Auto | Method::Standard => standard(rows),
    };
    if let Some(last) = program.last_mut() {
        last.scalars.alpha /= SCALE as f32;
        last.scalars.from_b /= SCALE as f32;
    }
    program
}

/// Floating-point operations of a program, a multiply-add counted as two, half of a symmetric
/// product left out.
pub(crate) fn flops(program: &[Product], n: usize, m: usize) -> u128 {
    let of = |product: &Product| match (product.is_symmetric(), product.a.is_symmetric()) {
        (true, false) => saturating_product([n, n, m]),
        (true, true) => saturating_product([n, n, n]),
        (false, _) => saturating_product([2, n, n, m]),
    };
    program.iter().map(of).fold(0, u128::saturating_add)
}

/// For each product the others that must be stored before it starts, because it reads or overwrites
/// what they write or read. Those that follow from others are left out.
pub(crate) fn waits(program: &[Product]) -> Vec<Vec<usize>> {
    let mut waits: Vec<Vec<usize>> = Vec::new();
    // All that is stored before a product starts.
    let mut before: Vec<BTreeSet<usize>> = Vec::new();
    for (index, product) in program.iter().enumerate() {
        let reads = |other: &Product, buffer| other.a == buffer || other.b == buffer;
        let conflicts = |other: &Product| {
            reads(product, other.d) || reads(other, product.d) || other.d == product.d
        };
        let all: BTreeSet<_> = (0..index).filter(|&i| conflicts(&program[i])).collect();
        let follows = |i: &usize| all.iter().any(|other| before[*other].contains(i));
        waits.push(all.iter().copied().filter(|i| !follows(i)).collect());
        let behind = all.iter().flat_map(|i| before[*i].iter().copied());
        before.push(all.iter().copied().chain(behind).collect());
    }
    waits
}

fn standard(rows: &[[f64; 3]]) -> Vec<Product> {
    let (mut x, mut y) = (Buffer::X, Buffer::Y);
    let mut program = Vec::new();
    for &[a, b, c] in rows {
        program.push(outer(x));
        program.push(polynomial(b, c));
        program.push(apply(Buffer::Z, x, y, a));
        (x, y) = (y, x);
    }
    program
}

fn gram(rows: &[[f64; 3]]) -> Vec<Product> {
    let (mut x, mut y) = (Buffer::X, Buffer::Y);
    let mut program = vec![outer(x)];
    // A step's polynomial, the factors gathered so far, and what is free.
    let [mut z, mut q, mut t, mut s] = [Buffer::Z, Buffer::Q, Buffer::T, Buffer::S];
    // What times I is to be added to the factors gathered so far.
    let mut gathered: Option<f64> = None;
    for (step, &[a, b, c]) in rows.iter().enumerate() {
        if step == RESTART
            && let Some(beside) = gathered.take()
        {
            program.push(apply(q, x, y, beside));
            (x, y) = (y, x);
            program.push(outer(x));
        }
        program.push(Product {
            d: z,
            ..polynomial(b, c)
        });
        let gram_is_needed = step + 1 < rows.len() && step + 1 != RESTART;
        if gram_is_needed {
            program.push(product(Buffer::R, z, t, a, 0.0, 0.0));
            // Z is there before the launch of RZ, and of A more is loaded than of B.
            program.push(product(z, t, Buffer::R, 0.0, a, 0.0));
        }
        // The next polynomial overwrites t, so that it does not wait for factors to be gathered.
        gathered = Some(match gathered {
            None => {
                (z, q, t) = (t, z, q);
                a
            }
            Some(beside) => {
                program.push(product(q, z, s, a, beside, beside * a));
                (z, q, t, s) = (t, s, z, q);
                0.0
            }
        });
    }
    if let Some(beside) = gathered {
        program.push(apply(q, x, y, beside));
    }
    program
}

/// R = X Xᵀ, so R has the square of X's scale.
fn outer(x: Buffer) -> Product {
    product(x, x, Buffer::R, 0.0, 0.0, 0.0)
}

/// Z = bR + cR² of R without its scale.
fn polynomial(b: f64, c: f64) -> Product {
    let (b, c) = (b / SCALE.powi(2), c / SCALE.powi(4));
    /// Factors are divided by this one, so it cannot be zero; times R² this rounds to zero.
    const LEAST: f32 = 1e-30;
    let c = c as f32;
    let alpha = if c.abs() < LEAST { LEAST } else { c };
    let mut polynomial = product(Buffer::R, Buffer::R, Buffer::Z, b, 0.0, 0.0);
    polynomial.scalars.alpha = alpha;
    polynomial
}

/// Y = AX + beside · X.
fn apply(a: Buffer, x: Buffer, y: Buffer, beside: f64) -> Product {
    product(a, x, y, 0.0, beside, 0.0)
}

fn product(a: Buffer, b: Buffer, d: Buffer, from_a: f64, from_b: f64, diagonal: f64) -> Product {
    let scalars = Scalars {
        alpha: 1.0,
        from_a: from_a as f32,
        from_b: from_b as f32,
        diagonal: diagonal as f32,
    };
    Product { a, b, d, scalars }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Coefficients;

    /// All matrices of an iteration share singular vectors, so it can be run on a singular value.
    fn run(program: &[Product], s: f64) -> f64 {
        let index = |buffer: Buffer| buffer as usize;
        let mut value = [f64::NAN; 7];
        value[index(Buffer::X)] = SCALE * s;
        for product in program {
            assert!(product.d != product.a && product.d != product.b);
            assert!(product.scalars.alpha != 0.0);
            let (a, b) = (value[index(product.a)], value[index(product.b)]);
            let Scalars {
                alpha,
                from_a,
                from_b,
                diagonal,
            } = product.scalars;
            let [alpha, from_a, from_b, diagonal] =
                [alpha, from_a, from_b, diagonal].map(f64::from);
            value[index(product.d)] = alpha * a * b + from_a * a + from_b * b + diagonal;
        }
        value[index(program[program.len() - 1].d)]
    }

    fn sets() -> Vec<Coefficients> {
        vec![
            Coefficients::KellerJordan,
            Coefficients::PolarExpress,
            Coefficients::You,
            Coefficients::custom(vec![[1.0, 0.0, 0.0]]).unwrap(),
            Coefficients::custom(vec![[1.5, -0.5, 0.0], [2.0, -1.0, -0.1]]).unwrap(),
        ]
    }

    #[test]
    fn a_program_computes_the_polynomials() {
        for set in sets() {
            for steps in 1..=8 {
                let rows = set.steps(steps);
                for method in [Method::Standard, Method::Gram] {
                    let program = program(method, &rows);
                    for s in [0.0, 0.01, 0.3, 0.77, 1.0] {
                        let expected = rows
                            .iter()
                            .fold(s, |s, [a, b, c]| s * (a + s * s * (b + s * s * c)));
                        let got = run(&program, s);
                        let error = (got - expected).abs();
                        assert!(
                            error < 1e-5 * expected.abs().max(1.0),
                            "{method} of {steps} steps of {set:?} at {s}: {got}, not {expected}"
                        );
                    }
                }
            }
        }
    }

    fn waits_of(method: Method, steps: usize) -> Vec<Vec<usize>> {
        waits(&program(method, &Coefficients::default().steps(steps)))
    }

    #[test]
    fn a_product_of_standard_waits_for_the_one_before() {
        for (index, waits) in waits_of(Method::Standard, 5).iter().enumerate() {
            let before: Vec<_> = index.checked_sub(1).into_iter().collect();
            assert_eq!(*waits, before);
        }
    }

    #[test]
    fn factors_are_gathered_beside_the_gram_matrix() {
        let waits = waits_of(Method::Gram, 5);
        assert!(waits.iter().all(|waits| waits.len() <= 3));
        // Of the fourth step: Z, RZ, R, the factors gathered; then Z of the fifth.
        assert_eq!(waits[11..16], [[10], [11], [12], [11], [13]]);
    }

    #[test]
    fn five_steps_have_the_flops_of_the_cheapest_known_form() {
        let rows = Coefficients::default().steps(5);
        let (n, m) = (3, 7);
        let standard = flops(&program(Method::Standard, &rows), n, m);
        assert_eq!(standard, (15 * n * n * m + 5 * n * n * n) as u128);
        let gram = flops(&program(Method::Gram, &rows), n, m);
        assert_eq!(gram, (6 * n * n * m + 14 * n * n * n) as u128);
    }

    #[test]
    fn the_last_product_is_not_symmetric() {
        for steps in 1..=6 {
            let rows = Coefficients::default().steps(steps);
            for method in [Method::Standard, Method::Gram] {
                assert!(!program(method, &rows).last().unwrap().is_symmetric());
            }
        }
    }
}
