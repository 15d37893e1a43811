//! ZeRO stage 1 and stage 2 training with Muon, on candle.
//!
//! Muon orthogonalizes each weight matrix's momentum by an iteration over the whole matrix, and ZeRO cuts optimizer
//! state into one shard a rank, also inside matrices. This crate composes layouts
//! ([`polarshard_partition`]), collectives ([`polarshard_comm`]) and the update rule ([`polarshard_muon`]) into
//! optimizers whose result is that of one device, whatever the number of ranks.
//!
//! Start with [`ParamStore`] for a model on candle's differentiable operations, or with
//! [`ZeroOptimizer::from_var_map`] for one on a `VarMap`.

mod agreement;
mod channel;
mod checkpoint;
mod config;
mod dtypes;
mod error;
mod flat;
mod gradients;
mod optimizer;
mod replicas;
mod report;
mod roles;
mod setup;
mod step;
mod store;
mod weights;

pub use config::Config;
pub use error::{Error, Result};
pub use optimizer::ZeroOptimizer;
pub use report::{MemoryUse, Outcome, StepReport};
pub use roles::{Role, Roles};
pub use store::ParamStore;
