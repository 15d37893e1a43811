//! Reads and writes of runs of one-dimensional tensors, in place through views.

use candle_core::{DType, Device, Result, Tensor};
use polarshard_muon as muon;
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

/// What is written where.
pub(crate) struct Write<'a> {
    pub(crate) flat: &'a Tensor,
    pub(crate) at: usize,
    pub(crate) values: Tensor,
}

/// Writes `values`, cast to the dtype of `flat`, at an offset.
pub(crate) fn write(flat: &Tensor, at: usize, values: &Tensor) -> Result<()> {
    write_all(&[Write {
        flat,
        at,
        values: values.clone(),
    }])
}

/// The same of many at once: a device does many in one launch.
pub(crate) fn write_all(writes: &[Write<'_>]) -> Result<()> {
    let place = |write: &Write<'_>| {
        let span = Span::of_len(write.at, write.values.elem_count());
        view(write.flat, span)
    };
    let targets = writes.iter().map(place).collect::<Result<Vec<_>>>()?;
    let values = writes.iter().map(|write| &write.values);
    let copies: Vec<_> = targets.iter().zip(values).collect();
    Ok(muon::copy_all(&copies)?)
}

/// Adds `values`, multiplied with a factor, to fp32 sums at an offset.
pub(crate) fn add(flat: &Tensor, at: usize, values: &Tensor, factor: f64) -> Result<()> {
    if values.elem_count() == 0 {
        return Ok(());
    }
    let sums = view(flat, Span::of_len(at, values.elem_count()))?;
    Ok(muon::accumulate(&sums, values, factor)?)
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

/// Bytes of the elements.
pub(crate) fn bytes(flat: &Tensor) -> usize {
    flat.elem_count() * flat.dtype().size_in_bytes()
}

/// The address of a tensor's storage: views and clones share it.
pub(crate) fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}
