//! Bytes of unreduced gradients that a rank holds, counted as they come and go.

/// A count, its peak in a step, and what it should not exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    bound: usize,
    now: usize,
    peak: usize,
}

impl Held {
    /// `bound` is what is held at most if gradients come in plan order.
    pub(super) fn new(bound: usize) -> Self {
        Self {
            bound,
            now: 0,
            peak: 0,
        }
    }

    pub(super) fn add(&mut self, bytes: usize) {
        self.now += bytes;
        self.peak = self.peak.max(self.now);
    }

    pub(super) fn remove(&mut self, bytes: usize) {
        self.now -= bytes;
    }

    /// Begins a new step.
    pub(super) fn reset(&mut self) {
        self.peak = self.now;
    }

    pub(crate) fn peak(&self) -> usize {
        self.peak
    }

    /// By how much the peak is over the bound.
    pub(crate) fn excess(&self) -> usize {
        self.peak.saturating_sub(self.bound)
    }
}
