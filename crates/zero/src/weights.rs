//! The trained weights as the engine sees them.

use candle_core::{DType, Tensor};
use polarshard_partition::{Digest, DigestWriter};

use crate::error::Result;

/// One trained weight: its values can be replaced in place.
#[derive(Debug, Clone)]
pub(crate) struct Weight {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    pub(crate) optional: bool,
    /// A one-dimensional view of the model's own storage, outside any graph.
    flat: Tensor,
}

impl Weight {
    pub(crate) fn new(name: String, tensor: &Tensor, optional: bool) -> Result<Self> {
        let flat = tensor.detach().flatten_all()?;
        Ok(Self {
            name,
            shape: tensor.dims().to_vec(),
            dtype: tensor.dtype(),
            optional,
            flat,
        })
    }

    pub(crate) fn elems(&self) -> usize {
        self.flat.elem_count()
    }

    /// Its values as a one-dimensional view; not to be kept over a step.
    pub(crate) fn values(&self) -> &Tensor {
        &self.flat
    }

    /// A checksum of the bits.
    pub(crate) fn checksum(&self) -> Result<Digest> {
        // Every trained dtype is exact in f32, and f32 keeps the sign of zero.
        let values: Vec<f32> = self.flat.to_dtype(DType::F32)?.to_vec1()?;
        let name = DigestWriter::new().str(&self.name);
        let digest = values
            .iter()
            .fold(name, |digest, value| digest.u64(u64::from(value.to_bits())));
        Ok(digest.finish())
    }
}
