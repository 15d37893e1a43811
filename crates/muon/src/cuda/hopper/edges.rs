//! What comes before the products and after them: normalization into a stack with a pitch, and a
//! stack without its padding.

use std::rc::Rc;

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};
use cudarc::driver::{CudaFunction, CudaSlice};
use half::f16;

use super::iterate::{Counts, start};
use super::kernel::{Grid, Kernel};
use super::maps::Stack;
use super::modules::{Modules, blocks_at_once};
use crate::cuda::element::by_dtype;
use crate::cuda::launch::address;
use crate::hopper::workspace::Batch;

/// Threads of a block, and elements of a vector, as `kernels/hopper/normalize.cu` has them.
const THREADS: usize = 256;
const VECTOR: usize = 8;
/// Vectors that a thread holds while it measures them.
const MEASURED: usize = 8;
/// Matrices of a launch that takes their addresses.
const MATRICES: usize = 128;
/// Bytes of matrices that are measured and then divided before the next ones are: they stay in the L2.
const GROUP: usize = 48 << 20;
/// Matrices of a launch that takes a stack.
const MOST_OF_A_STACK: usize = 1 << 15;
/// Blocks that keep the memory of an H200 busy: of one matrix alone, and of all.
const MOST_BLOCKS: usize = 1056;
const MOST_BLOCKS_OF_ALL: usize = 2112;
/// A side of the tiles by which a matrix is transposed.
const TILE: usize = 64;

/// The dtypes that matrices are read in.
const INPUTS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

pub(super) struct Edges {
    /// One for each of `INPUTS`.
    normalizers: [Normalizer; 3],
    /// To the iteration's dtype.
    unpad: CudaFunction,
    unpad_to_f32: CudaFunction,
    x: Stack,
    /// The address of the parts of sums of squares, and how many a matrix has.
    parts: (u64, usize),
    counts: Counts,
    /// For each block of a launch of `normalize` the part of a sum that others wait for; zero at first. The
    /// number of blocks that a matrix has must not change.
    published: CudaSlice<u64>,
}

struct Normalizer {
    /// `measure` and `divide` at once, and the most blocks of it that run at once.
    normalize: CudaFunction,
    most_blocks: usize,
    measure: CudaFunction,
    divide: CudaFunction,
    divide_transposed: CudaFunction,
}

impl Edges {
    /// From matrices to `x`, which has tall ones as their transposes. `parts` is where sums of
    /// squares go, and how many a matrix has. The counts are set before the products start.
    pub(super) fn new(
        device: &CudaDevice,
        modules: &Modules,
        dtype: DType,
        x: Stack,
        parts: (u64, usize),
        counts: Counts,
    ) -> Result<Self> {
        let to = dtype.as_str();
        let kernel = |name: &str| modules.edge(&format!("newton_schulz_{name}"));
        let normalizer = |from: DType| -> Result<_> {
            let from = from.as_str();
            let normalize = kernel(&format!("normalize_{from}_{to}"))?;
            Ok(Normalizer {
                most_blocks: blocks_at_once(device, &normalize, THREADS)?,
                normalize,
                measure: kernel(&format!("measure_{from}"))?,
                divide: kernel(&format!("divide_{from}_{to}"))?,
                divide_transposed: kernel(&format!("divide_transposed_{from}_{to}"))?,
            })
        };
        let [f32, f16, bf16] = INPUTS.map(normalizer);
        let normalizers = [f32?, f16?, bf16?];
        let most_blocks = normalizers.iter().map(|kernels| kernels.most_blocks);
        let published = device.alloc_zeros(most_blocks.max().unwrap_or(0))?;
        Ok(Self {
            normalizers,
            unpad: kernel(&format!("unpad_{to}_{to}"))?,
            unpad_to_f32: kernel(&format!("unpad_{to}_f32"))?,
            x,
            parts,
            counts,
            published,
        })
    }

    /// The kernels that normalize contiguous matrices, as many as `x` has, into it.
    pub(super) fn normalize(
        &self,
        device: &CudaDevice,
        wide: &[Tensor],
        tall: &[Tensor],
    ) -> Result<Vec<Rc<Kernel>>> {
        if wide.len() + tall.len() != self.x.count {
            bail!(
                "{} and {} matrices, of {}",
                wide.len(),
                tall.len(),
                self.x.count
            );
        }
        let mut kernels = Vec::new();
        let mut first = 0;
        for (matrices, transposed) in [(wide, false), (tall, true)] {
            for run in matrices.chunk_by(|a, b| a.dtype() == b.dtype()) {
                for group in run.chunks(self.matrices_of_a_group(run)) {
                    let of_group = self.normalize_group(device, group, transposed, first)?;
                    kernels.extend(of_group.into_iter().map(Rc::new));
                    first += group.len();
                }
            }
        }
        Ok(kernels)
    }

    /// Into how large parts matrices of one dtype are cut, all about the same.
    fn matrices_of_a_group(&self, run: &[Tensor]) -> usize {
        let matrix_bytes = self.x.rows * self.x.cols * run[0].dtype().size_in_bytes();
        let most = (GROUP / matrix_bytes).clamp(1, MATRICES);
        run.len().div_ceil(run.len().div_ceil(most))
    }

    fn normalize_group(
        &self,
        device: &CudaDevice,
        group: &[Tensor],
        transposed: bool,
        first: usize,
    ) -> Result<Vec<Kernel>> {
        let dtype = group[0].dtype();
        let Some(index) = INPUTS.iter().position(|input| *input == dtype) else {
            bail!("expected f32, f16 or bf16, got {dtype:?}");
        };
        let normalizer = &self.normalizers[index];
        let (n, m) = (self.x.rows, self.x.cols);
        let (rows, cols) = if transposed { (m, n) } else { (n, m) };
        let addresses = addresses(device, group, (rows, cols))?;
        let out = self.x.skip(first).address;
        let (parts, count) = self.parts;
        let parts = parts + (first * count * size_of::<[u32; 2]>()) as u64;
        let elements = (rows * cols) as i64;
        let products = self.counts.products;
        let counts_before = (first * products as usize * size_of::<u32>()) as u64;
        let [all, left] = [self.counts.parts, self.counts.left].map(|at| at + counts_before);
        let measured = grid(count, group.len());

        let is_held = rows * cols <= count * THREADS * VECTOR * MEASURED;
        let is_without_padding = cols.is_multiple_of(VECTOR)
            && addresses.iter().all(|address| address.is_multiple_of(16));
        let is_at_once = count * group.len() <= normalizer.most_blocks;
        if !transposed && is_held && is_without_padding && is_at_once {
            let together = Grid {
                together: true,
                ..measured
            };
            // An address of so many live elements for each matrix, from `out` on a place in X, a published part
            // for each block, and counts of tiles of each matrix.
            let kernel = Kernel::new(&normalizer.normalize, together)
                .with(addresses)
                .with(out)
                .with(start(&self.published, &device.cuda_stream()))
                .with(elements)
                .with(left)
                .with(all)
                .with(products);
            return Ok(vec![kernel]);
        }
        // The same, but for the place, and with room for the parts of sums.
        let measure = Kernel::new(&normalizer.measure, measured)
            .with(addresses)
            .with(parts)
            .with(elements)
            .with(left)
            .with(all)
            .with(products);
        let (kernel, blocks) = if transposed {
            let tiles = m.div_ceil(TILE) * n.div_ceil(TILE);
            (&normalizer.divide_transposed, tiles)
        } else {
            let vectors = n * Batch::pitch(m) / VECTOR;
            (&normalizer.divide, vectors / THREADS / 4)
        };
        let [parts_of_matrix, rows, cols, pitch] =
            [count, rows, cols, Batch::pitch(m)].map(|size| size as i32);
        // The same addresses and parts, and the place.
        let divide = Kernel::new(kernel, grid_of(blocks, group.len()))
            .with(addresses)
            .with(out)
            .with(parts)
            .with(parts_of_matrix)
            .with(rows)
            .with(cols)
            .with(pitch);
        Ok(vec![measure, divide])
    }

    /// The kernels that write a stack of the workspace to a contiguous one at an address, where there is room
    /// for all matrices, in f32 or as it is.
    pub(super) fn unpad(&self, from: Stack, to: u64, to_f32: bool) -> Vec<Rc<Kernel>> {
        let (kernel, element) = if to_f32 {
            (&self.unpad_to_f32, size_of::<f32>())
        } else {
            (&self.unpad, size_of::<f16>())
        };
        let matrix_bytes = from.rows * from.cols * element;
        let starts = (0..from.count).step_by(MOST_OF_A_STACK);
        let kernels = starts.map(|first| {
            let part = from.skip(first);
            let part = part.take(part.count.min(MOST_OF_A_STACK));
            let [rows, cols, pitch] =
                [part.rows, part.cols, Batch::pitch(part.cols)].map(|size| size as i32);
            let vectors = part.rows * Batch::pitch(part.cols) / VECTOR;
            let kernel = Kernel::new(kernel, grid_of(vectors / THREADS / 2, part.count))
                .with(part.address)
                .with(to + (first * matrix_bytes) as u64)
                .with(rows)
                .with(cols)
                .with(pitch);
            Rc::new(kernel)
        });
        kernels.collect()
    }
}

/// Where matrices of one dtype begin, each `rows` × `cols`.
fn addresses(
    device: &CudaDevice,
    group: &[Tensor],
    (rows, cols): (usize, usize),
) -> Result<[u64; MATRICES]> {
    let mut addresses = [0; MATRICES];
    for (to, x) in addresses.iter_mut().zip(group) {
        if x.dims() != [rows, cols] {
            bail!("expected a matrix of {rows} x {cols}, got {:?}", x.shape());
        }
        *to = by_dtype!(x.dtype(), address(device, x))?;
    }
    Ok(addresses)
}

/// At least a block for each matrix, and at most what keeps the memory busy.
fn grid_of(blocks: usize, matrices: usize) -> Grid {
    let most = if matrices > 1 {
        MOST_BLOCKS.min(MOST_BLOCKS_OF_ALL / matrices)
    } else {
        MOST_BLOCKS
    };
    grid(blocks.min(most).max(1), matrices)
}

fn grid(blocks: usize, matrices: usize) -> Grid {
    Grid {
        blocks: (blocks as u32, matrices as u32),
        threads: THREADS as u32,
        shared_bytes: 0,
        together: false,
    }
}
