//! The rendezvous under a scheduler that explores the interleavings, with a clock of its own.

use std::sync::Arc;
use std::time::Duration;

use candle_core::DType;
use polarshard_comm::rendezvous::{Rendezvous, State};
use polarshard_comm::sync::{Look, Monitor};
use polarshard_comm::{Called, Departure, Error, Op, Started};
use polarshard_partition::{Class, Rank, Span};
use shuttle::rand::Rng;
use shuttle::sync::{Condvar, Mutex};

use crate::size;

type Payload = Vec<u64>;
type Explored = Rendezvous<Payload, Scheduled<State<Payload>>>;

/// A deadline that never comes: a rank that waits in vain is a deadlock, which the scheduler finds.
const NEVER: Duration = Duration::MAX;
const SOON: Duration = Duration::from_secs(1);
const ITERATIONS: usize = 1000;

/// A monitor whose time passes when the scheduler says so.
struct Scheduled<S> {
    state: Mutex<(S, Duration)>,
    changed: Condvar,
}

impl<S> Monitor<S> for Scheduled<S> {
    fn new(state: S) -> Self {
        Self {
            state: Mutex::new((state, Duration::ZERO)),
            changed: Condvar::new(),
        }
    }

    fn update<R>(&self, change: impl FnOnce(&mut S, Duration) -> R) -> R {
        let mut guard = self.state.lock().unwrap();
        let (state, now) = &mut *guard;
        let result = change(state, *now);
        self.changed.notify_all();
        result
    }

    fn wait<R>(&self, mut look: impl FnMut(&mut S, Duration) -> Look<R>) -> R {
        let mut guard = self.state.lock().unwrap();
        loop {
            let (state, now) = &mut *guard;
            if shuttle::rand::thread_rng().gen_bool(0.1) {
                *now += SOON;
            }
            match look(state, *now) {
                Look::Found(result) => {
                    self.changed.notify_all();
                    return result;
                }
                Look::Again(None | Some(NEVER)) => guard = self.changed.wait(guard).unwrap(),
                Look::Again(Some(until)) => {
                    if shuttle::rand::thread_rng().gen_bool(0.2) {
                        *now = until.max(*now);
                    }
                    drop(guard);
                    shuttle::thread::yield_now();
                    guard = self.state.lock().unwrap();
                }
            }
        }
    }
}

fn started(rank: usize, sequence: u64, len: usize) -> Started {
    Started {
        rank: Rank(rank),
        sequence,
        called: Called::Request {
            class: Class::Control,
            dtype: DType::F32,
            ops: vec![Op::AllReduce(Span::of_len(0, len))],
        },
    }
}

type Met = Result<Arc<[Payload]>, Error>;

/// Runs ranks on a fresh rendezvous, over all the schedules, and hands what each met to `check`.
fn explore(
    ranks: usize,
    deadline: Duration,
    rank: impl Fn(usize, &Arc<Explored>) -> Vec<Met> + Send + Sync + Copy + 'static,
    check: impl Fn(Vec<Vec<Met>>) + Send + Sync + Copy + 'static,
) {
    let scenario = move || {
        let meeting = Arc::new(Explored::new(size(ranks), deadline));
        let start = |r| {
            let meeting = Arc::clone(&meeting);
            shuttle::thread::spawn(move || rank(r, &meeting))
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        let met = threads.into_iter().map(|t| t.join().unwrap()).collect();
        check(met);
    };
    shuttle::check_random(scenario, ITERATIONS);
    // One rank alone has nothing to interleave with, which this scheduler takes for a mistake.
    if ranks > 1 {
        shuttle::check_pct(scenario, ITERATIONS, 3);
    }
}

fn meet(meeting: &Explored, rank: usize, round: u64, len: usize) -> Met {
    let payload = vec![100 * round + rank as u64; len];
    meeting.meet(&started(rank, round, len), payload)
}

/// Whether every rank met every other one's payload of this round.
fn assert_met(met: &Met, ranks: usize, round: u64) {
    let want: Vec<Payload> = (0..ranks as u64)
        .map(|r| vec![100 * round + r; 2])
        .collect();
    match met {
        Ok(payloads) => assert_eq!(**payloads, *want),
        Err(error) => panic!("round {round}: {error}"),
    }
}

#[test]
fn all_ranks_meet_in_every_round() {
    for ranks in 1..=4 {
        explore(
            ranks,
            NEVER,
            |rank, meeting| (0..4).map(|round| meet(meeting, rank, round, 2)).collect(),
            move |met| {
                for rounds in met {
                    assert_eq!(rounds.len(), 4);
                    for (round, met) in rounds.iter().enumerate() {
                        assert_met(met, ranks, round as u64);
                    }
                }
            },
        );
    }
}

#[test]
fn a_rank_that_leaves_early_is_named_by_all_others() {
    for ranks in 2..=4 {
        explore(
            ranks,
            NEVER,
            |rank, meeting| {
                let rounds = if rank == 1 { 2 } else { 4 };
                let met = (0..rounds)
                    .map(|round| meet(meeting, rank, round, 2))
                    .collect();
                if rank == 1 {
                    meeting.leave(Rank(1), Departure::Returned);
                }
                met
            },
            move |met| {
                for (rank, rounds) in met.iter().enumerate() {
                    assert_met(&rounds[0], ranks, 0);
                    assert_met(&rounds[1], ranks, 1);
                    if rank == 1 {
                        continue;
                    }
                    let gone = rounds[2].as_ref().unwrap_err();
                    assert!(
                        matches!(gone, Error::PeerGone { peer: Rank(1), .. }),
                        "{gone}"
                    );
                    assert_eq!(gone.started(), &started(rank, 2, 2));
                    let later = rounds[3].as_ref().unwrap_err();
                    assert!(matches!(later, Error::Poisoned { .. }), "{later}");
                    assert!(matches!(
                        later.first(),
                        Error::PeerGone { peer: Rank(1), .. }
                    ));
                }
            },
        );
    }
}

#[test]
fn a_mismatch_is_found_whoever_comes_first() {
    for ranks in 2..=4 {
        explore(
            ranks,
            NEVER,
            |rank, meeting| {
                let other = |round| if rank == 0 && round == 1 { 3 } else { 2 };
                (0..3)
                    .map(|round| meet(meeting, rank, round, other(round)))
                    .collect()
            },
            move |met| {
                for (rank, rounds) in met.iter().enumerate() {
                    assert_met(&rounds[0], ranks, 0);
                    for met in &rounds[1..] {
                        let error = met.as_ref().unwrap_err();
                        assert_eq!(error.started().rank, Rank(rank));
                        let Error::Mismatch {
                            started: a,
                            peer: b,
                        } = error.first()
                        else {
                            panic!("{error}");
                        };
                        let culprit = started(0, 1, 3);
                        assert!((a.as_ref() == &culprit) != (b.as_ref() == &culprit));
                    }
                    let own = rounds[1].as_ref().unwrap_err();
                    assert!(rank > 0 || matches!(own, Error::Mismatch { .. }), "{own}");
                }
            },
        );
    }
}

#[test]
fn a_deadline_ends_a_round_for_all_ranks_or_for_none() {
    explore(
        3,
        SOON,
        |rank, meeting| (0..3).map(|round| meet(meeting, rank, round, 2)).collect(),
        |met| {
            for round in 0..3 {
                let ends: Vec<bool> = met.iter().map(|rounds| rounds[round].is_ok()).collect();
                assert!(
                    ends.iter().all(|end| *end == ends[0]),
                    "round {round}: {ends:?}"
                );
                for rounds in &met {
                    match &rounds[round] {
                        Ok(_) => assert_met(&rounds[round], 3, round as u64),
                        Err(error) => {
                            let Error::Deadline { missing, .. } = error.first() else {
                                panic!("{error}");
                            };
                            assert!((1..3).contains(&missing.len()), "{missing:?}");
                        }
                    }
                }
            }
        },
    );
}

#[test]
fn no_deadline_comes_while_a_rank_pauses() {
    explore(
        3,
        SOON,
        |rank, meeting| {
            let pause = (rank == 0).then(|| meeting.pause());
            // Once this round is over, the pause has begun.
            let first = meet(meeting, rank, 0, 2);
            let second = first.is_ok().then(|| meet(meeting, rank, 1, 2));
            drop(pause);
            second.into_iter().collect()
        },
        |met| {
            // Before the pause a deadline may come; then no rank gets further.
            let further: Vec<usize> = met.iter().map(Vec::len).collect();
            assert!(further.iter().all(|len| *len == further[0]), "{further:?}");
            for rounds in met {
                for met in &rounds {
                    assert_met(met, 3, 1);
                }
            }
        },
    );
}
