//! The kernels of `kernels/*.cu`, as PTX.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::CudaDevice;
use cudarc::driver::{CudaFunction, CudaStream, LaunchArgs};

/// A file of kernels.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kernels {
    Copies,
    Elementwise,
    Matrices,
    Survey,
}

macro_rules! ptx {
    ($name:literal) => {
        include_str!(concat!(env!("OUT_DIR"), "/", $name, ".ptx"))
    };
}

impl Kernels {
    /// A kernel by name. The first use on a device translates the whole file for it.
    pub(super) fn load(self, device: &CudaDevice, kernel: &str) -> Result<Kernel> {
        let (module, ptx) = match self {
            Self::Copies => ("polarshard-copies", ptx!("copies")),
            Self::Elementwise => ("polarshard-elementwise", ptx!("elementwise")),
            Self::Matrices => ("polarshard-matrices", ptx!("matrices")),
            Self::Survey => ("polarshard-survey", ptx!("survey")),
        };
        let function = device.get_or_load_custom_func(kernel, module, ptx)?;
        Ok(Kernel {
            function: function.into_cuda_function(),
            stream: device.cuda_stream(),
        })
    }
}

/// A kernel and the stream that it will be put on.
pub(super) struct Kernel {
    function: CudaFunction,
    stream: Arc<CudaStream>,
}

impl Kernel {
    /// A launch without arguments yet.
    pub(super) fn builder(&self) -> LaunchArgs<'_> {
        self.stream.launch_builder(&self.function)
    }
}
