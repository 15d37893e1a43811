//! Float64 matrices in plain loops, spectra, and two oracles for Newton-Schulz.

use candle_core::{Device, Tensor};
use faer::Mat;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// A row-major float64 matrix.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) data: Vec<f64>,
}

impl Matrix {
    pub(crate) fn zeros(rows: usize, cols: usize) -> Self {
        Self {
            rows,
            cols,
            data: vec![0.0; rows * cols],
        }
    }

    pub(crate) fn gaussian(rows: usize, cols: usize, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let data = StandardNormal
            .sample_iter(&mut rng)
            .take(rows * cols)
            .collect();
        Self { rows, cols, data }
    }

    /// A matrix of these singular values, between random orthogonal factors.
    pub(crate) fn with_spectrum(rows: usize, cols: usize, values: &[f64], seed: u64) -> Self {
        let k = values.len();
        let u = orthonormal(rows, k, 2 * seed);
        let v = orthonormal(cols, k, 2 * seed + 1);
        let mut scaled = u;
        for row in scaled.data.chunks_exact_mut(k) {
            row.iter_mut().zip(values).for_each(|(x, s)| *x *= s);
        }
        scaled.times(&v.transpose())
    }

    pub(crate) fn from_tensor(x: &Tensor) -> Self {
        let (rows, cols) = x.dims2().unwrap();
        let data = x.to_dtype(candle_core::DType::F64).unwrap();
        Self {
            rows,
            cols,
            data: data.flatten_all().unwrap().to_vec1().unwrap(),
        }
    }

    /// Rounded to f32.
    pub(crate) fn to_tensor(&self) -> Tensor {
        let data: Vec<f32> = self.data.iter().map(|&x| x as f32).collect();
        Tensor::from_vec(data, (self.rows, self.cols), &Device::Cpu).unwrap()
    }

    pub(crate) fn transpose(&self) -> Self {
        let mut out = Self::zeros(self.cols, self.rows);
        for i in 0..self.rows {
            for j in 0..self.cols {
                out.data[j * self.rows + i] = self.data[i * self.cols + j];
            }
        }
        out
    }

    pub(crate) fn times(&self, other: &Self) -> Self {
        assert_eq!(self.cols, other.rows);
        let mut out = Self::zeros(self.rows, other.cols);
        for i in 0..self.rows {
            let row = &mut out.data[i * other.cols..][..other.cols];
            for k in 0..self.cols {
                let x = self.data[i * self.cols + k];
                let factors = &other.data[k * other.cols..][..other.cols];
                row.iter_mut().zip(factors).for_each(|(y, f)| *y += x * f);
            }
        }
        out
    }

    /// `alpha · self + beta · other`.
    pub(crate) fn blend(&self, alpha: f64, beta: f64, other: &Self) -> Self {
        assert_eq!((self.rows, self.cols), (other.rows, other.cols));
        let data = self
            .data
            .iter()
            .zip(&other.data)
            .map(|(x, y)| alpha * x + beta * y)
            .collect();
        Self { data, ..*self }
    }

    pub(crate) fn norm(&self) -> f64 {
        self.data.iter().map(|x| x * x).sum::<f64>().sqrt()
    }

    /// ‖self - other‖ / ‖other‖, Frobenius.
    pub(crate) fn error_against(&self, other: &Self) -> f64 {
        self.blend(1.0, -1.0, other).norm() / other.norm()
    }

    pub(crate) fn singular_values(&self) -> Vec<f64> {
        self.faer().singular_values().unwrap()
    }

    fn faer(&self) -> Mat<f64> {
        Mat::from_fn(self.rows, self.cols, |i, j| self.data[i * self.cols + j])
    }
}

fn orthonormal(rows: usize, cols: usize, seed: u64) -> Matrix {
    let q = Matrix::gaussian(rows, cols, seed)
        .faer()
        .qr()
        .compute_thin_Q();
    let data = (0..rows * cols).map(|i| q[(i / cols, i % cols)]).collect();
    Matrix { rows, cols, data }
}

/// The textbook iteration in float64, one matrix, no tricks.
pub(crate) fn newton_schulz(x: &Matrix, steps: &[[f64; 3]]) -> Matrix {
    if x.rows > x.cols {
        return newton_schulz(&x.transpose(), steps).transpose();
    }
    let norm = x.norm();
    if norm == 0.0 {
        return x.clone();
    }
    let mut x = x.blend(1.0 / norm, 0.0, x);
    for &[a, b, c] in steps {
        let gram = x.times(&x.transpose());
        let polynomial = gram.blend(b, c, &gram.times(&gram));
        x = x.blend(a, 1.0, &polynomial.times(&x));
    }
    x
}

/// What the iteration is for: the polynomial on each singular value, by a decomposition.
pub(crate) fn by_svd(x: &Matrix, steps: &[[f64; 3]]) -> Matrix {
    let norm = x.norm();
    let svd = x.faer().thin_svd().unwrap();
    let (u, s, v) = (svd.U(), svd.S().column_vector(), svd.V());
    let mapped: Vec<f64> = s.iter().map(|s| composite(s / norm, steps)).collect();
    let mut out = Matrix::zeros(x.rows, x.cols);
    for i in 0..x.rows {
        for j in 0..x.cols {
            out.data[i * x.cols + j] = mapped
                .iter()
                .enumerate()
                .map(|(k, s)| u[(i, k)] * s * v[(j, k)])
                .sum();
        }
    }
    out
}

pub(crate) fn composite(s: f64, steps: &[[f64; 3]]) -> f64 {
    steps
        .iter()
        .fold(s, |s, [a, b, c]| a * s + b * s.powi(3) + c * s.powi(5))
}

/// Spectra of `n` values that stress the iteration in different ways.
pub(crate) fn spectra(n: usize) -> Vec<(&'static str, Vec<f64>)> {
    let at = |i: usize| i as f64 / (n - 1) as f64;
    let each = |f: &dyn Fn(usize) -> f64| (0..n).map(f).collect::<Vec<_>>();
    vec![
        ("equal", each(&|_| 1.0)),
        ("linear to 1e-3", each(&|i| 1.0 - 0.999 * at(i))),
        ("log to 1e-3", each(&|i| 10f64.powf(-3.0 * at(i)))),
        ("log to 1e-5", each(&|i| 10f64.powf(-5.0 * at(i)))),
        ("log to 1e-7", each(&|i| 10f64.powf(-7.0 * at(i)))),
        ("power law", each(&|i| ((i + 1) as f64).powf(-0.5))),
        ("exponential", each(&|i| (-5.0 * at(i)).exp())),
        (
            "heavy tail",
            each(&|i| if i % 10 == 0 { 1.0 } else { 1e-3 }),
        ),
        ("half rank", each(&|i| if 2 * i < n { 1.0 } else { 0.0 })),
        ("rank 10", each(&|i| if i < 10 { 1.0 } else { 0.0 })),
        ("rank 2", each(&|i| if i < 2 { 1.0 } else { 0.0 })),
        ("rank 1", each(&|i| if i < 1 { 1.0 } else { 0.0 })),
    ]
}
