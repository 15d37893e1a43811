//! Ranks, how many there are, and sets of them.

use std::fmt;
use std::num::NonZeroUsize;

use smallvec::SmallVec;

use crate::{Error, Span};

/// A participant of the data-parallel group, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Rank(pub usize);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How many ranks there are: one or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorldSize(NonZeroUsize);

impl WorldSize {
    /// A world of `n` ranks.
    ///
    /// # Errors
    /// [`Error::EmptyWorld`] for 0.
    pub fn new(n: usize) -> Result<Self, Error> {
        NonZeroUsize::new(n).map(Self).ok_or(Error::EmptyWorld)
    }

    /// The number of ranks.
    pub const fn get(self) -> usize {
        self.0.get()
    }

    /// Every rank, ascending.
    pub fn ranks(self) -> impl DoubleEndedIterator<Item = Rank> + ExactSizeIterator + Clone {
        (0..self.get()).map(Rank)
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A set of ranks.
///
/// Owners of a contiguous run are consecutive, so the set is kept as runs of ranks: ascending,
/// neither empty nor touching, nearly always one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Ranks(SmallVec<[Span; 1]>);

impl Ranks {
    /// Every rank of `world`.
    pub fn all(world: WorldSize) -> Self {
        Self(SmallVec::from_buf([Span::new(0, world.get())]))
    }

    /// `rank` alone.
    pub fn one(rank: Rank) -> Self {
        Self(SmallVec::from_buf([Span::of_len(rank.0, 1)]))
    }

    /// Whether `rank` is in the set.
    pub fn contains(&self, rank: Rank) -> bool {
        let after = self.0.partition_point(|run| run.end <= rank.0);
        self.0.get(after).is_some_and(|run| run.start <= rank.0)
    }

    /// The ranks, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Rank> + '_ {
        self.0.iter().flat_map(|run| run.start..run.end).map(Rank)
    }

    /// How many ranks.
    pub fn len(&self) -> usize {
        self.0.iter().map(|run| run.len()).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<Rank> for Ranks {
    fn from_iter<I: IntoIterator<Item = Rank>>(ranks: I) -> Self {
        let mut sorted: SmallVec<[Rank; 8]> = ranks.into_iter().collect();
        sorted.sort_unstable();
        let mut runs: SmallVec<[Span; 1]> = SmallVec::new();
        for Rank(rank) in sorted {
            match runs.last_mut() {
                Some(run) if rank < run.end => {}
                Some(run) if rank == run.end => run.end += 1,
                _ => runs.push(Span::of_len(rank, 1)),
            }
        }
        Self(runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_world_has_a_rank() {
        assert_eq!(WorldSize::new(0), Err(Error::EmptyWorld));
        let world = WorldSize::new(3).unwrap();
        assert_eq!(world.to_string(), "3");
        assert_eq!(
            world.ranks().collect::<Vec<_>>(),
            [Rank(0), Rank(1), Rank(2)]
        );
        assert_eq!(Rank(3).to_string(), "3");
    }

    #[test]
    fn ranks_are_a_set() {
        let ranks: Ranks = [5, 2, 3, 2, 9, 4].into_iter().map(Rank).collect();
        assert_eq!(
            ranks.iter().map(|rank| rank.0).collect::<Vec<_>>(),
            [2, 3, 4, 5, 9]
        );
        assert_eq!(ranks.len(), 5);
        for rank in 0..12 {
            assert_eq!(
                ranks.contains(Rank(rank)),
                [2, 3, 4, 5, 9].contains(&rank),
                "{rank}"
            );
        }
        assert!(!ranks.is_empty() && Ranks::default().is_empty());
        assert_eq!(Ranks::default().len(), 0);
        let world = WorldSize::new(3).unwrap();
        assert_eq!(Ranks::all(world), world.ranks().collect());
        assert_eq!(Ranks::one(Rank(7)), [Rank(7)].into_iter().collect());
    }
}
