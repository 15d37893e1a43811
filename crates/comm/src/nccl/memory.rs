//! Where the elements of a buffer are: in a tensor on the device, or in a copy of one of the host.

use std::sync::Arc;

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CpuStorage, Device, Result, Storage, Tensor};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError};
use cudarc::nccl::sys::ncclDataType_t;

use super::raw::Memory;

/// A copy on the device of a buffer that lies on the host.
#[derive(Debug)]
pub(super) struct Staged {
    slice: CudaStorageSlice,
    stream: Arc<CudaStream>,
}

impl Staged {
    /// Copies a flat, contiguous, non-empty buffer of the host, on a stream with nothing else on it:
    /// such copies may wait for what is.
    pub(super) fn new(buffer: &Tensor, stream: &Arc<CudaStream>) -> Result<Self> {
        let (storage, layout) = buffer.storage_and_layout();
        let range = layout.start_offset()..layout.start_offset() + buffer.elem_count();
        let up = |e: DriverError| candle_core::Error::wrap(e);
        let Storage::Cpu(storage) = &*storage else {
            candle_core::bail!("a buffer of {:?} is not staged", buffer.device().location());
        };
        use CudaStorageSlice as Slice;
        let slice = match storage {
            CpuStorage::F16(all) => Slice::F16(stream.clone_htod(&all[range]).map_err(up)?),
            CpuStorage::BF16(all) => Slice::BF16(stream.clone_htod(&all[range]).map_err(up)?),
            CpuStorage::F32(all) => Slice::F32(stream.clone_htod(&all[range]).map_err(up)?),
            CpuStorage::F64(all) => Slice::F64(stream.clone_htod(&all[range]).map_err(up)?),
            _ => candle_core::bail!("a buffer of {:?} does not travel", buffer.dtype()),
        };
        Ok(Self {
            slice,
            stream: Arc::clone(stream),
        })
    }

    /// Where the copy is.
    pub(super) fn memory(&self) -> Result<Memory> {
        memory(&self.slice, 0)
    }

    /// Writes the copy back, when nothing works on it any more.
    pub(super) fn write_back(&self, buffer: &Tensor) -> Result<()> {
        let down = |e: DriverError| candle_core::Error::wrap(e);
        let (len, cpu) = (buffer.elem_count(), &Device::Cpu);
        use CudaStorageSlice as Slice;
        let values = match &self.slice {
            Slice::F16(s) => Tensor::from_vec(self.stream.clone_dtoh(s).map_err(down)?, len, cpu)?,
            Slice::BF16(s) => Tensor::from_vec(self.stream.clone_dtoh(s).map_err(down)?, len, cpu)?,
            Slice::F32(s) => Tensor::from_vec(self.stream.clone_dtoh(s).map_err(down)?, len, cpu)?,
            Slice::F64(s) => Tensor::from_vec(self.stream.clone_dtoh(s).map_err(down)?, len, cpu)?,
            _ => candle_core::bail!("a buffer of {:?} does not travel", buffer.dtype()),
        };
        buffer.detach().slice_set(&values, 0, 0)
    }
}

/// Where a flat, contiguous buffer of the device begins. The storage is locked for this moment only.
pub(super) fn of_tensor(buffer: &Tensor) -> Result<Memory> {
    let (storage, layout) = buffer.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => memory(&storage.slice, layout.start_offset()),
        _ => candle_core::bail!("no buffer of a CUDA device"),
    }
}

fn memory(slice: &CudaStorageSlice, offset: usize) -> Result<Memory> {
    use ncclDataType_t as Type;
    Ok(match slice {
        CudaStorageSlice::F16(s) => begin(s, offset, Type::ncclFloat16),
        CudaStorageSlice::BF16(s) => begin(s, offset, Type::ncclBfloat16),
        CudaStorageSlice::F32(s) => begin(s, offset, Type::ncclFloat32),
        CudaStorageSlice::F64(s) => begin(s, offset, Type::ncclFloat64),
        _ => candle_core::bail!("a buffer of a dtype that does not travel"),
    })
}

fn begin<T: DeviceRepr>(slice: &CudaSlice<T>, offset: usize, dtype: ncclDataType_t) -> Memory {
    let bytes = size_of::<T>();
    // The streams join each other explicitly; what cudarc records here by itself does no harm.
    let (base, _record) = slice.device_ptr(slice.stream());
    Memory {
        base: base + (offset * bytes) as u64,
        dtype,
        bytes,
    }
}
