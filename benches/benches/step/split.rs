//! Where the time of a step went, from the marks that its requests set.

use anyhow::Result;
use polarshard_partition::Class;

use crate::timed::{At, Mark};

/// A part of a step. Communication counts as far as candle's stream waited for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The backward pass, gradients into buckets, and sums out of them.
    HandIn,
    Reduction,
    /// The survey of the gradients.
    Survey,
    Decision,
    /// Momentum, and parcels packed.
    Momentum,
    Exchange,
    /// AdamW, and Newton-Schulz with its results packed.
    NewtonSchulz,
    Gather,
    /// Masters of the group `muon`, all masters into the staging buffers, and weights out of these.
    Update,
}

pub(crate) const PHASES: [(Phase, &str); 9] = [
    (Phase::HandIn, "hand-in"),
    (Phase::Reduction, "reduce"),
    (Phase::Survey, "survey"),
    (Phase::Decision, "decide"),
    (Phase::Momentum, "momentum"),
    (Phase::Exchange, "exchange"),
    (Phase::NewtonSchulz, "newton"),
    (Phase::Gather, "gather"),
    (Phase::Update, "update"),
];

/// Milliseconds by phase.
pub(crate) type Times = [f64; PHASES.len()];

/// Of one step on one rank.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Split {
    /// Between marks on candle's stream.
    pub(crate) device: Times,
    /// Between the same marks, when the host set them.
    pub(crate) host: Times,
}

impl Split {
    pub(crate) fn of(marks: &[Mark]) -> Result<Self> {
        let mut split = Self::default();
        let mut region = Phase::HandIn;
        for pair in marks.windows(2) {
            let [from, to] = pair else {
                unreachable!("windows are of two")
            };
            region = after(from.at, region);
            let phase = match (from.at, to.at) {
                (At::Wait(Class::Gradient), At::Waited(_)) => Phase::Reduction,
                (At::Wait(Class::Control), At::Waited(_)) => Phase::Decision,
                (At::Wait(Class::Exchange), At::Waited(_)) => Phase::Exchange,
                (At::Wait(Class::Weight), At::Waited(_)) => Phase::Gather,
                _ => region,
            };
            split.device[phase as usize] += f64::from(from.event.elapsed_ms(&to.event)?);
            let host = to.host.duration_since(from.host);
            split.host[phase as usize] += host.as_secs_f64() * 1e3;
        }
        Ok(split)
    }

    /// By phase, the medians of several steps.
    pub(crate) fn median(splits: &[Self]) -> Self {
        let of = |times: &dyn Fn(&Self) -> Times| {
            std::array::from_fn(|i| median(splits.iter().map(|split| times(split)[i]).collect()))
        };
        Self {
            device: of(&|split| split.device),
            host: of(&|split| split.host),
        }
    }

    /// How long candle's stream waited for a class of requests.
    pub(crate) fn waited(&self, class: Class) -> f64 {
        let phase = match class {
            Class::Gradient => Phase::Reduction,
            Class::Control => Phase::Decision,
            Class::Exchange => Phase::Exchange,
            Class::Weight => Phase::Gather,
        };
        self.device[phase as usize]
    }
}

/// What is worked on after a mark.
fn after(at: At, before: Phase) -> Phase {
    match at {
        At::HandedIn => Phase::Survey,
        At::Waited(Class::Control) => Phase::Momentum,
        // The first exchange is that of updates, with AdamW beside it; the second is that of results.
        At::Start(Class::Exchange) if before == Phase::Momentum => Phase::NewtonSchulz,
        At::Start(Class::Exchange | Class::Weight) => Phase::Update,
        _ => before,
    }
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
