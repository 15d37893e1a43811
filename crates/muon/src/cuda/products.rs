//! Products of stacks of matrices, by cuBLAS: sums in f32, without TF32 and without reductions in
//! half precision; results rounded to the dtype once.

use std::iter;

use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, Storage, Tensor, bail};
use cudarc::cublas::result::gemm_strided_batched_ex;
use cudarc::cublas::sys::{
    cublasComputeType_t, cublasGemmAlgo_t, cublasHandle_t, cublasMath_t, cublasOperation_t,
    cublasSetMathMode,
};
use cudarc::driver::DevicePtrMut;

use super::element::{Element, by_dtype};
use super::launch::{address, tensor, uninitialized, view};
use super::matrices::mirror;
use crate::bands::bands;

/// X Xᵀ of each matrix of a contiguous stack.
pub(crate) fn outer(device: &CudaDevice, x: &Tensor) -> Result<Tensor> {
    let product = Product {
        b_transposed: true,
        is_symmetric: true,
        ..Product::of(x, x)
    };
    product.compute(device)
}

/// A B of each pair of matrices of contiguous stacks.
pub(crate) fn product(device: &CudaDevice, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    Product::of(a, b).compute(device)
}

/// `alpha · A B + beta · C` of each three matrices of contiguous stacks.
pub(crate) fn fma(
    device: &CudaDevice,
    alpha: f32,
    a: &Tensor,
    b: &Tensor,
    beta: f32,
    c: &Tensor,
) -> Result<Tensor> {
    Product::fma(alpha, a, b, beta, c).compute(device)
}

/// [`fma`] of symmetric matrices that commute.
pub(crate) fn symmetric_fma(
    device: &CudaDevice,
    alpha: f32,
    a: &Tensor,
    b: &Tensor,
    beta: f32,
    c: &Tensor,
) -> Result<Tensor> {
    let product = Product {
        is_symmetric: true,
        ..Product::fma(alpha, a, b, beta, c)
    };
    product.compute(device)
}

struct Product<'a> {
    alpha: f32,
    a: &'a Tensor,
    b: &'a Tensor,
    b_transposed: bool,
    addend: Option<(f32, &'a Tensor)>,
    /// Whether the result is symmetric: what is above its diagonal need not be computed.
    is_symmetric: bool,
}

/// (n × k) (k × m), for each matrix of a stack.
struct Sides {
    batch: usize,
    n: usize,
    k: usize,
    m: usize,
}

impl<'a> Product<'a> {
    fn of(a: &'a Tensor, b: &'a Tensor) -> Self {
        Self {
            alpha: 1.0,
            a,
            b,
            b_transposed: false,
            addend: None,
            is_symmetric: false,
        }
    }

    fn fma(alpha: f32, a: &'a Tensor, b: &'a Tensor, beta: f32, c: &'a Tensor) -> Self {
        Self {
            alpha,
            addend: Some((beta, c)),
            ..Self::of(a, b)
        }
    }

    fn compute(&self, device: &CudaDevice) -> Result<Tensor> {
        by_dtype!(self.a.dtype(), compute_in(self, device))
    }

    fn sides(&self) -> Result<Sides> {
        let (batch, n, k) = self.a.dims3()?;
        let (b_batch, first, second) = self.b.dims3()?;
        let (b_k, m) = if self.b_transposed {
            (second, first)
        } else {
            (first, second)
        };
        let addend = self.addend.map(|(_, c)| c.dims3()).transpose()?;
        if (b_batch, b_k) != (batch, k) || addend.is_some_and(|dims| dims != (batch, n, m)) {
            bail!(
                "cannot multiply {:?} and {:?} and add {addend:?}",
                self.a.dims(),
                self.b.dims()
            );
        }
        Ok(Sides { batch, n, k, m })
    }
}

fn compute_in<T: Element>(product: &Product<'_>, device: &CudaDevice) -> Result<Tensor> {
    let Sides { batch, n, k, m } = product.sides()?;
    // SAFETY: a product to which nothing is added writes each element, of bands the rest is `mirror`'s; others start from
    // a copy.
    let mut d = unsafe { uninitialized::<T>(device, batch * n * m) }?;
    let beta = match product.addend {
        None => 0.0,
        Some((beta, c)) => {
            // cuBLAS adds to what it overwrites.
            let (storage, layout) = c.storage_and_layout();
            let Storage::Cuda(storage) = &*storage else {
                bail!("expected a tensor on a CUDA device");
            };
            device.memcpy_dtod(&view::<T>(storage, layout)?, &mut d)?;
            beta
        }
    };
    let (a, b) = (
        address::<T>(device, product.a)?,
        address::<T>(device, product.b)?,
    );
    let bands = if product.is_symmetric {
        bands(product.a.dtype(), n)
    } else {
        iter::once(0..n).collect()
    };
    let side = |side: usize| i32::try_from(side).map_err(candle_core::Error::wrap);
    let (columns, inner, count) = (side(m)?, side(k)?, side(batch)?);
    // cuBLAS counts down columns, so that it sees transposes: Dᵀ = Bᵀ Aᵀ.
    let (b_op, b_pitch) = if product.b_transposed {
        (cublasOperation_t::CUBLAS_OP_T, inner)
    } else {
        (cublasOperation_t::CUBLAS_OP_N, columns)
    };
    {
        let (blas, stream) = (device.cublas_handle(), device.cuda_stream());
        let (d, _write) = d.device_ptr_mut(&stream);
        let exact = ExactReductions::on(*blas.handle())?;
        for rows in &bands {
            let computed = if product.is_symmetric { rows.end } else { m };
            let after = |pitch: usize| (rows.start * pitch * size_of::<T>()) as u64;
            // SAFETY: the addresses are of live, contiguous stacks of `Sides`, in `T`, and d shares
            // storage with none of them; a band of A and of d is within its matrix, and so are the first
            // columns of d, or rows of B; the factors are read before the call returns.
            unsafe {
                gemm_strided_batched_ex(
                    exact.handle,
                    b_op,
                    cublasOperation_t::CUBLAS_OP_N,
                    side(computed)?,
                    side(rows.len())?,
                    inner,
                    std::ptr::from_ref(&product.alpha).cast(),
                    b as *const _,
                    T::CUBLAS,
                    b_pitch,
                    (k * m) as i64,
                    (a + after(k)) as *const _,
                    T::CUBLAS,
                    inner,
                    (n * k) as i64,
                    std::ptr::from_ref(&beta).cast(),
                    (d + after(m)) as *mut _,
                    T::CUBLAS,
                    columns,
                    (n * m) as i64,
                    count,
                    cublasComputeType_t::CUBLAS_COMPUTE_32F,
                    cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
                )
            }
            .w()?;
        }
    }
    if bands.len() > 1 {
        mirror(device, &mut d, (batch, n))?;
    }
    Ok(tensor(d, device, (batch, n, m)))
}

/// While it lives, a handle adds the parts of a split sum in f32, not in the dtype of the result.
/// candle shares the handle, and leaves it in the default mode.
struct ExactReductions {
    handle: cublasHandle_t,
}

impl ExactReductions {
    fn on(handle: cublasHandle_t) -> Result<Self> {
        let mode = cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
        // SAFETY: the handle is that of a live device.
        unsafe { cublasSetMathMode(handle, mode) }.result().w()?;
        Ok(Self { handle })
    }
}

impl Drop for ExactReductions {
    fn drop(&mut self) {
        // SAFETY: as above. A handle that could be set can be set back.
        let _ = unsafe { cublasSetMathMode(self.handle, cublasMath_t::CUBLAS_DEFAULT_MATH) };
    }
}
