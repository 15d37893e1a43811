//! What a step tells.

use serde::{Deserialize, Serialize};

/// What became of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The weights were updated; on a device, they are being updated: see [`step`](crate::ZeroOptimizer::step).
    Applied,
    /// Gradients were not finite: nothing changed, on any rank.
    Skipped {
        /// Elements that were infinite or no number.
        non_finite: u64,
    },
}

/// A step on one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Steps applied so far, this one included if it was.
    pub step: u64,
    /// What became of it.
    pub outcome: Outcome,
    /// The global norm of the mean gradient before clipping; infinite if the step was skipped.
    pub gradient_norm: f64,
    /// What the mean gradient was multiplied with to be within the clipping norm; 1 if it was.
    pub clip_factor: f64,
    /// Matrices that this rank orthogonalized.
    pub orthogonalized: usize,
    /// The most bytes of unreduced gradients that this rank held at once: open buckets, one in flight, and the gradient
    /// being handed in.
    pub unreduced_peak: usize,
    /// By how much that peak is over one open bucket a flat space, one in flight and one gradient: 0 where gradients
    /// come in plan order.
    pub unreduced_excess: usize,
}

/// Bytes that one rank keeps from step to step. Buffers come on top: those of the wire, the staging of gathered weights,
/// and in stage 1 with several micro-batches the sums of all gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// fp32 masters of its shards.
    pub masters: usize,
    /// Momentum of the group `muon`.
    pub momentum: usize,
    /// First and second moments of the group `adamw`.
    pub moments: usize,
    /// Reduced gradients, kept to the boundary.
    pub reduced_gradients: usize,
}
