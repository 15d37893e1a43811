//! Bytes of unreduced gradients that a rank holds, counted as they come and go.

use std::collections::BTreeMap;

use super::lane::Lane;
use crate::weights::Weight;

/// A count, its peak in a step, and what it should not exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    bound: usize,
    now: usize,
    peak: usize,
}

impl Held {
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

/// What is held at most if gradients come in plan order: one open bucket a flat space, one in flight, and one gradient.
pub(super) fn bound(lanes: &[Lane], weights: &[Weight]) -> usize {
    let mut longest = BTreeMap::new();
    for lane in lanes {
        let bytes = lane.len * lane.wire.bytes();
        let known = longest.entry(lane.space).or_insert(bytes);
        *known = bytes.max(*known);
    }
    let gradients = weights
        .iter()
        .map(|weight| weight.elems() * weight.dtype.size_in_bytes());
    let in_flight = longest.values().max().copied().unwrap_or_default();
    longest.values().sum::<usize>() + in_flight + gradients.max().unwrap_or_default()
}
