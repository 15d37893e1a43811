//! Surveys of many tensors at once, by `kernels/survey.cu`.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};
use cudarc::driver::{CudaSlice, PushKernelArg};
use half::{bf16, f16};

use super::kernels::Kernels;
use super::launch::{address, blocks, launch, uninitialized};
use crate::Survey;

/// Tensors of a launch: their table is an argument, of which all together have 4 KiB.
const TENSORS: usize = 128;
/// Elements of a block.
const CHUNK: usize = 1 << 15;

/// Numbers of a finding: Σx², non-finite elements, elements other than zero, largest magnitude.
pub(super) const FIELDS: usize = 4;

/// Surveys contiguous tensors of one device. The host waits for it once.
pub(crate) fn survey(device: &CudaDevice, tensors: &[Tensor]) -> Result<Vec<Survey>> {
    if tensors.is_empty() {
        return Ok(Vec::new());
    }
    let found = device.clone_dtoh(&findings(device, tensors)?)?;
    let survey = |found: &[f64]| Survey {
        sum_of_squares: found[0],
        non_finite: found[1] as u64,
        non_zero: found[2] > 0.0,
    };
    Ok(found.chunks_exact(FIELDS).map(survey).collect())
}

/// The findings of contiguous tensors, at least one, on their device.
pub(super) fn findings(device: &CudaDevice, tensors: &[Tensor]) -> Result<CudaSlice<f64>> {
    let tables = tensors
        .chunks(TENSORS)
        .map(|tensors| Table::new(device, tensors))
        .collect::<Result<Vec<_>>>()?;
    let chunks = tables.iter().map(Table::blocks).max().unwrap_or(0);
    // SAFETY: the launches are in order; each reads of `chunks` what it has written.
    let mut chunks = unsafe { uninitialized::<f64>(device, FIELDS * chunks) }?;
    // SAFETY: each tensor's finding is written.
    let mut all = unsafe { uninitialized::<f64>(device, FIELDS * tensors.len()) }?;
    let first_stage = Kernels::Survey.load(device, "survey_chunks")?;
    let second_stage = Kernels::Survey.load(device, "survey_tensors")?;
    for (index, table) in tables.iter().enumerate() {
        let mut arguments = first_stage.builder();
        arguments
            .arg(&table.addresses)
            .arg(&table.lengths)
            .arg(&table.dtypes)
            .arg(&table.firsts)
            .arg(&table.count)
            .arg(&mut chunks);
        // SAFETY: `survey_chunks(addresses, lengths, dtypes, firsts, count, chunks)`, with arrays of
        // the sizes of `survey.cu`; the addresses are of live tensors of these lengths and dtypes,
        // and `chunks` has a finding for each block.
        unsafe { launch(&mut arguments, blocks(table.blocks(), 1)?) }?;

        let start = FIELDS * TENSORS * index;
        let mut found = all.slice_mut(start..start + FIELDS * table.count as usize);
        let mut arguments = second_stage.builder();
        arguments.arg(&table.firsts).arg(&chunks).arg(&mut found);
        // SAFETY: `survey_tensors(firsts, chunks, tensors)` with a block for each tensor.
        unsafe { launch(&mut arguments, blocks(table.count as usize, 1)?) }?;
    }
    Ok(all)
}

/// Some tensors, as the first kernel takes them.
struct Table {
    count: u32,
    addresses: [u64; TENSORS],
    lengths: [u64; TENSORS],
    dtypes: [u32; TENSORS],
    /// The first block of each, and at `count` the end of all.
    firsts: [u32; TENSORS + 1],
}

impl Table {
    fn new(device: &CudaDevice, tensors: &[Tensor]) -> Result<Self> {
        let mut table = Self {
            count: tensors.len() as u32,
            addresses: [0; TENSORS],
            lengths: [0; TENSORS],
            dtypes: [0; TENSORS],
            firsts: [0; TENSORS + 1],
        };
        for (i, x) in tensors.iter().enumerate() {
            (table.addresses[i], table.dtypes[i]) = match x.dtype() {
                DType::F32 => (address::<f32>(device, x)?, 0),
                DType::F16 => (address::<f16>(device, x)?, 1),
                DType::BF16 => (address::<bf16>(device, x)?, 2),
                DType::F64 => (address::<f64>(device, x)?, 3),
                other => bail!("expected floating point, got {other:?}"),
            };
            table.lengths[i] = x.elem_count() as u64;
            let end = table.firsts[i] as usize + x.elem_count().div_ceil(CHUNK);
            table.firsts[i + 1] = u32::try_from(end).map_err(candle_core::Error::wrap)?;
        }
        Ok(table)
    }

    fn blocks(&self) -> usize {
        self.firsts[self.count as usize] as usize
    }
}
