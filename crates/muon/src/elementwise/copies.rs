//! The operations that change no value, on a CPU and on a CUDA device.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, InplaceOp2, Layout, Result as CandleResult};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, DType, scalar::Scalar};

use super::ops::with_floats;
#[cfg(feature = "cuda")]
use crate::cuda;

pub(super) struct CopyOp;

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
        values.copy_strided_src(target, layout.start_offset(), values_layout)
    }

    /// As the device's memory copies: candle's `slice_set` has a thread for each element, however small.
    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        target: &mut CudaStorage,
        layout: &Layout,
        values: &CudaStorage,
        values_layout: &Layout,
    ) -> CandleResult<()> {
        values.copy_strided_src(target, layout.start_offset(), values_layout)
    }
}

pub(super) struct WidenOp;

impl InplaceOp2 for WidenOp {
    fn name(&self) -> &'static str {
        "widen"
    }

    fn cpu_fwd(
        &self,
        target: &mut CpuStorage,
        layout: &Layout,
        values: &CpuStorage,
        values_layout: &Layout,
    ) -> CandleResult<()> {
        with_floats((target, layout), (values, values_layout), |t, x| *t = x)
    }

    /// Half precision is summed onto -0, which is exact, signs of zeros included: candle's cast would
    /// need a copy as well, and stores eight elements a thread one by one.
    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        target: &mut CudaStorage,
        layout: &Layout,
        values: &CudaStorage,
        values_layout: &Layout,
    ) -> CandleResult<()> {
        if values.dtype() == DType::F32 {
            return CopyOp.cuda_fwd(target, layout, values, values_layout);
        }
        // Nothing cannot be launched over.
        if layout.shape().elem_count() > 0 {
            target.const_set(Scalar::F32(-0.0), layout)?;
        }
        cuda::accumulate((target, layout), (values, values_layout), 1.0)
    }
}
