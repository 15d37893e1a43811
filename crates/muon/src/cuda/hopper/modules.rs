//! The cubins of `kernels/hopper/*.cu`.

use std::sync::Arc;

use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};
use cudarc::driver::sys::CUfunction_attribute;
use cudarc::driver::{CudaFunction, CudaModule, LaunchConfig};
use cudarc::nvrtc::Ptx;

use super::kernel::Grid;
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
            together: false,
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
