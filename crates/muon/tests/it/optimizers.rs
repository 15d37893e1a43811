//! The single-device optimizers.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use crate::tensors::gaussian;

mod refusals;
mod regression;
mod updates;

fn grads(pairs: &[(&Var, Tensor)]) -> GradStore {
    let mut grads = GradStore::default();
    for (var, gradient) in pairs {
        grads.insert(var.as_tensor(), gradient.clone());
    }
    grads
}

fn var(shape: &[usize], seed: u64) -> Var {
    Var::from_tensor(&gaussian(shape, seed)).unwrap()
}

fn named(name: &str, var: &Var) -> (String, Var) {
    (name.to_owned(), var.clone())
}
