//! Why a call is not done, from what all ranks have called.

use std::collections::BTreeMap;
use std::time::Duration;

use polarshard_partition::Rank;

use crate::{Error, Started, disagreement};

/// Why a call is not done: the earliest at which two ranks called different things, else whoever has
/// not come to it. `calls` has the latest ones of each rank in order, if it told them.
pub(super) fn verdict(stuck: &Started, deadline: Duration, calls: &[Option<&[Started]>]) -> Error {
    let mut by_sequence: BTreeMap<u64, Vec<&Started>> = BTreeMap::new();
    for call in calls.iter().copied().flatten().flatten() {
        by_sequence.entry(call.sequence).or_default().push(call);
    }
    for same in by_sequence.values() {
        for (i, one) in same.iter().enumerate() {
            let differs = same[..i].iter().find_map(|other| disagreement(other, one));
            if let Some(error) = differs {
                return error;
            }
        }
    }
    let is_there = |calls: &Option<&[Started]>| {
        let last = calls.and_then(<[Started]>::last);
        last.is_some_and(|call| call.sequence >= stuck.sequence)
    };
    let ranks = calls.iter().enumerate();
    Error::Deadline {
        started: Box::new(stuck.clone()),
        deadline,
        missing: ranks
            .filter(|(_, calls)| !is_there(calls))
            .map(|(rank, _)| Rank(rank))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use polarshard_partition::{Class, Span};

    use super::*;
    use crate::{Called, Op};

    fn call(rank: usize, sequence: u64, len: usize) -> Started {
        Started {
            rank: Rank(rank),
            sequence,
            called: Called::Request {
                class: Class::Gradient,
                dtype: DType::F32,
                ops: vec![Op::AllReduce(Span::of_len(0, len))],
            },
        }
    }

    /// Each rank's calls, from sequence 5 on, by length.
    fn judge(stuck: (usize, u64), lens: [Option<&[usize]>; 3]) -> Error {
        let calls: Vec<Option<Vec<Started>>> = lens
            .iter()
            .enumerate()
            .map(|(rank, lens)| {
                let all = lens.as_ref()?.iter().zip(5..);
                Some(
                    all.map(|(&len, sequence)| call(rank, sequence, len))
                        .collect(),
                )
            })
            .collect();
        let calls: Vec<Option<&[Started]>> = calls.iter().map(Option::as_deref).collect();
        let (rank, sequence) = stuck;
        let stuck = call(rank, sequence, 1);
        verdict(&stuck, Duration::from_secs(3), &calls)
    }

    #[test]
    fn the_earliest_difference_is_the_reason() {
        // Rank 2 went wrong at call 6, and the next ones are wrong as well.
        let error = judge(
            (0, 7),
            [Some(&[1, 2, 3]), Some(&[1, 2, 3]), Some(&[1, 3, 4])],
        );
        let Error::Mismatch { started, peer } = &error else {
            panic!("{error}");
        };
        assert_eq!((&**started, &**peer), (&call(0, 6, 2), &call(2, 6, 3)));
    }

    #[test]
    fn who_has_not_come_is_missing() {
        for (lens, want) in [
            (
                [Some(&[1, 2][..]), Some(&[1]), Some(&[1, 2, 3])],
                vec![Rank(1)],
            ),
            ([Some(&[1, 2]), Some(&[]), None], vec![Rank(1), Rank(2)]),
            ([Some(&[1, 2]), Some(&[1, 2]), Some(&[1, 2])], vec![]),
        ] {
            let error = judge((0, 6), lens);
            let Error::Deadline {
                missing, started, ..
            } = &error
            else {
                panic!("{error}");
            };
            assert_eq!((missing, started.sequence), (&want, 6));
        }
    }
}
