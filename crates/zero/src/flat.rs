//! Reads and writes of runs of one-dimensional tensors, in place through views.

use candle_core::backend::BackendStorage;
use candle_core::scalar::Scalar;
use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp2, Layout, Result, Tensor};
use polarshard_muon::accumulate;
use polarshard_partition::Span;

/// A new one-dimensional tensor of zeros, empty or not: devices have no empty allocations.
pub(crate) fn zeros(len: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    view(
        &Tensor::zeros(len.max(1), dtype, device)?,
        Span::of_len(0, len),
    )
}

/// The elements of a span, as a view.
pub(crate) fn view(flat: &Tensor, span: Span) -> Result<Tensor> {
    flat.narrow(0, span.start, span.len())
}

/// Writes `values`, cast to the dtype of `flat`, at an offset.
pub(crate) fn write(flat: &Tensor, at: usize, values: &Tensor) -> Result<()> {
    if values.elem_count() == 0 {
        return Ok(());
    }
    let target = view(flat, Span::of_len(at, values.elem_count()))?;
    target.inplace_op2(&values.to_dtype(flat.dtype())?, &Copy)
}

/// Writes `values` of any trained dtype to fp32 elements at an offset.
pub(crate) fn write_f32(flat: &Tensor, at: usize, values: &Tensor) -> Result<()> {
    if values.dtype() == DType::F32 || values.elem_count() == 0 {
        return write(flat, at, values);
    }
    // A sum onto -0 is exact, signs of zeros included. candle's cast would need a copy as well, and stores eight elements
    // a thread one by one.
    view(flat, Span::of_len(at, values.elem_count()))?.const_set(Scalar::F32(-0.0))?;
    add(flat, at, values, 1.0)
}

/// Adds `values`, multiplied with a factor, to fp32 sums at an offset.
pub(crate) fn add(flat: &Tensor, at: usize, values: &Tensor, factor: f64) -> Result<()> {
    if values.elem_count() == 0 {
        return Ok(());
    }
    let sums = view(flat, Span::of_len(at, values.elem_count()))?;
    Ok(accumulate(&sums, values, factor)?)
}

/// Writes zeros.
pub(crate) fn zero(flat: &Tensor, span: Span) -> Result<()> {
    if span.is_empty() {
        return Ok(());
    }
    view(flat, span)?.zero_set()
}

/// The product with a factor, in fp32 with one rounding; the values as they are where the factor is 1.
pub(crate) fn scaled(values: &Tensor, factor: f64) -> Result<Tensor> {
    if factor == 1.0 {
        Ok(values.clone())
    } else {
        values.to_dtype(DType::F32)?.affine(factor, 0.0)
    }
}

/// A contiguous one-dimensional form, outside any graph.
pub(crate) fn one_dimensional(values: &Tensor) -> Result<Tensor> {
    values.detach().contiguous()?.flatten_all()
}

/// The address of a tensor's storage: views and clones share it.
pub(crate) fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

/// Copies elements as a device's memory copies them: candle's `slice_set` has a thread for each, however small.
struct Copy;

impl InplaceOp2 for Copy {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn cpu_fwd(
        &self,
        target: &mut CpuStorage,
        target_layout: &Layout,
        values: &CpuStorage,
        layout: &Layout,
    ) -> Result<()> {
        values.copy_strided_src(target, target_layout.start_offset(), layout)
    }

    fn cuda_fwd(
        &self,
        target: &mut CudaStorage,
        target_layout: &Layout,
        values: &CudaStorage,
        layout: &Layout,
    ) -> Result<()> {
        values.copy_strided_src(target, target_layout.start_offset(), layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_precision_is_widened_to_the_bit() -> Result<()> {
        let values = [0.0f32, -0.0, 1.5, -3.0e-5, f32::INFINITY, 65504.0];
        let target = Tensor::full(f32::NAN, 8, &Device::Cpu)?;
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let half = Tensor::new(&values, &Device::Cpu)?.to_dtype(dtype)?;
            write_f32(&target, 1, &half)?;
            let bits = |x: Tensor| -> Result<Vec<u32>> {
                Ok(x.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
            };
            let written = target.narrow(0, 1, values.len())?;
            assert_eq!(
                bits(written)?,
                bits(half.to_dtype(DType::F32)?)?,
                "{dtype:?}"
            );
        }
        Ok(())
    }
}
