//! Copies of many tensors in one operation, each cast to the dtype of its target.

#[cfg(feature = "cuda")]
use candle_core::Device;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, InplaceOp2, Layout, Result as CandleResult, Tensor};

use super::operands::{check_devices, check_floats, check_places, check_written};
use crate::Error;
#[cfg(feature = "cuda")]
use crate::cuda;

/// Writes values over those of their targets, `(target, values)`, each cast to the dtype of its target: bit by bit
/// where it is their own, else to the nearest, ties to even. A device does up to 120 in one launch.
///
/// Tensors are contiguous and of dtype f32, f16 or bf16.
///
/// # Errors
/// For a target or values of another dtype or not contiguous, values of another length or on another device than their
/// target, all or some of a buffer that is both read and written, and targets that overlap; nothing is written then.
pub fn copy_all(copies: &[(&Tensor, &Tensor)]) -> Result<(), Error> {
    check_copies(copies)?;
    for on_one_device in copies.chunk_by(|(a, _), (b, _)| a.device().same_device(b.device())) {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = on_one_device[0].0.device() {
            cuda::copy_all(device, on_one_device)?;
            continue;
        }
        for (target, values) in on_one_device {
            target.inplace_op2(values, &CopyOp)?;
        }
    }
    Ok(())
}

fn check_copies(copies: &[(&Tensor, &Tensor)]) -> Result<(), Error> {
    for &(target, values) in copies {
        let operands = [("the target", target), ("the values", values)];
        check_floats(&operands)?;
        check_places(&operands)?;
        check_devices(&operands, "copy")?;
    }
    check_written(copies, ["the targets", "the values"])
}

struct CopyOp;

impl InplaceOp2 for CopyOp {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn cpu_fwd(
        &self,
        target: &mut CpuStorage,
        layout: &Layout,
        values: &CpuStorage,
        values_layout: &Layout,
    ) -> CandleResult<()> {
        if values.dtype() == target.dtype() {
            return values.copy_strided_src(target, layout.start_offset(), values_layout);
        }
        let cast = values.to_dtype(values_layout, target.dtype())?;
        let all = Layout::contiguous(values_layout.shape());
        cast.copy_strided_src(target, layout.start_offset(), &all)
    }
}
