//! Devices on which streams can be ordered.

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::{Device, Result};
use cudarc::driver::{CudaContext, CudaStream, result, sys};

use crate::SetupError;

/// The device `ordinal`, made as [`Nccl`](super::Nccl) needs it; make it once a process.
///
/// - It works on a stream of its own. `Device::new_cuda` takes a stream that is another one in every
///   thread of the host, and nothing can be ordered after that.
/// - Events that cudarc would record at every use of every tensor are off: they cost time and do not
///   protect candle's tensors, most of whose writes they miss. The streams of this crate wait for each
///   other by events of their own.
/// - Memory that is freed stays with the process for the next allocation, rather than going back to
///   the driver at every synchronization.
///
/// # Errors
/// candle's, if there is no such device.
pub fn device(ordinal: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(ordinal)?;
    let cuda = device.as_cuda_device()?;
    // SAFETY: all that candle does on the device is on its one stream. The only other streams are
    // those of `Nccl`, which join it around each request and keep its buffers alive meanwhile.
    unsafe { cuda.disable_event_tracking() };
    let stream = cuda.cuda_stream();
    let context = stream.context();
    if context.has_async_alloc() {
        let mut threshold = u64::MAX;
        // SAFETY: the device is valid as long as its context; the attribute is one 64-bit number.
        unsafe {
            let pool = result::device::get_default_mem_pool(context.cu_device()).w()?;
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            let value = std::ptr::from_mut(&mut threshold).cast();
            result::mem_pool::set_attribute(pool, attribute, value).w()?;
        }
    }
    Ok(device)
}

/// How many devices this process sees.
///
/// # Errors
/// candle's, if the driver cannot be asked.
pub fn device_count() -> Result<usize> {
    let count = CudaContext::device_count().w()?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// The stream on which candle works, if it is one that others can wait for.
pub(super) fn stream_of(device: &Device) -> std::result::Result<Arc<CudaStream>, SetupError> {
    let cuda = device.as_cuda_device().map_err(|_| {
        SetupError::Device(format!(
            "NCCL needs a CUDA device, not {:?}",
            device.location()
        ))
    })?;
    let stream = cuda.cuda_stream();
    // Null and 2 stand for streams that other libraries use, or other threads do not.
    if (stream.cu_stream() as usize) <= 2 {
        return Err(SetupError::Device(
            "the device works on a default stream, as one of `Device::new_cuda` does; make it with \
             `nccl::device`"
                .to_owned(),
        ));
    }
    Ok(stream)
}
