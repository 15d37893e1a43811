//! The Muon optimizer on [candle](candle_core), as parts and as whole single-device optimizers.
//!
//! Muon replaces the momentum of a weight matrix by its nearest orthogonal matrix, found by a few
//! products of a [Newton-Schulz](NewtonSchulz) iteration, and steps along that. Everything that is
//! not a hidden matrix (embeddings, gains, biases) is left to AdamW.
//!
//! | part | what it does |
//! |---|---|
//! | [`NewtonSchulz`] | orthogonalizes matrices, alone or batched by shape |
//! | [`copy_all`], [`accumulate`], [`momentum_update`], [`apply_updates`], [`adamw_update`], [`survey()`] | the element-wise steps, each in one pass, on any slice of a parameter; their operands are tensors, a [`Gradient`], an [`Update`] |
//! | [`UpdateScale`] | how large an update is, by the shape of its matrix |
//! | [`Rules`] | which parameter is Muon's, and of which matrices it is made |
//! | [`Muon`], [`MuonWithAdamW`] | optimizers of one device, built of these |
//!
//! Everything runs where its tensors are: on a CPU, and with the feature `cuda` on NVIDIA devices,
//! whose stream it leaves only to read a [`Survey`]. To build that feature needs the `nvcc` of
//! CUDA 12 or later, which is looked for in `CUDA_HOME` and on the `PATH`; `CUDA_COMPUTE_CAP` (default
//! 80) says for which devices. For compute capability 9.0 Newton-Schulz has kernels of its own, in any
//! such build: see [`Kernels`].
//!
//! The parts know nothing of ranks or shards: the element-wise steps are linear or local, so that a
//! caller who owns slices of parameters can run them on slices, and needs whole matrices for
//! [`NewtonSchulz`] alone.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, Optimizer, VarBuilder, VarMap, linear};
//! use polarshard_muon::{MuonWithAdamW, MuonWithAdamWConfig, Rules};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vars = VarMap::new();
//! let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
//! let layer = linear(8, 4, vb.pp("layer"))?;
//!
//! // The order of a `VarMap` differs from run to run; names do not.
//! let mut named: Vec<_> = vars.data().lock().unwrap().clone().into_iter().collect();
//! named.sort_by(|a, b| a.0.cmp(&b.0));
//! let mut optimizer =
//!     MuonWithAdamW::from_named(named, &Rules::default(), MuonWithAdamWConfig::default())?;
//! println!("{}", optimizer.routing());
//!
//! let x = Tensor::ones((16, 8), DType::F32, &Device::Cpu)?;
//! let before = layer.forward(&x)?.sqr()?.mean_all()?;
//! for _ in 0..10 {
//!     let loss = layer.forward(&x)?.sqr()?.mean_all()?;
//!     optimizer.backward_step(&loss)?;
//! }
//! let after = layer.forward(&x)?.sqr()?.mean_all()?;
//! assert!(after.to_scalar::<f32>()? < before.to_scalar::<f32>()?);
//! # Ok(())
//! # }
//! ```

mod adamw_group;
#[cfg(any(feature = "cuda", test))]
mod bands;
#[cfg(any(feature = "cuda", test))]
mod choice;
mod coefficients;
mod config;
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "kernels and cuBLAS are called with addresses")]
mod cuda;
mod elementwise;
mod error;
#[cfg(any(feature = "cuda", test))]
mod hopper;
mod iteration;
mod kernels;
#[cfg(any(feature = "cuda", test))]
mod measured;
mod method;
mod muon_group;
mod newton_schulz;
mod normalize;
mod optimizer;
mod precision;
mod products;
mod routing;
mod rules;
mod scale;
mod survey;
mod weights;

#[cfg(any(feature = "cuda", test))]
pub use choice::{Choice, Products};
pub use coefficients::{Coefficients, CustomCoefficients};
pub use config::{AdamWConfig, MuonConfig, MuonWithAdamWConfig};
pub use elementwise::{
    Gradient, Update, accumulate, adamw_update, apply_updates, copy_all, momentum_update,
};
pub use error::Error;
pub use kernels::Kernels;
pub use method::Method;
pub use newton_schulz::NewtonSchulz;
pub use optimizer::{Muon, MuonWithAdamW, MuonWithAdamWGroups};
pub use precision::Precision;
pub use routing::{Decision, MatrixShape, Reason, Routed, RoutingTable};
pub use rules::{Rule, Rules};
pub use scale::UpdateScale;
pub use survey::{Survey, survey, survey_all};
