//! From candle's storages to kernel arguments, and launches.

use candle_core::cuda_backend::{CudaDType, CudaDevice, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, Layout, Result, Shape, Storage, Tensor, bail};
use cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DevicePtr, DeviceRepr, LaunchArgs, LaunchConfig,
};

/// Threads of a block, as `kernels/many.cuh` has it.
const THREADS: usize = 256;
/// Elements of a thread, as `kernels/numbers.cuh` has it.
const A_THREAD: usize = 4;

/// The elements of a contiguous layout.
pub(super) fn view<'a, T: CudaDType>(
    storage: &'a CudaStorage,
    layout: &Layout,
) -> Result<CudaView<'a, T>> {
    let (start, end) = offsets(layout)?;
    Ok(storage.as_cuda_slice::<T>()?.slice(start..end))
}

/// The elements of a contiguous layout, to be written.
pub(super) fn view_mut<'a, T: CudaDType>(
    storage: &'a mut CudaStorage,
    layout: &Layout,
) -> Result<CudaViewMut<'a, T>> {
    let (start, end) = offsets(layout)?;
    Ok(storage.as_cuda_slice_mut::<T>()?.slice_mut(start..end))
}

/// Where a contiguous tensor begins on a device. It stands for as long as the tensor does. cudarc is told of a read, and
/// before the launch: what comes before and after is ordered by the device's one stream alone.
pub(super) fn address<T: CudaDType>(device: &CudaDevice, x: &Tensor) -> Result<u64> {
    let (storage, layout) = x.storage_and_layout();
    let storage = match &*storage {
        Storage::Cuda(storage) if storage.device.id() == device.id() => storage,
        other => bail!(
            "expected a tensor on {device:?}, got one on {:?}",
            other.device()
        ),
    };
    let stream = device.cuda_stream();
    let elements = view::<T>(storage, layout)?;
    let (address, _read) = elements.device_ptr(&stream);
    Ok(address)
}

/// A new slice of any values.
///
/// # Safety
/// Every element is written before it is read.
pub(super) unsafe fn uninitialized<T: DeviceRepr>(
    device: &CudaDevice,
    len: usize,
) -> Result<CudaSlice<T>> {
    // SAFETY: as the caller promises. There are no empty allocations on a device.
    unsafe { device.alloc(len.max(1)) }
}

/// A slice as a tensor.
pub(super) fn tensor<T: CudaDType>(
    slice: CudaSlice<T>,
    device: &CudaDevice,
    shape: impl Into<Shape>,
) -> Tensor {
    let storage = CudaStorage::wrap_cuda_slice(slice, device.clone());
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

/// Blocks for kernels that go over so many elements, for each of `batch` rows of blocks.
pub(super) fn over(elements: usize, batch: usize) -> Result<LaunchConfig> {
    blocks(elements.div_ceil(THREADS * A_THREAD), batch)
}

/// So many blocks, for each of `batch` rows of blocks.
pub(super) fn blocks(count: usize, batch: usize) -> Result<LaunchConfig> {
    // The greatest grid of all devices.
    if count > i32::MAX as usize || batch > usize::from(u16::MAX) {
        bail!("{count} x {batch} blocks are too many for one launch");
    }
    Ok(LaunchConfig {
        grid_dim: (count as u32, batch as u32, 1),
        block_dim: (THREADS as u32, 1, 1),
        shared_mem_bytes: 0,
    })
}

/// Puts a kernel on its device's stream. Over nothing, nothing happens.
///
/// # Safety
/// The arguments are those of the kernel, in number, order and type, and it stays within the slices
/// that they are of.
pub(super) unsafe fn launch(arguments: &mut LaunchArgs<'_>, grid: LaunchConfig) -> Result<()> {
    if grid.grid_dim.0 > 0 && grid.grid_dim.1 > 0 {
        // SAFETY: as the caller promises.
        unsafe { arguments.launch(grid) }.w()?;
    }
    Ok(())
}

fn offsets(layout: &Layout) -> Result<(usize, usize)> {
    match layout.contiguous_offsets() {
        Some(offsets) => Ok(offsets),
        None => bail!("expected a contiguous layout, got {layout:?}"),
    }
}
