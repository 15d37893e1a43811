//! Integration tests of the optimizer, against float64 oracles that share no code with it.

#![expect(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions, not in their helpers"
)]

#[cfg(feature = "cuda")]
mod cuda;
mod determinism;
mod elementwise;
mod newton_schulz;
mod optimizers;
mod oracle;
mod routing;
mod tensors;
