//! The cubins of `kernels/hopper/*.cu`.

use std::sync::Arc;

use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};
use cudarc::driver::sys::{CUdevice_attribute, CUfunction_attribute};
use cudarc::driver::{CudaFunction, CudaModule, LaunchConfig};
use cudarc::nvrtc::Ptx;

use super::kernel::Grid;
use crate::hopper::schedule::Stage;

/// Threads of a block of `products.cu`, as `kernels/hopper/ring.cuh` has them: two warpgroups that compute
/// and one that loads.
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

    /// The kernel of `products.cu` for tiles of which a stage holds the blocks, and its launch by so many
    /// clusters, at once or not.
    pub(super) fn product(
        &self,
        dtype: DType,
        stage: Stage,
        clusters: usize,
        together: bool,
    ) -> Result<(CudaFunction, Grid)> {
        let name = format!(
            "newton_schulz_iterate_{}_{}",
            dtype.as_str(),
            stage.blocks()
        );
        let function = self.products.load_function(&name).w()?;
        let shared_bytes = match stage {
            Stage::Of6 => 230_464,
            Stage::Of4 => 230_496,
            Stage::Of3 => 230_528,
        };
        let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(most, shared_bytes as i32).w()?;
        let grid = Grid {
            blocks: (2 * clusters as u32, 1),
            threads: PRODUCT_THREADS,
            shared_bytes,
            together,
        };
        Ok((function, grid))
    }

    /// Clusters of any kernel of `products.cu` that run at once.
    pub(super) fn clusters(&self, device: &CudaDevice) -> Result<usize> {
        let stream = device.cuda_stream();
        let mut least = usize::MAX;
        for stage in Stage::ALL {
            let (function, grid) = self.product(DType::F16, stage, 1, true)?;
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

/// Blocks of so many threads of a kernel that run at once.
pub(super) fn blocks_at_once(
    device: &CudaDevice,
    function: &CudaFunction,
    threads: usize,
) -> Result<usize> {
    let multiprocessors = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let multiprocessors = device
        .cuda_stream()
        .context()
        .attribute(multiprocessors)
        .w()?;
    let of_one = function
        .occupancy_max_active_blocks_per_multiprocessor(threads as u32, 0, None)
        .w()?;
    Ok(multiprocessors as usize * of_one as usize)
}
