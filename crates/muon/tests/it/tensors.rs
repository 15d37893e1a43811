//! Tensors with known contents, and their exact comparison.

use candle_core::{DType, Tensor};
use polarshard_muon::{Error, Update, apply_updates, copy_all};

use crate::oracle::Matrix;

/// Standard normal f32 elements; the seed decides them.
pub(crate) fn gaussian(shape: &[usize], seed: u64) -> Tensor {
    let flat = Matrix::gaussian(1, shape.iter().product(), seed).to_tensor();
    flat.reshape(shape).unwrap()
}

/// The bits of each element, as f32.
pub(crate) fn bits(x: &Tensor) -> Vec<u32> {
    let x = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    let values = x.to_vec1::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// One copy.
pub(crate) fn copy(target: &Tensor, values: &Tensor) -> Result<(), Error> {
    copy_all(&[(target, values)])
}

/// One update of weights.
pub(crate) fn apply_update(
    weights: &Tensor,
    orthogonalized: &Tensor,
    scale: f64,
    lr: f64,
    weight_decay: f64,
) -> Result<(), Error> {
    let update = Update {
        weights,
        orthogonalized,
        scale,
    };
    apply_updates(&[update], lr, weight_decay)
}
