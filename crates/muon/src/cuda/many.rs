//! Tables of many tensors, as kernels take them that go over all of these in one launch.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};
use cudarc::driver::DeviceRepr;
use half::{bf16, f16};

use super::launch::address;

/// Tensors of a launch: their tables are arguments, of which all together have 4 KiB.
pub(super) const TENSORS: usize = 120;

/// Where tensors begin, and what their dtypes are as kernels number them.
pub(super) struct Tensors {
    pub(super) addresses: [u64; TENSORS],
    pub(super) dtypes: [u32; TENSORS],
}

impl Tensors {
    /// Of contiguous tensors of one device, at most [`TENSORS`].
    pub(super) fn new<'a>(
        device: &CudaDevice,
        tensors: impl Iterator<Item = &'a Tensor>,
    ) -> Result<Self> {
        let mut table = Self {
            addresses: [0; TENSORS],
            dtypes: [0; TENSORS],
        };
        for (i, x) in tensors.enumerate() {
            (table.addresses[i], table.dtypes[i]) = match x.dtype() {
                DType::F32 => (address::<f32>(device, x)?, 0),
                DType::F16 => (address::<f16>(device, x)?, 1),
                DType::BF16 => (address::<bf16>(device, x)?, 2),
                DType::F64 => (address::<f64>(device, x)?, 3),
                other => bail!("expected floating point, got {other:?}"),
            };
        }
        Ok(table)
    }
}

/// How tensors are cut into chunks, each for a block.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Chunks {
    lengths: [u64; TENSORS],
    /// The first block of each, and at `count` the end of all.
    firsts: [u32; TENSORS + 1],
    count: u32,
    /// Elements of a block.
    chunk: u32,
}

const _: () = assert!(
    size_of::<Chunks>() == 12 * TENSORS + 16,
    "as `many.cuh` has it"
);

// SAFETY: it is the `Chunks` of `many.cuh`, and any bits are one.
unsafe impl DeviceRepr for Chunks {}

impl Chunks {
    /// Of tensors with so many elements, at most [`TENSORS`].
    pub(super) fn new(lengths: impl Iterator<Item = usize>, chunk: u32) -> Result<Self> {
        let mut table = Self {
            lengths: [0; TENSORS],
            firsts: [0; TENSORS + 1],
            count: 0,
            chunk,
        };
        for (i, len) in lengths.enumerate() {
            table.lengths[i] = len as u64;
            let end = table.firsts[i] as usize + len.div_ceil(chunk as usize);
            table.firsts[i + 1] = u32::try_from(end).map_err(candle_core::Error::wrap)?;
            table.count += 1;
        }
        Ok(table)
    }

    /// Tensors.
    pub(super) fn count(&self) -> usize {
        self.count as usize
    }

    pub(super) fn blocks(&self) -> usize {
        self.firsts[self.count()] as usize
    }
}
