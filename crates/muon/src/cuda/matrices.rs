//! Normalization, transposition, symmetry and diagonals, by `kernels/matrices.cu`.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDevice;
use candle_core::{CudaStorage, DType, Layout, Result, Storage, Tensor, bail};
use cudarc::driver::{CudaSlice, PushKernelArg};

use super::element::{Element, by_dtype};
use super::kernels::Kernels;
use super::launch::{address, blocks, launch, over, tensor, uninitialized, view, view_mut};
use super::survey::{FIELDS, findings};

/// Matrices of a launch.
const MATRICES: usize = 128;
/// A side of a transposed tile.
const TILE: usize = 32;

/// Matrices `wide`, n × m each, and `tall`, m × n each and turned over, as one stack
/// `(wide + tall, n, m)` in `dtype`, each divided by its Frobenius norm. All are contiguous f32 of
/// one device, and at least one element each.
pub(crate) fn normalize(
    device: &CudaDevice,
    wide: &[Tensor],
    tall: &[Tensor],
    (n, m): (usize, usize),
    dtype: DType,
) -> Result<Tensor> {
    by_dtype!(dtype, normalize_to(device, wide, tall, (n, m)))
}

fn normalize_to<T: Element>(
    device: &CudaDevice,
    wide: &[Tensor],
    tall: &[Tensor],
    (n, m): (usize, usize),
) -> Result<Tensor> {
    let elements = n * m;
    let all = [wide, tall].concat();
    let surveys = findings(device, &all)?;
    // SAFETY: the kernels write each element of each matrix.
    let mut stack = unsafe { uninitialized::<T>(device, elements * all.len()) }?;
    let as_they_are = Kernels::Matrices.load(device, &format!("normalize_{}", T::SUFFIX))?;
    let turned = format!("normalize_transposed_{}", T::SUFFIX);
    let turned = Kernels::Matrices.load(device, &turned)?;

    let mut start = 0;
    let parts = wide.chunks(MATRICES).map(|part| (part, false));
    let parts = parts.chain(tall.chunks(MATRICES).map(|part| (part, true)));
    for (part, transposed) in parts {
        let mut addresses = [0u64; MATRICES];
        for (to, x) in addresses.iter_mut().zip(part) {
            *to = address::<f32>(device, x)?;
        }
        let end = start + part.len();
        let found = surveys.slice(FIELDS * start..FIELDS * end);
        let mut out = stack.slice_mut(elements * start..elements * end);
        if transposed {
            let (rows, cols) = (m as u32, n as u32);
            let mut arguments = turned.builder();
            arguments.arg(&addresses).arg(&found).arg(&mut out);
            arguments.arg(&rows).arg(&cols);
            // SAFETY: `normalize_transposed_*(from, surveys, stack, rows, cols)`, with an address of
            // m · n live elements, a finding and a place in the stack for each matrix.
            unsafe { launch(&mut arguments, tiles(m, n, part.len())?) }?;
        } else {
            let len = elements as u64;
            let mut arguments = as_they_are.builder();
            arguments.arg(&addresses).arg(&found).arg(&mut out);
            arguments.arg(&len);
            // SAFETY: `normalize_*(from, surveys, stack, elements)`, in the same way.
            unsafe { launch(&mut arguments, over(elements, part.len())?) }?;
        }
        start = end;
    }
    Ok(tensor(stack, device, (all.len(), n, m)))
}

/// A contiguous stack `(batch, n, m)` as a new one `(batch, m, n)` in f32, each matrix turned over.
pub(crate) fn widen_transposed(stack: &Tensor) -> Result<Tensor> {
    by_dtype!(stack.dtype(), widen_transposed_from(stack))
}

fn widen_transposed_from<T: Element>(stack: &Tensor) -> Result<Tensor> {
    let (batch, n, m) = stack.dims3()?;
    let (storage, layout) = stack.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        bail!("expected a tensor on a CUDA device");
    };
    let device = storage.device();
    let kernel = format!("widen_transposed_{}", T::SUFFIX);
    let kernel = Kernels::Matrices.load(device, &kernel)?;
    let from = view::<T>(storage, layout)?;
    // SAFETY: the kernel writes each element of each matrix.
    let mut out = unsafe { uninitialized::<f32>(device, batch * n * m) }?;
    let (rows, cols) = (n as u32, m as u32);
    let mut arguments = kernel.builder();
    arguments.arg(&from).arg(&mut out).arg(&rows).arg(&cols);
    // SAFETY: `widen_transposed_*(in, out, rows, cols)`, with stacks of batch · n · m elements.
    unsafe { launch(&mut arguments, tiles(n, m, batch)?) }?;
    Ok(tensor(out, device, (batch, m, n)))
}

/// `Z ← Z + a · I` for each matrix of a contiguous stack `(batch, n, n)`.
pub(crate) fn add_to_diagonal(storage: &mut CudaStorage, layout: &Layout, a: f32) -> Result<()> {
    by_dtype!(storage.dtype(), add_to_diagonal_of(storage, layout, a))
}

fn add_to_diagonal_of<T: Element>(
    storage: &mut CudaStorage,
    layout: &Layout,
    a: f32,
) -> Result<()> {
    let (batch, n, columns) = layout.shape().dims3()?;
    if n != columns {
        bail!("expected square matrices, got {n} x {columns}");
    }
    let device = storage.device().clone();
    let kernel = format!("add_to_diagonal_{}", T::SUFFIX);
    let kernel = Kernels::Matrices.load(&device, &kernel)?;
    let mut z = view_mut::<T>(storage, layout)?;
    let (side, rows) = (n as u32, (batch * n) as u64);
    let mut arguments = kernel.builder();
    arguments.arg(&mut z).arg(&a).arg(&side).arg(&rows);
    // SAFETY: `add_to_diagonal_*(z, a, n, rows)`, with `rows` rows of n elements.
    unsafe { launch(&mut arguments, over(batch * n, 1)?) }
}

/// Makes each n × n matrix of a stack symmetric: above the diagonal it gets what is below.
pub(super) fn mirror<T: Element>(
    device: &CudaDevice,
    stack: &mut CudaSlice<T>,
    (batch, n): (usize, usize),
) -> Result<()> {
    let kernel = format!("mirror_{}", T::SUFFIX);
    let kernel = Kernels::Matrices.load(device, &kernel)?;
    let side = n as u32;
    let mut arguments = kernel.builder();
    arguments.arg(stack).arg(&side);
    // SAFETY: `mirror_*(stack, n)`, with a stack of batch · n · n elements.
    unsafe { launch(&mut arguments, tiles(n, n, batch)?) }
}

/// Blocks for the tiles of each matrix.
fn tiles(rows: usize, cols: usize, batch: usize) -> Result<cudarc::driver::LaunchConfig> {
    blocks(rows.div_ceil(TILE) * cols.div_ceil(TILE), batch)
}
