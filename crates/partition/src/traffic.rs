//! Calls and bytes, summed by class.

use std::ops::AddAssign;

use crate::{Call, Class, Collective, WorldSize};

/// How many calls, and the bytes that they send, summed over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Tally {
    /// Calls: one a collective, one a send.
    pub calls: u64,
    /// Payload bytes, see [`Call::bytes_sent`].
    pub bytes: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.bytes += other.bytes;
    }
}

/// The traffic of a world, by class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Traffic([Tally; Class::ALL.len()]);

impl Traffic {
    /// What the ranks of `world` send, from the calls that each of them recorded, by rank.
    ///
    /// Every rank records a collective, so collectives are read off rank 0; a send is recorded by
    /// its sender alone, so sends are summed over ranks.
    pub fn of(world: WorldSize, per_rank: &[Vec<Call>]) -> Self {
        let mut traffic = Self::default();
        for (rank, calls) in per_rank.iter().enumerate() {
            for call in calls
                .iter()
                .filter(|call| rank == 0 || call.collective == Collective::Send)
            {
                traffic.add(world, call);
            }
        }
        traffic
    }

    /// With one call more.
    pub(crate) fn add(&mut self, world: WorldSize, call: &Call) {
        self.0[call.class as usize] += Tally {
            calls: 1,
            bytes: call.bytes_sent(world),
        };
    }

    /// The traffic of one class.
    pub const fn class(&self, class: Class) -> Tally {
        self.0[class as usize]
    }

    /// The traffic of all classes.
    pub fn total(&self) -> Tally {
        let mut total = Tally::default();
        self.0.iter().for_each(|tally| total += *tally);
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Rank, Wire};

    #[test]
    fn collectives_are_counted_once_and_sends_by_sender() {
        let world = WorldSize::new(2).unwrap();
        let sum = Call {
            class: Class::Gradient,
            collective: Collective::AllReduce,
            elems: 8,
            wire: Wire::F32,
            root: None,
        };
        let send = Call {
            class: Class::Exchange,
            collective: Collective::Send,
            elems: 3,
            wire: Wire::F32,
            root: Some(Rank(0)),
        };
        let traffic = Traffic::of(world, &[vec![sum], vec![sum, send, send]]);
        assert_eq!(
            traffic.class(Class::Gradient),
            Tally {
                calls: 1,
                bytes: 64
            }
        );
        assert_eq!(
            traffic.class(Class::Exchange),
            Tally {
                calls: 2,
                bytes: 24
            }
        );
        assert_eq!(traffic.class(Class::Weight), Tally::default());
        assert_eq!(
            traffic.total(),
            Tally {
                calls: 3,
                bytes: 88
            }
        );
    }
}
