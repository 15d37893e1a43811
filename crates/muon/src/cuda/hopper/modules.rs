//! The cubins of `kernels/hopper/*.cu`, and how their kernels are launched.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};
use cudarc::driver::sys::{
    CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchConfig, cuLaunchKernelEx,
};
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, LaunchConfig};
use cudarc::nvrtc::Ptx;

use crate::hopper::tiles::Width;

/// Threads of a block of `products.cu`: two warpgroups that compute and one that loads.
const PRODUCT_THREADS: u32 = 384;

macro_rules! cubin {
    ($name:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".cubin"))
    };
}

/// The kernels, loaded on a device.
pub(super) struct Modules {
    products: Arc<CudaModule>,
    normalize: Arc<CudaModule>,
}

impl Modules {
    pub(super) fn load(device: &CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        let load = |cubin: &[u8]| {
            let image = Ptx::from_binary(cubin.to_vec());
            stream.context().load_module(image).w()
        };
        Ok(Self {
            products: load(cubin!("products"))?,
            normalize: load(cubin!("normalize"))?,
        })
    }

    /// The kernel of `products.cu` for tiles of at most so many columns, and its launch by so many
    /// clusters.
    pub(super) fn product(
        &self,
        dtype: DType,
        columns: usize,
        clusters: usize,
    ) -> Result<(CudaFunction, Grid)> {
        let name = format!("newton_schulz_iterate_{}_{columns}", dtype.as_str());
        let function = self.products.load_function(&name).w()?;
        let shared_bytes = match columns {
            256 => 230_464,
            128 => 230_496,
            _ => 230_528,
        };
        let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(most, shared_bytes as i32).w()?;
        let grid = Grid {
            blocks: (2 * clusters as u32, 1),
            threads: PRODUCT_THREADS,
            shared_bytes,
        };
        Ok((function, grid))
    }

    /// Clusters of any kernel of `products.cu` that run at once.
    pub(super) fn clusters(&self, device: &CudaDevice) -> Result<usize> {
        let stream = device.cuda_stream();
        let mut least = usize::MAX;
        for columns in Width::ALL.map(Width::kernel) {
            let (function, grid) = self.product(DType::F16, columns, 1)?;
            let config = LaunchConfig {
                grid_dim: (grid.blocks.0, grid.blocks.1, 1),
                block_dim: (grid.threads, 1, 1),
                shared_mem_bytes: grid.shared_bytes,
            };
            let clusters = function.occupancy_max_active_clusters(config, &stream);
            least = least.min(clusters.w()? as usize);
        }
        Ok(least)
    }

    /// A kernel of `normalize.cu`.
    pub(super) fn edge(&self, name: &str) -> Result<CudaFunction> {
        self.normalize.load_function(name).w()
    }
}

/// The size of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: (u32, u32),
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
}

/// A reference as a kernel's argument.
pub(super) fn argument<T: Copy>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Puts a kernel on a stream, allowed to start before the one ahead of it has ended.
///
/// # Safety
/// The arguments are those of the kernel, in number, order and type; it stays within the memory that
/// they are of, and waits for its predecessors before it touches what they write. The stream's
/// context is bound to the thread.
pub(super) unsafe fn launch(
    stream: &CudaStream,
    function: &CudaFunction,
    grid: Grid,
    arguments: &mut [*mut c_void],
) -> Result<()> {
    // SAFETY: as the caller promises.
    unsafe { launch_with(&mut [early()], stream, function, grid, arguments) }
}

/// The same, where all blocks run at once, so that they may wait for each other.
///
/// # Safety
/// As [`launch`].
pub(super) unsafe fn launch_together(
    stream: &CudaStream,
    function: &CudaFunction,
    grid: Grid,
    arguments: &mut [*mut c_void],
) -> Result<()> {
    let mut together = attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
    together.value.cooperative = 1;
    let mut attributes = [together, early()];
    // SAFETY: as the caller promises.
    unsafe { launch_with(&mut attributes, stream, function, grid, arguments) }
}

fn early() -> CUlaunchAttribute {
    let mut early =
        attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
    early.value.programmaticStreamSerializationAllowed = 1;
    early
}

fn attribute(id: CUlaunchAttributeID) -> CUlaunchAttribute {
    CUlaunchAttribute {
        id,
        pad: [0; 4],
        value: CUlaunchAttributeValue { pad: [0; 64] },
    }
}

/// # Safety
/// As [`launch`].
unsafe fn launch_with(
    attributes: &mut [CUlaunchAttribute],
    stream: &CudaStream,
    function: &CudaFunction,
    grid: Grid,
    arguments: &mut [*mut c_void],
) -> Result<()> {
    let config = CUlaunchConfig {
        gridDimX: grid.blocks.0,
        gridDimY: grid.blocks.1,
        gridDimZ: 1,
        blockDimX: grid.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: grid.shared_bytes,
        hStream: stream.cu_stream(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    };
    // SAFETY: as the caller promises; the configuration and the arguments are read before the call
    // returns.
    let launched = unsafe {
        cuLaunchKernelEx(
            &raw const config,
            function.cu_function(),
            arguments.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    };
    launched.result().w()
}
