//! The Newton-Schulz iteration on a stack `(batch, n, m)` with n ≤ m and norms of at most about 1.
//!
//! All work is in [`products`](crate::products).

use candle_core::{Result, Tensor};

use crate::products::{add_to_diagonal, fma, outer, product, symmetric_fma};

/// The step (from 0) before which [`gram`] recomputes the Gram matrix: rounding can make it
/// indefinite, and its negative eigenvalues would grow from step to step.
pub(crate) const RESTART: usize = 2;

/// A step is `X ← aX + BX` with `B = bA + cA²` and `A = XXᵀ`.
pub(crate) fn standard(mut x: Tensor, rows: &[[f64; 3]]) -> Result<Tensor> {
    for &[a, b, c] in rows {
        let gram = outer(&x)?;
        let z = symmetric_fma(c, &gram, &gram, b, &gram)?;
        x = fma(1.0, &z, &x, a, &x)?;
    }
    Ok(x)
}

/// The same polynomial: `X ← QX`, where Q gathers the steps' factors `aI + Z`, `Z = bR + cR²`, and
/// the Gram matrix follows by `R ← (aI + Z) R (aI + Z)`. `aI` is not added to Z, which would round
/// Z to the precision of a.
pub(crate) fn gram(mut x: Tensor, rows: &[[f64; 3]]) -> Result<Tensor> {
    let mut r = outer(&x)?;
    let mut gathered: Option<Tensor> = None;
    for (step, &[a, b, c]) in rows.iter().enumerate() {
        if step == RESTART
            && let Some(q) = gathered.take()
        {
            x = product(&q, &x)?;
            r = outer(&x)?;
        }
        let z = symmetric_fma(c, &r, &r, b, &r)?;
        let gram_is_needed = step + 1 < rows.len() && step + 1 != RESTART;
        if gram_is_needed {
            let rz = symmetric_fma(1.0, &r, &z, a, &r)?;
            r = symmetric_fma(1.0, &z, &rz, a, &rz)?;
        }
        gathered = Some(match gathered {
            Some(q) => symmetric_fma(1.0, &q, &z, a, &q)?,
            None => {
                add_to_diagonal(&z, a)?;
                z
            }
        });
    }
    match gathered {
        Some(q) => product(&q, &x),
        None => Ok(x),
    }
}
