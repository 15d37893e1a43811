//! What the host decides for the kernels in `kernels/hopper`: which products an iteration is made of
//! (`program`), into which tiles they are cut (`tiles`, `pairs`, `cuts`), which cluster computes which of them
//! (`schedule`), where matrices lie (`workspace`), and what of symmetric ones is stored (`triangle`).
//!
//! All of it is a pure function of shapes and coefficients, and tested without a device.

pub(crate) mod cuts;
mod pairs;
pub(crate) mod program;
pub(crate) mod schedule;
pub(crate) mod tiles;
pub(crate) mod triangle;
pub(crate) mod workspace;
