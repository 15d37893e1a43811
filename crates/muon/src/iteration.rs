//! The Newton-Schulz iteration on a stack `(batch, n, m)` with n ≤ m and norms of at most about 1.
//!
//! All work is in [`fma`] and [`add_to_diagonal`]: a device with fused products replaces these.

use candle_core::{CpuStorage, InplaceOp1, InplaceOp2, Layout, Result, Tensor, bail};

/// The step (from 0) before which [`gram`] recomputes the Gram matrix: rounding can make it
/// indefinite, and its negative eigenvalues would grow from step to step.
pub(crate) const RESTART: usize = 2;

/// A step is `X ← aX + BX` with `B = bA + cA²` and `A = XXᵀ`.
pub(crate) fn standard(mut x: Tensor, rows: &[[f64; 3]]) -> Result<Tensor> {
    for &[a, b, c] in rows {
        let gram = x.matmul(&x.t()?)?;
        let z = fma(c, &gram, &gram, b, &gram)?;
        x = fma(1.0, &z, &x, a, &x)?;
    }
    Ok(x)
}

/// The same polynomial: `X ← QX`, where Q gathers the steps' factors `aI + Z`, `Z = bR + cR²`, and
/// the Gram matrix follows by `R ← (aI + Z) R (aI + Z)`. `aI` is not added to Z, which would round
/// Z to the precision of a.
pub(crate) fn gram(mut x: Tensor, rows: &[[f64; 3]]) -> Result<Tensor> {
    let mut r = x.matmul(&x.t()?)?;
    let mut gathered: Option<Tensor> = None;
    for (step, &[a, b, c]) in rows.iter().enumerate() {
        if step == RESTART
            && let Some(q) = gathered.take()
        {
            x = q.matmul(&x)?;
            r = x.matmul(&x.t()?)?;
        }
        let z = fma(c, &r, &r, b, &r)?;
        let gram_is_needed = step + 1 < rows.len() && step + 1 != RESTART;
        if gram_is_needed {
            let rz = fma(1.0, &r, &z, a, &r)?;
            r = fma(1.0, &z, &rz, a, &rz)?;
        }
        gathered = Some(match gathered {
            Some(q) => fma(1.0, &q, &z, a, &q)?,
            None => {
                add_to_diagonal(&z, a)?;
                z
            }
        });
    }
    match gathered {
        Some(q) => q.matmul(&x),
        None => Ok(x),
    }
}

/// `alpha · A B + beta · C`.
fn fma(alpha: f64, a: &Tensor, b: &Tensor, beta: f64, c: &Tensor) -> Result<Tensor> {
    let d = a.matmul(b)?;
    d.inplace_op2(
        c,
        &Blend {
            alpha: alpha as f32,
            beta: beta as f32,
        },
    )?;
    Ok(d)
}

/// `Z ← Z + a · I` for each matrix of a stack.
fn add_to_diagonal(z: &Tensor, a: f64) -> Result<()> {
    z.inplace_op1(&AddToDiagonal(a as f32))
}

/// `D ← alpha · D + beta · C`, two products and a sum, each rounded to f32.
struct Blend {
    alpha: f32,
    beta: f32,
}

impl InplaceOp2 for Blend {
    fn name(&self) -> &'static str {
        "newton-schulz-blend"
    }

    fn cpu_fwd(&self, d: &mut CpuStorage, dl: &Layout, c: &CpuStorage, cl: &Layout) -> Result<()> {
        let (CpuStorage::F32(d), CpuStorage::F32(c)) = (d, c) else {
            bail!("{}: expected f32", self.name());
        };
        let (Some((d0, d1)), Some((c0, c1))) = (dl.contiguous_offsets(), cl.contiguous_offsets())
        else {
            bail!("{}: expected contiguous operands", self.name());
        };
        for (d, c) in d[d0..d1].iter_mut().zip(&c[c0..c1]) {
            *d = self.alpha * *d + self.beta * c;
        }
        Ok(())
    }
}

struct AddToDiagonal(f32);

impl InplaceOp1 for AddToDiagonal {
    fn name(&self) -> &'static str {
        "newton-schulz-add-to-diagonal"
    }

    fn cpu_fwd(&self, z: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (CpuStorage::F32(z), Some((start, end))) = (z, layout.contiguous_offsets()) else {
            bail!("{}: expected contiguous f32", self.name());
        };
        let n = layout.dims()[layout.dims().len() - 1];
        for matrix in z[start..end].chunks_exact_mut(n * n) {
            for diagonal in matrix.iter_mut().step_by(n + 1) {
                *diagonal += self.0;
            }
        }
        Ok(())
    }
}
