//! The whole of polarshard, through its public interfaces.

mod matrix;
mod partial_reduction;
mod policies;
mod support;
