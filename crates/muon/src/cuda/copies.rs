//! Copies of many tensors at once, by `kernels/copies.cu`.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};
use cudarc::driver::PushKernelArg;

use super::kernels::Kernels;
use super::launch::{blocks, launch};
use super::many::{Chunks, TENSORS, Tensors};

/// Elements of a block.
const CHUNK: u32 = 1 << 13;
/// Dtypes that are copied: f32, f16 and bf16.
const DTYPES: u32 = 3;

/// Writes values over those of their targets, cast to their dtypes; all on one device.
pub(crate) fn copy_all(device: &CudaDevice, copies: &[(&Tensor, &Tensor)]) -> Result<()> {
    let kernel = Kernels::Copies.load(device, "copies")?;
    for copies in copies.chunks(TENSORS) {
        let targets = Tensors::new(device, copies.iter().map(|(target, _)| *target))?;
        let values = Tensors::new(device, copies.iter().map(|(_, values)| *values))?;
        let lengths = copies.iter().map(|(target, _)| target.elem_count());
        let chunks = Chunks::new(lengths, CHUNK)?;
        let mut dtypes = values.dtypes;
        for (dtype, target) in dtypes.iter_mut().zip(targets.dtypes) {
            *dtype += DTYPES * target;
        }
        let mut arguments = kernel.builder();
        arguments
            .arg(&targets.addresses)
            .arg(&values.addresses)
            .arg(&dtypes)
            .arg(&chunks);
        // SAFETY: `copies(targets, values, dtypes, chunks)`, with arrays of the sizes of `many.cuh`; the
        // addresses are of live tensors of these lengths and dtypes, and what is written is read by no
        // copy of the call and written by no other one (`check_written`).
        unsafe { launch(&mut arguments, blocks(chunks.blocks(), 1)?) }?;
    }
    Ok(())
}
