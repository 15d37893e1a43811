//! Runs of parameters, from which whole matrices are put together and parcels are packed.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use polarshard_partition::{ParamId, Span};

use crate::error::Result;
use crate::flat;

/// One-dimensional runs of parameters, all of one dtype; what was never put in reads as zeros.
#[derive(Debug)]
pub(crate) struct Fragments {
    dtype: DType,
    device: Device,
    /// By parameter and start.
    runs: BTreeMap<(ParamId, usize), Tensor>,
}

impl Fragments {
    pub(crate) fn new(dtype: DType, device: &Device) -> Self {
        Self {
            dtype,
            device: device.clone(),
            runs: BTreeMap::new(),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Puts in a run that starts at an element of a parameter. Runs do not overlap.
    pub(crate) fn put(&mut self, param: ParamId, start: usize, values: Tensor) {
        self.runs.insert((param, start), values);
    }

    /// The values of a span: a view where one run has them all.
    pub(crate) fn read(&self, param: ParamId, span: Span) -> Result<Tensor> {
        let mut parts = Vec::new();
        let mut end = span.start;
        let first = self.runs.range(..=(param, span.start)).next_back();
        let first = first.filter(|((owner, _), _)| *owner == param);
        let after = self
            .runs
            .range((param, span.start + 1)..(param, span.end.max(span.start + 1)));
        for ((_, start), values) in first.into_iter().chain(after) {
            let run = Span::of_len(*start, values.elem_count());
            let Some(common) = run.intersect(span) else {
                continue;
            };
            if common.start > end {
                parts.push(self.zeros(common.start - end)?);
            }
            parts.push(flat::view(
                values,
                Span::of_len(common.start - start, common.len()),
            )?);
            end = common.end;
        }
        if end < span.end {
            parts.push(self.zeros(span.end - end)?);
        }
        Ok(match parts.len() {
            1 => parts.swap_remove(0),
            _ => Tensor::cat(&parts, 0)?,
        })
    }

    fn zeros(&self, len: usize) -> Result<Tensor> {
        Ok(flat::zeros(len, self.dtype, &self.device)?)
    }
}

#[cfg(test)]
mod tests {
    use polarshard_partition::{Param, Params, Wire};

    use super::*;

    #[test]
    fn a_span_is_put_together_from_runs_and_zeros() -> Result<()> {
        let vector = |name: &str| Param {
            name: name.to_string(),
            shape: [9].into_iter().collect(),
            wire: Wire::F32,
            matrices: Vec::new(),
        };
        let params = Params::new(["a", "b", "c"].map(vector).to_vec())?;
        let ids: Vec<_> = params.iter().map(|(id, _)| id).collect();
        let device = Device::Cpu;
        let mut fragments = Fragments::new(DType::F32, &device);
        fragments.put(ids[1], 2, Tensor::new(&[1f32, 2.0], &device)?);
        fragments.put(ids[1], 4, Tensor::new(&[3f32], &device)?);
        fragments.put(ids[1], 6, Tensor::new(&[4f32], &device)?);
        fragments.put(ids[0], 0, Tensor::new(&[9f32; 9], &device)?);
        let read = |param: usize, start, end| -> Result<Vec<f32>> {
            Ok(fragments
                .read(ids[param], Span::new(start, end))?
                .to_vec1()?)
        };
        assert_eq!(read(1, 0, 8)?, [0.0, 0.0, 1.0, 2.0, 3.0, 0.0, 4.0, 0.0]);
        assert_eq!(read(1, 3, 5)?, [2.0, 3.0]);
        assert_eq!(read(1, 2, 4)?, [1.0, 2.0]);
        assert_eq!(read(2, 0, 2)?, [0.0, 0.0]);
        assert_eq!(read(0, 3, 4)?, [9.0]);
        Ok(())
    }
}
