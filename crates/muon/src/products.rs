//! The products that the iteration is made of, on stacks of matrices; a device with faster ones has
//! them here.
//!
//! [`outer`] and [`symmetric_fma`] have symmetric results, of which a device may compute a half.

use candle_core::{CpuStorage, InplaceOp1, InplaceOp2, Layout, Result, Tensor, bail};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, Device};

#[cfg(feature = "cuda")]
use crate::cuda;

/// X Xᵀ.
pub(crate) fn outer(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = x.device() {
        return cuda::outer(device, x);
    }
    x.matmul(&x.t()?)
}

/// A B.
pub(crate) fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = a.device() {
        return cuda::product(device, a, b);
    }
    a.matmul(b)
}

/// `alpha · A B + beta · C`. On a CPU, the product, the two terms and their sum are each rounded to
/// f32; on a CUDA device, the whole is rounded once.
pub(crate) fn fma(alpha: f64, a: &Tensor, b: &Tensor, beta: f64, c: &Tensor) -> Result<Tensor> {
    let (alpha, beta) = (alpha as f32, beta as f32);
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = a.device() {
        return cuda::fma(device, alpha, a, b, beta, c);
    }
    let d = a.matmul(b)?;
    d.inplace_op2(c, &Blend { alpha, beta })?;
    Ok(d)
}

/// [`fma`] of symmetric matrices that commute, as polynomials of one matrix do.
pub(crate) fn symmetric_fma(
    alpha: f64,
    a: &Tensor,
    b: &Tensor,
    beta: f64,
    c: &Tensor,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = a.device() {
        let (alpha, beta) = (alpha as f32, beta as f32);
        return cuda::symmetric_fma(device, alpha, a, b, beta, c);
    }
    fma(alpha, a, b, beta, c)
}

/// `Z ← Z + a · I` for each matrix of a stack.
pub(crate) fn add_to_diagonal(z: &Tensor, a: f64) -> Result<()> {
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

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, z: &mut CudaStorage, layout: &Layout) -> Result<()> {
        cuda::add_to_diagonal(z, layout, self.0)
    }
}
