//! Where the elements of a buffer are: in a tensor on the device, or in a copy of one of the host.

use std::sync::Arc;

use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{CpuStorage, Device, Result, Storage, Tensor};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use cudarc::nccl::sys::ncclDataType_t;

use super::raw::Memory;

/// Brings buffers that lie on the host to the device and back. It keeps the memory of those that are back for the next, so
/// that a step allocates nothing.
#[derive(Debug)]
pub(super) struct Stage {
    /// With nothing else on it: copies from and to the host may wait for what is.
    stream: Arc<CudaStream>,
    spare: Vec<CudaStorageSlice>,
}

/// A copy on the device of a buffer that lies on the host.
#[derive(Debug)]
pub(super) struct Staged(CudaStorageSlice);

impl Stage {
    pub(super) fn new(stream: Arc<CudaStream>) -> Self {
        let spare = Vec::new();
        Self { stream, spare }
    }

    /// What a copy is there after.
    pub(super) fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Copies a flat, contiguous, non-empty buffer of the host.
    pub(super) fn up(&mut self, buffer: &Tensor) -> Result<Staged> {
        let (storage, layout) = buffer.storage_and_layout();
        let range = layout.start_offset()..layout.start_offset() + buffer.elem_count();
        let Storage::Cpu(storage) = &*storage else {
            candle_core::bail!("a buffer of {:?} is not staged", buffer.device().location());
        };
        macro_rules! up {
            ($variant:ident, $all:expr) => {{
                let fits = |slice: &CudaStorageSlice| {
                    matches!(slice, CudaStorageSlice::$variant(s) if s.len() >= range.len())
                };
                let place = self.spare.iter().position(fits);
                let mut slice = match place.map(|place| self.spare.swap_remove(place)) {
                    Some(CudaStorageSlice::$variant(slice)) => slice,
                    _ => self.stream.alloc_zeros(range.len()).w()?,
                };
                self.stream.memcpy_htod(&$all[range], &mut slice).w()?;
                CudaStorageSlice::$variant(slice)
            }};
        }
        Ok(Staged(match storage {
            CpuStorage::F16(all) => up!(F16, all),
            CpuStorage::BF16(all) => up!(BF16, all),
            CpuStorage::F32(all) => up!(F32, all),
            CpuStorage::F64(all) => up!(F64, all),
            _ => candle_core::bail!("a buffer of {:?} does not travel", buffer.dtype()),
        }))
    }

    /// Writes a copy back to its buffer, when nothing works on it any more.
    pub(super) fn down(&mut self, staged: Staged, buffer: &Tensor) -> Result<()> {
        let len = buffer.elem_count();
        macro_rules! down {
            ($slice:expr) => {{
                let values = self.stream.clone_dtoh(&$slice.slice(..len)).w()?;
                Tensor::from_vec(values, len, &Device::Cpu)?
            }};
        }
        let values = match &staged.0 {
            CudaStorageSlice::F16(slice) => down!(slice),
            CudaStorageSlice::BF16(slice) => down!(slice),
            CudaStorageSlice::F32(slice) => down!(slice),
            CudaStorageSlice::F64(slice) => down!(slice),
            _ => candle_core::bail!("a buffer of {:?} does not travel", buffer.dtype()),
        };
        self.spare.push(staged.0);
        buffer.detach().slice_set(&values, 0, 0)
    }
}

impl Staged {
    /// Where the copy is.
    pub(super) fn memory(&self) -> Result<Memory> {
        memory(&self.0, 0)
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
