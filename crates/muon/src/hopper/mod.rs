//! What the host decides for the kernels in `kernels/hopper`: which products an iteration is made of
//! (`program`), how the tiles of each are dealt (`tiles`, `deal`), where matrices lie (`workspace`).
//!
//! All of it is a pure function of shapes and coefficients, and tested without a device.

pub(crate) mod deal;
pub(crate) mod program;
pub(crate) mod tiles;
pub(crate) mod workspace;
