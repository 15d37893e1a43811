//! What the host decides for the kernels in `kernels/hopper`: which products an iteration is made of
//! (`program`), how the tiles of each are dealt (`tiles`, `deal`), where matrices lie (`workspace`).
//!
//! All of it is a pure function of shapes and coefficients, and tested without a device.

mod deal;
mod program;
mod tiles;
mod workspace;

pub(crate) use deal::Deal;
pub(crate) use program::{Buffer, Product, Scalars, flops, program};
pub(crate) use tiles::{Region, Tile, Width};
pub(crate) use workspace::{Batch, Workspace, chunks};
