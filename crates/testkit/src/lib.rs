//! Oracles, harnesses and golden cases for the tests of polarshard.
//!
//! | module | what it holds |
//! |---|---|
//! | [`compare`] | relative errors and equality of bits, with the parameter named |
//! | [`model`] | parameters of every kind that a layout must cope with, and generators of gradients |
//! | [`reference`](mod@reference) | unsharded optimizers: in f64 by other code, and in f32 by the same steps |
//! | [`harness`] | sharded runs on ranks that are threads, with all that was seen of them |
//! | `processes` | with the feature `nccl`: ranks that are processes, each with a GPU |
//! | [`partial`] | a communicator with the fault that this project exists to prevent |
//! | [`devices`] | tensors on their way to a device |
//! | [`golden`], [`replay`] | what DeepSpeed did, and the same gradients through the sharded optimizer |

pub mod compare;
pub mod devices;
pub mod golden;
pub mod harness;
pub mod model;
pub mod partial;
#[cfg(feature = "nccl")]
pub mod processes;
pub mod reference;
pub mod replay;

/// The snippets of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod readme {}
