//! Calls and the bytes that they send, by what they are for and what they do.

use std::collections::BTreeMap;

use polarshard_partition::{Call, Class, Collective, Tally, WorldSize};
use serde::{Deserialize, Serialize};

/// How many calls there are of each kind, and the bytes that they send, summed over ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tallies(BTreeMap<Class, BTreeMap<Collective, Tally>>);

impl Tallies {
    /// With the calls of one rank, each so many times.
    pub(crate) fn add(&mut self, world: WorldSize, calls: &[Call], times: u64) {
        for call in calls {
            *self.of(call.class, call.collective) += Tally {
                calls: times,
                bytes: times * call.bytes_sent(world),
            };
        }
    }

    /// Those of a world, from those of its ranks. Every rank tells of a collective, so that is read off rank 0; only the
    /// sender tells of a send.
    pub(crate) fn of_world<'a>(ranks: impl Iterator<Item = &'a Self>) -> Self {
        let mut all = Self::default();
        for (rank, own) in ranks.enumerate() {
            let told = own.kinds();
            for (class, collective) in
                told.filter(|(_, collective)| rank == 0 || *collective == Collective::Send)
            {
                *all.of(class, collective) += own.get(class, collective);
            }
        }
        all
    }

    /// What there is any call of.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = (Class, Collective)> {
        let by_class = self.0.iter();
        by_class.flat_map(|(class, tallies)| tallies.keys().map(|collective| (*class, *collective)))
    }

    /// The calls of a kind.
    pub(crate) fn get(&self, class: Class, collective: Collective) -> Tally {
        let tallies = self.0.get(&class);
        let tally = tallies.and_then(|tallies| tallies.get(&collective));
        tally.copied().unwrap_or_default()
    }

    fn of(&mut self, class: Class, collective: Collective) -> &mut Tally {
        let tallies = self.0.entry(class).or_default();
        tallies.entry(collective).or_default()
    }
}

#[cfg(test)]
mod tests {
    use polarshard_partition::{Rank, Wire};

    use super::*;

    fn call(class: Class, collective: Collective, root: Option<Rank>) -> Call {
        Call {
            class,
            collective,
            elems: 3,
            wire: Wire::F32,
            root,
        }
    }

    #[test]
    fn collectives_are_told_by_all_and_sends_by_the_sender() {
        let world = WorldSize::new(3).unwrap();
        let sum = call(Class::Gradient, Collective::AllReduce, None);
        let send = call(Class::Exchange, Collective::Send, Some(Rank(0)));
        let mut ranks = [Tallies::default(), Tallies::default(), Tallies::default()];
        ranks[0].add(world, &[sum, sum], 5);
        ranks[1].add(world, &[sum, send, sum, send], 5);
        ranks[2].add(world, &[sum, sum, send], 5);
        let all = Tallies::of_world(ranks.iter());
        let kinds = [
            (Class::Gradient, Collective::AllReduce),
            (Class::Exchange, Collective::Send),
        ];
        assert_eq!(all.kinds().collect::<Vec<_>>(), kinds);
        let [sums, sends] = kinds.map(|(class, collective)| all.get(class, collective));
        // An all-reduce of 12 bytes sends each of them twice to each of two.
        let expected = Tally {
            calls: 10,
            bytes: 10 * 2 * 2 * 12,
        };
        assert_eq!(sums, expected);
        let expected = Tally {
            calls: 15,
            bytes: 15 * 12,
        };
        assert_eq!(sends, expected);
        assert_eq!(
            all.get(Class::Weight, Collective::AllGather),
            Tally::default()
        );
    }

    #[test]
    fn what_is_written_is_read_and_does_not_grow_with_steps() {
        let world = WorldSize::new(2).unwrap();
        let calls = [
            call(Class::Gradient, Collective::ReduceScatter, None),
            call(Class::Exchange, Collective::Send, Some(Rank(1))),
        ];
        let (mut step_by_step, mut at_once) = (Tallies::default(), Tallies::default());
        (0..40).for_each(|_| step_by_step.add(world, &calls, 1));
        at_once.add(world, &calls, 40);
        assert_eq!(step_by_step, at_once);
        let json = serde_json::to_string(&step_by_step).unwrap();
        let words = r#"{"gradient":{"reduce-scatter":{"calls":40,"bytes":480}},"exchange":{"send":{"calls":40,"bytes":480}}}"#;
        assert_eq!(json, words);
        assert_eq!(serde_json::from_str::<Tallies>(&json).unwrap(), at_once);
    }
}
