//! The CUDA side: kernels of our own and cuBLAS, on contiguous views of candle's storages.
//!
//! All work is put on the device's own stream and none of it waits, but for the one copy back of a
//! survey. This is the only module with `unsafe` code. What makes its launches sound:
//! - an address comes from a view of a live slice, and a kernel stays within the view's length, which
//!   it gets as an argument from the same view;
//! - a slice that is dropped after a launch is freed in the order of the stream, after the kernel;
//! - what is written is new, or lent by candle for writing, or named by its address (`copy_all`,
//!   `apply_all`): then no lock is held and cudarc knows of no write, so all work on it must be on its
//!   device's one stream. That it shares no storage with what is read is checked before
//!   (`check_places`, `check_written`, and candle's own check).

mod copies;
mod element;
mod hopper;
mod kernels;
mod launch;
mod many;
mod matrices;
mod products;
mod steps;
mod survey;

pub(crate) use copies::copy_all;
pub(crate) use hopper::{gpu, orthogonalize_on_hopper};
pub(crate) use matrices::{add_to_diagonal, normalize, widen_transposed};
pub(crate) use products::{fma, outer, product, symmetric_fma};
pub(crate) use steps::{accumulate, adamw, apply_all, momentum};
pub(crate) use survey::survey;
