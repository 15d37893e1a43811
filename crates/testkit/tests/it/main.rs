//! The whole of polarshard, through its public interfaces.

mod accumulation;
mod bad_gradients;
mod bad_models;
mod bad_settings;
mod checkpoint;
mod clipping;
#[cfg(feature = "cuda")]
mod cuda;
mod deepspeed;
mod faults;
mod golden;
mod matrix;
#[cfg(feature = "nccl")]
mod nccl;
mod optional;
mod overflow;
mod param_store;
mod partial_reduction;
mod policies;
mod schedules;
mod shared;
mod support;
mod unheard;
mod weighted;
