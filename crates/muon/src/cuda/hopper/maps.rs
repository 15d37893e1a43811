//! Tensor maps: how the copy engine sees a stack of matrices.

use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Result, bail};
use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle, cuTensorMapEncodeTiled,
};

use crate::hopper::workspace::Batch;

/// A stack of matrices on a device, with a pitch of [`Batch::pitch`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Stack {
    /// A multiple of 16.
    pub(super) address: u64,
    pub(super) count: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl Stack {
    /// From the `first`-th matrix on.
    pub(super) fn skip(self, first: usize) -> Self {
        Self {
            address: self.address + (first * self.matrix_bytes()) as u64,
            count: self.count - first,
            ..self
        }
    }

    pub(super) fn take(self, count: usize) -> Self {
        Self { count, ..self }
    }

    pub(super) fn matrix_bytes(self) -> usize {
        self.rows * Batch::pitch(self.cols) * 2
    }

    /// (columns, rows, matrices) in boxes of 64 × 64 × 1 with the 128-byte swizzle; what lies outside
    /// is read as zeros.
    pub(super) fn map(self, dtype: DType) -> Result<CUtensorMap> {
        let element = match dtype {
            DType::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            DType::BF16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            other => bail!("expected f16 or bf16, got {other:?}"),
        };
        let sizes = [self.cols, self.rows, self.count].map(|size| size as u64);
        let strides = [Batch::pitch(self.cols) * 2, self.matrix_bytes()].map(|bytes| bytes as u64);
        let mut map = CUtensorMap { opaque: [0; 16] };
        // SAFETY: all arrays have the length that three dimensions ask for, and are read before the
        // call returns. The address is only stored.
        let encoded = unsafe {
            cuTensorMapEncodeTiled(
                &raw mut map,
                element,
                3,
                self.address as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                [64, 64, 1].as_ptr(),
                [1, 1, 1].as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        encoded.result().w()?;
        Ok(map)
    }
}
