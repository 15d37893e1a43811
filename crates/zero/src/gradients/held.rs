//! Bytes of unreduced gradients that a rank holds, counted as they come and go.

/// A count and its peak.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Held {
    now: usize,
    peak: usize,
}

impl Held {
    pub(crate) fn add(&mut self, bytes: usize) {
        self.now += bytes;
        self.peak = self.peak.max(self.now);
    }

    pub(crate) fn remove(&mut self, bytes: usize) {
        self.now -= bytes;
    }

    pub(crate) fn peak(&self) -> usize {
        self.peak
    }

    /// Begins a new step.
    pub(crate) fn reset(&mut self) {
        self.peak = self.now;
    }
}
