//! The iteration at full size, against float64 on the same device and beside what f16 allows: the default one on
//! matrices of chosen spectra, n from 256 to 4096, and cuBLAS's where symmetric products are cut into bands.

use candle_core::{DType, Device, Result, Tensor};
use polarshard_muon::{Coefficients, Kernels, Method, NewtonSchulz, Precision, Products};

use super::{Table, device};
use crate::oracle;

const SIDES: [usize; 5] = [256, 512, 1024, 2048, 4096];

/// `alpha · A B + beta · C` in float64.
fn fma(alpha: f64, a: &Tensor, b: &Tensor, beta: f64, c: &Tensor) -> Result<Tensor> {
    (a.matmul(b)? * alpha)? + (c * beta)?
}

fn norm(x: &Tensor) -> Result<f64> {
    Ok(x.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt())
}

/// A random matrix of orthonormal rows, by an iteration that ends at one.
fn orthonormal(rows: usize, cols: usize, device: &Device) -> Result<Tensor> {
    let x = Tensor::randn(0f64, 1f64, (rows, cols), device)?;
    let mut x = (&x / norm(&x)?)?;
    let fast = Coefficients::KellerJordan.steps(10);
    let exact = vec![[1.5, -0.5, 0.0]; 14];
    for [a, b, c] in fast.into_iter().chain(exact) {
        let gram = x.matmul(&x.t()?)?;
        let z = fma(c, &gram, &gram, b, &gram)?;
        x = fma(1.0, &z, &x, a, &x)?;
    }
    Ok(x)
}

fn with_spectrum(n: usize, m: usize, values: &[f64], device: &Device) -> Result<Tensor> {
    let values = Tensor::new(values, device)?.unsqueeze(0)?;
    let u = orthonormal(n, n, device)?.broadcast_mul(&values)?;
    u.matmul(&orthonormal(n, m, device)?)?.to_dtype(DType::F32)
}

/// The textbook iteration.
fn exact(x: &Tensor, rows: &[[f64; 3]]) -> Result<Tensor> {
    let mut x = (x / norm(x)?)?;
    for &[a, b, c] in rows {
        let gram = x.matmul(&x.t()?)?;
        let z = fma(c, &gram, &gram, b, &gram)?;
        x = fma(1.0, &z, &x, a, &x)?;
    }
    Ok(x)
}

/// The same with each result rounded to f16: what storing it so allows. Gram is in the form that adds no
/// multiple of I to what is stored.
fn emulated(x: &Tensor, method: Method, rows: &[[f64; 3]]) -> Result<Tensor> {
    let round = |x: Tensor| x.to_dtype(DType::F16)?.to_dtype(DType::F64);
    let fma = |alpha, a: &Tensor, b: &Tensor, beta, c: &Tensor| round(fma(alpha, a, b, beta, c)?);
    let gram = |x: &Tensor| round(x.matmul(&x.t()?)?);
    let mut x = round((x / norm(x)?)?)?;
    if method == Method::Standard {
        for &[a, b, c] in rows {
            let r = gram(&x)?;
            let z = fma(c, &r, &r, b, &r)?;
            x = fma(1.0, &z, &x, a, &x)?;
        }
        return Ok(x);
    }
    for segment in [&rows[..2], &rows[2..]] {
        let mut r = gram(&x)?;
        // The factors gathered so far, without a multiple of I that belongs to them.
        let mut gathered: Option<(Tensor, f64)> = None;
        for &[a, b, c] in segment {
            let z = fma(c, &r, &r, b, &r)?;
            let rz = fma(1.0, &r, &z, a, &r)?;
            r = fma(1.0, &z, &rz, a, &rz)?;
            gathered = Some(match gathered {
                Some((q, beside)) => {
                    let identity = Tensor::eye(q.dim(0)?, DType::F64, x.device())?;
                    let rest = ((&z + (identity * a)?)? * beside)?;
                    (round(((q.matmul(&z)? + (q * a)?)? + rest)?)?, 0.0)
                }
                None => (z, a),
            });
        }
        if let Some((q, beside)) = gathered {
            x = fma(1.0, &q, &x, beside, &x)?;
        }
    }
    Ok(x)
}

/// A case: errors against float64, ours and the emulation's, and the cosine with the input.
struct Measured {
    error: f64,
    allowed: f64,
    cosine: f64,
}

fn measure(n: usize, m: usize, values: &[f64], device: &Device) -> Result<Measured> {
    let ns = NewtonSchulz {
        iterate: Precision::F16,
        ..NewtonSchulz::default()
    };
    let rows = ns.coefficients.steps(ns.steps);
    let x = with_spectrum(n, m, values, device)?;
    let got = ns.orthogonalize(&x).map_err(candle_core::Error::wrap)?;
    let (x, got) = (x.to_dtype(DType::F64)?, got.to_dtype(DType::F64)?);
    let method = match ns.choice(device, 1, n, m) {
        Ok(Some(choice)) => choice.method,
        other => panic!("no choice: {other:?}"),
    };
    let expected = exact(&x, &rows)?;
    let size = norm(&expected)?;
    let dot = (&got * &x)?.sum_all()?.to_scalar::<f64>()?;
    Ok(Measured {
        error: norm(&(&got - &expected)?)? / size,
        allowed: norm(&(emulated(&x, method, &rows)? - &expected)?)? / size,
        cosine: dot / norm(&got)? / norm(&x)?,
    })
}

/// At most a quarter more than the emulation's error, and a rank of one keeps its direction.
#[test]
#[ignore = "needs a GPU"]
fn the_error_is_that_of_storing_in_f16() {
    let device = device();
    let mut table = Table::new("default iteration in f16 of a spectrum, against float64");
    for n in SIDES {
        for m in [n, 2 * n] {
            for (name, values) in oracle::spectra(n) {
                let Measured {
                    error,
                    allowed,
                    cosine,
                } = measure(n, m, &values, &device).unwrap();
                let direction = name != "rank 1" || cosine >= 0.97;
                table.line(
                    &format!("{n} x {m}, {name}"),
                    &format!(
                        "{error:.2e}, {:.2} of the emulation's, cosine {cosine:.3}",
                        error / allowed
                    ),
                    error <= 1.25 * allowed && direction,
                );
            }
        }
    }
    table.finish();
}

/// A stack of two, so that the second one's place counts, too.
#[test]
#[ignore = "needs a GPU"]
fn products_in_bands_are_those_of_the_whole() {
    let device = device();
    let mut table = Table::new("symmetric products by cublas in bands, against float64");
    for (n, m, bands, precision) in [
        (1536, 1536, 3, Precision::F32),
        (1537, 1700, 3, Precision::F32),
        (2050, 4100, 4, Precision::F32),
        (3000, 3000, 3, Precision::F16),
        (3001, 3003, 3, Precision::F16),
        (3001, 6002, 3, Precision::BF16),
        (4100, 8200, 4, Precision::F16),
        (6144, 6144, 6, Precision::F16),
    ] {
        let ns = NewtonSchulz {
            iterate: precision,
            kernels: Kernels::Cublas,
            ..NewtonSchulz::default()
        };
        let choice = ns.choice(&device, 2, n, m).unwrap().unwrap();
        assert_eq!(choice.products, Products::Cublas { bands });
        let [error, allowed] = in_bands(&ns, choice.method, n, m, &device).unwrap();
        let within = match precision {
            Precision::F16 => error <= 1.25 * allowed,
            Precision::BF16 => error <= 8.0 * 1.25 * allowed,
            _ => error <= 1e-4,
        };
        let case = format!("{n} x {m} {choice}");
        let found = format!("{error:.2e}; the emulation in f16 {allowed:.2e}");
        table.line(&case, &found, within);
    }
    table.finish();
}

/// The larger of two matrices' errors, and of those of the emulation in f16.
fn in_bands(
    ns: &NewtonSchulz,
    method: Method,
    n: usize,
    m: usize,
    device: &Device,
) -> Result<[f64; 2]> {
    let rows = ns.coefficients.steps(ns.steps);
    let stack = Tensor::randn(0f32, 1f32, (2, n, m), device)?;
    let got = ns.orthogonalize(&stack).map_err(candle_core::Error::wrap)?;
    let mut largest = [0f64; 2];
    for index in 0..2 {
        let [x, got] = [&stack, &got].map(|of| of.get(index)?.to_dtype(DType::F64));
        let (x, got) = (x?, got?);
        let expected = exact(&x, &rows)?;
        for (most, other) in largest.iter_mut().zip([got, emulated(&x, method, &rows)?]) {
            *most = most.max(norm(&(other - &expected)?)? / norm(&expected)?);
        }
    }
    Ok(largest)
}

/// Of X = (A, I) the right half of the result is the polynomial of X Xᵀ times a number.
#[test]
#[ignore = "needs a GPU"]
fn products_in_bands_are_symmetric_bit_for_bit() {
    let device = device();
    for (n, iterate) in [
        (1537, Precision::F32),
        (3001, Precision::F16),
        (4096, Precision::BF16),
    ] {
        let identity = Tensor::eye(n, DType::F32, &device).unwrap();
        let identity = (identity * (n as f64).sqrt()).unwrap();
        let x = Tensor::randn(0f32, 1f32, (n, n), &device).unwrap();
        let x = Tensor::cat(&[x, identity], 1).unwrap();
        for (method, steps) in [(Method::Standard, 1), (Method::Gram, 2)] {
            let ns = NewtonSchulz {
                method,
                steps,
                iterate,
                kernels: Kernels::Cublas,
                ..NewtonSchulz::default()
            };
            let choice = ns.choice(&device, 1, n, 2 * n).unwrap().unwrap();
            assert!(
                matches!(choice.products, Products::Cublas { bands: 3.. }),
                "{choice}"
            );
            let right = ns.orthogonalize(&x).unwrap().narrow(1, n, n).unwrap();
            let differ = right.ne(&right.t().unwrap()).unwrap();
            let differ = differ.to_dtype(DType::F32).unwrap().sum_all().unwrap();
            assert_eq!(
                differ.to_scalar::<f32>().unwrap(),
                0.0,
                "{n} {method} {iterate}"
            );
        }
    }
}
