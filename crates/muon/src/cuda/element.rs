//! The dtypes that kernels and products are made for.

use candle_core::cuda_backend::CudaDType;
use cudarc::cublas::sys::cudaDataType_t;
use cudarc::driver::DeviceRepr;

/// A dtype of matrices on a device.
pub(super) trait Element: CudaDType + DeviceRepr {
    /// The ending of its kernels' names.
    const SUFFIX: &'static str;
    /// Its name in cuBLAS.
    const CUBLAS: cudaDataType_t;
}

impl Element for f32 {
    const SUFFIX: &'static str = "f32";
    const CUBLAS: cudaDataType_t = cudaDataType_t::CUDA_R_32F;
}

impl Element for half::f16 {
    const SUFFIX: &'static str = "f16";
    const CUBLAS: cudaDataType_t = cudaDataType_t::CUDA_R_16F;
}

impl Element for half::bf16 {
    const SUFFIX: &'static str = "bf16";
    const CUBLAS: cudaDataType_t = cudaDataType_t::CUDA_R_16BF;
}

/// Calls a function that is generic over [`Element`] by a dtype.
macro_rules! by_dtype {
    ($dtype:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $dtype {
            candle_core::DType::F32 => $function::<f32>($($argument),*),
            candle_core::DType::F16 => $function::<half::f16>($($argument),*),
            candle_core::DType::BF16 => $function::<half::bf16>($($argument),*),
            other => candle_core::bail!("expected f32, f16 or bf16, got {other:?}"),
        }
    };
}

pub(super) use by_dtype;
