//! Surveys of many tensors at once, by `kernels/survey.cu`.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};
use cudarc::driver::{CudaSlice, PushKernelArg};

use super::kernels::Kernels;
use super::launch::{blocks, launch, uninitialized};
use super::many::{Chunks, TENSORS, Tensors};
use crate::Survey;

/// Elements of a block.
const CHUNK: u32 = 1 << 15;

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
        .map(|tensors| {
            let cut = Chunks::new(tensors.iter().map(Tensor::elem_count), CHUNK)?;
            Ok((Tensors::new(device, tensors.iter())?, cut))
        })
        .collect::<Result<Vec<_>>>()?;
    let blocks_of = tables.iter().map(|(_, cut)| cut.blocks());
    let most = blocks_of.max().unwrap_or(0);
    // SAFETY: the launches are in order; each reads of `partial` what it has written.
    let mut partial = unsafe { uninitialized::<f64>(device, FIELDS * most) }?;
    // SAFETY: each tensor's finding is written.
    let mut all = unsafe { uninitialized::<f64>(device, FIELDS * tensors.len()) }?;
    let first_stage = Kernels::Survey.load(device, "survey_chunks")?;
    let second_stage = Kernels::Survey.load(device, "survey_tensors")?;
    for (index, (tensors, cut)) in tables.iter().enumerate() {
        let mut arguments = first_stage.builder();
        arguments
            .arg(&tensors.addresses)
            .arg(&tensors.dtypes)
            .arg(cut)
            .arg(&mut partial);
        // SAFETY: `survey_chunks(addresses, dtypes, cut, partial)`, with arrays of the sizes of
        // `many.cuh`; the addresses are of live tensors of these lengths and dtypes,
        // and `partial` has a finding for each block.
        unsafe { launch(&mut arguments, blocks(cut.blocks(), 1)?) }?;

        let start = FIELDS * TENSORS * index;
        let mut found = all.slice_mut(start..start + FIELDS * cut.count());
        let mut arguments = second_stage.builder();
        arguments.arg(cut).arg(&partial).arg(&mut found);
        // SAFETY: `survey_tensors(cut, partial, tensors)` with a block for each tensor.
        unsafe { launch(&mut arguments, blocks(cut.count(), 1)?) }?;
    }
    Ok(all)
}
