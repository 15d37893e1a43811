//! Ranks find each other over TCP, hear what is wrong, and notice when one goes away.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use candle_core::DType;
use polarshard_comm::tether::Tether;
use polarshard_comm::{
    Aspect, Called, Departure, Error, Introduction, Op, SetupError, Started, launch::Launch,
};
use polarshard_partition::{Class, Digest, Rank, Span};

use crate::{LONG, size};

const HOST: &str = "127.0.0.1";

/// Two ports in a row that nobody uses now.
fn free_ports() -> [u16; 2] {
    loop {
        let first = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = first.local_addr().unwrap().port();
        if port < u16::MAX && TcpListener::bind((Ipv4Addr::LOCALHOST, port + 1)).is_ok() {
            return [port, port + 1];
        }
    }
}

/// A rank as if it were a process of its own.
fn rank(rank: usize, world: usize) -> Introduction {
    let launch = Launch::new(Rank(rank), size(world), HOST, 1).unwrap();
    Introduction {
        process: 100 + rank as u32,
        ..Introduction::new(&launch, Digest(7))
    }
}

fn ranks(world: usize) -> Vec<Introduction> {
    (0..world).map(|r| rank(r, world)).collect()
}

/// All join at once, each on a thread.
fn join_at(
    who: Vec<Introduction>,
    ports: [u16; 2],
    deadline: Duration,
) -> Vec<Result<Tether, SetupError>> {
    thread::scope(|scope| {
        let join = |me| scope.spawn(move || Tether::join_as(me, HOST, ports, deadline));
        let threads: Vec<_> = who.into_iter().map(join).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn join(who: Vec<Introduction>, deadline: Duration) -> Vec<Result<Tether, SetupError>> {
    join_at(who, free_ports(), deadline)
}

fn world(ranks_of: usize) -> Vec<Tether> {
    join(ranks(ranks_of), LONG)
        .into_iter()
        .map(Result::unwrap)
        .collect()
}

/// Runs every rank on a thread, and returns what they return.
fn each<T: Send>(world: Vec<Tether>, run: impl Fn(Tether) -> T + Sync) -> Vec<T> {
    let run = &run;
    thread::scope(|scope| {
        let start = |tether| scope.spawn(move || run(tether));
        let threads: Vec<_> = world.into_iter().map(start).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn called(rank: Rank, sequence: u64, len: usize) -> Started {
    Started {
        rank,
        sequence,
        called: Called::Request {
            class: Class::Gradient,
            dtype: DType::F32,
            ops: vec![Op::AllReduce(Span::of_len(0, len))],
        },
    }
}

fn goodbye(rank: Rank, sequence: u64) -> Started {
    Started {
        rank,
        sequence,
        called: Called::Shutdown,
    }
}

#[test]
fn ranks_join_get_what_rank_0_hands_out_and_part() {
    for ranks_of in [1, 2, 5] {
        let got = each(world(ranks_of), |tether| {
            assert_eq!(tether.world().get(), ranks_of);
            let mine = (tether.rank() == Rank(0)).then(|| vec![1, 2, 255]);
            let got = tether.hand_out(mine, LONG).unwrap();
            let last = goodbye(tether.rank(), 0);
            tether.shutdown(&last, LONG).unwrap();
            got
        });
        assert_eq!(got, vec![vec![1, 2, 255]; ranks_of]);
    }
}

#[test]
fn worlds_follow_each_other_on_the_same_ports() {
    let ports = free_ports();
    thread::scope(|scope| {
        for me in ranks(3) {
            scope.spawn(move || {
                for _ in 0..10 {
                    let tether = Tether::join_as(me.clone(), HOST, ports, LONG).unwrap();
                    tether.shutdown(&goodbye(me.rank, 0), LONG).unwrap();
                }
            });
        }
    });
}

#[test]
fn ranks_that_do_not_fit_together_are_named_to_all() {
    let good = || ranks(4);
    let with = |at: usize, change: &dyn Fn(&mut Introduction)| {
        let mut who = good();
        change(&mut who[at]);
        who
    };
    for (who, aspect, culprit) in [
        (with(2, &|who| who.digest = Digest(8)), Aspect::Digest, 102),
        (
            with(3, &|who| who.version = "0.0.9, protocol 1".to_owned()),
            Aspect::Version,
            103,
        ),
        (with(1, &|who| who.world = size(5)), Aspect::World, 101),
        (with(3, &|who| who.rank = Rank(1)), Aspect::Rank, 103),
        (with(3, &|who| who.rank = Rank(0)), Aspect::Rank, 103),
    ] {
        let errors: Vec<SetupError> = join(who, LONG)
            .into_iter()
            .map(Result::unwrap_err)
            .collect();
        for error in &errors {
            let SetupError::Disagree {
                aspect: got,
                one,
                other,
            } = error
            else {
                panic!("{error}");
            };
            assert_eq!(*got, aspect, "{error}");
            assert!(
                [one, other].iter().any(|who| who.process == culprit),
                "{error}"
            );
            assert_eq!(error.to_string(), errors[0].to_string());
        }
    }
}

#[test]
fn the_error_says_what_each_side_has() {
    let mut who = ranks(2);
    who[1].digest = Digest(0xbeef);
    let error = join(who, LONG).pop().unwrap().unwrap_err();
    // Whoever came first is named first.
    let text = error.to_string();
    let zero = "rank 0 (process 100 on ";
    let one = "rank 1 (process 101 on 127.0.0.1) has the digest 000000000000beef";
    assert!(
        text.starts_with("two ranks are configured differently: "),
        "{text}"
    );
    assert!(text.contains(zero) && text.contains(one), "{text}");
    assert!(text.contains("has the digest 0000000000000007"), "{text}");
}

#[test]
fn who_does_not_come_is_named_to_all_and_so_is_who_came_instead() {
    let ports = free_ports();
    let deadline = Duration::from_millis(800);
    let mut who = ranks(4);
    who.remove(2);
    let browser = thread::spawn(move || {
        let begun = Instant::now();
        while begun.elapsed() < LONG {
            if let Ok(mut stream) = TcpStream::connect((HOST, ports[0])) {
                stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
                let mut answer = Vec::new();
                // Closed on it.
                let _ = stream.read_to_end(&mut answer);
                return;
            }
            thread::yield_now();
        }
    });
    for result in join_at(who, ports, deadline) {
        let error = result.unwrap_err();
        let SetupError::Deadline {
            missing, strangers, ..
        } = &error
        else {
            panic!("{error}");
        };
        assert_eq!(missing, &[Rank(2)]);
        assert_eq!(strangers.len(), 1, "{error}");
        assert!(error.to_string().contains("GET / HT"), "{error}");
    }
    browser.join().unwrap();
}

#[test]
fn a_held_port_is_left_for_the_next_one() {
    let ports = free_ports();
    let held = TcpListener::bind((Ipv4Addr::LOCALHOST, ports[0])).unwrap();
    // Like a store that does not know what to do with us.
    let store = thread::spawn(move || {
        for stream in held.incoming() {
            let mut stream = stream.unwrap();
            let mut byte = [0];
            if stream.read(&mut byte).unwrap_or(0) > 0 && byte == *b"q" {
                return;
            }
        }
    });
    let world = join_at(ranks(3), ports, LONG);
    assert!(world.iter().all(Result::is_ok), "{world:?}");
    drop(world);
    let mut quit = TcpStream::connect((HOST, ports[0])).unwrap();
    quit.write_all(b"q").unwrap();
    store.join().unwrap();
}

#[test]
fn without_a_port_everybody_hears_of_it() {
    let ports = free_ports();
    let _held = ports.map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap());
    let mut results = join_at(ranks(2), ports, Duration::from_millis(100)).into_iter();
    let zero = results.next().unwrap().unwrap_err();
    assert!(
        matches!(zero, SetupError::Listen { ports: got, .. } if got == ports),
        "{zero}"
    );
    let one = results.next().unwrap().unwrap_err();
    assert!(matches!(one, SetupError::Unreachable { .. }), "{one}");
    assert!(
        one.to_string().contains("does not answer as rank 0"),
        "{one}"
    );
}

#[test]
fn a_rank_too_many_is_turned_away_alone() {
    let ports = free_ports();
    let world = join_at(ranks(2), ports, LONG);
    assert!(world.iter().all(Result::is_ok), "{world:?}");
    let twin = Introduction {
        process: 999,
        ..rank(1, 2)
    };
    let error = Tether::join_as(twin, HOST, ports, LONG).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("two ranks are the same rank: "),
        "{error}"
    );
    each(world.into_iter().map(Result::unwrap).collect(), |tether| {
        tether.shutdown(&goodbye(tether.rank(), 0), LONG).unwrap();
    });
}

#[test]
fn another_run_is_turned_away_alone() {
    let ports = free_ports();
    let mut who = ranks(2);
    who.iter_mut().for_each(|who| who.job = "a".to_owned());
    let stray = Introduction {
        job: "b".to_owned(),
        ..rank(1, 2)
    };
    let (own, other) = thread::scope(|scope| {
        let zero = who.remove(0);
        let zero = scope.spawn(move || Tether::join_as(zero, HOST, ports, LONG));
        let other = Tether::join_as(stray, HOST, ports, Duration::from_secs(3));
        let one = Tether::join_as(who.remove(0), HOST, ports, LONG);
        ([zero.join().unwrap(), one], other)
    });
    assert!(own.iter().all(Result::is_ok), "{own:?}");
    let error = other.unwrap_err();
    assert!(
        error
            .to_string()
            .contains("belongs to the run \"a\", this one to \"b\""),
        "{error}"
    );
}

#[test]
fn a_rank_that_goes_away_is_named() {
    for leaver in [0, 2] {
        for how in [Departure::Returned, Departure::Panicked] {
            let errors = each(world(3), |tether| {
                let call = called(tether.rank(), 4, 8);
                if tether.rank() == Rank(leaver) {
                    tether.leave(how, None);
                    return None;
                }
                // The shutdown that never comes.
                Some(tether.shutdown(&call, LONG).unwrap_err())
            });
            for error in errors.into_iter().flatten() {
                let Error::PeerGone {
                    peer,
                    how: got,
                    started,
                } = &error
                else {
                    panic!("{error}");
                };
                assert_eq!((*peer, *got, started.sequence), (Rank(leaver), how, 4));
            }
        }
    }
}

#[test]
fn a_rank_that_fails_while_the_world_is_built_says_why() {
    let errors = each(world(3), |tether| {
        if tether.rank() == Rank(0) {
            let said = Some("no device".to_owned());
            tether.leave(Departure::Returned, said);
            return None;
        }
        Some(tether.hand_out(None, LONG).unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.to_string(), "rank 0 returned early: no device");
    }
}

#[test]
fn a_failure_of_one_rank_is_told_to_all() {
    let errors = each(world(3), |tether| {
        let call = called(tether.rank(), 1, 8);
        if tether.rank() == Rank(1) {
            let failure = Error::Backend {
                started: Box::new(call),
                message: "broken".to_owned(),
            };
            tether.fail(&failure);
            return failure;
        }
        tether.shutdown(&call, LONG).unwrap_err()
    });
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(matches!(error, Error::Poisoned { .. }), rank != 1);
        assert_eq!(error.first().to_string(), errors[1].to_string());
    }
}

#[test]
fn calls_that_differ_are_told_to_both_sides() {
    let all_called = Barrier::new(4);
    let errors = each(world(4), |tether| {
        let rank = tether.rank();
        // Rank 2 calls a shorter one at 1, and does not know yet.
        let lens = if rank == Rank(2) {
            [8, 7, 8]
        } else {
            [8, 8, 8]
        };
        for (len, sequence) in lens.into_iter().zip(0..) {
            tether.note(&called(rank, sequence, len)).unwrap();
        }
        // A rank that had not come so far yet would be missing.
        all_called.wait();
        tether.expire(&called(rank, 2, 8), Duration::from_secs(9))
    });
    for (rank, error) in errors.iter().enumerate() {
        let Error::Mismatch { started, peer } = error.first() else {
            panic!("{error}");
        };
        let sides = [started, peer];
        assert!(
            sides.contains(&&Box::new(called(Rank(2), 1, 7))),
            "{rank}: {error}"
        );
        let sides = sides.iter().all(|side| side.sequence == 1);
        assert!(sides, "{rank}: {error}");
    }
}

#[test]
fn who_has_not_come_to_a_call_is_missing() {
    let others_called = Barrier::new(2);
    let errors = each(world(3), |tether| {
        let rank = tether.rank();
        tether.note(&called(rank, 0, 8)).unwrap();
        let call = called(rank, 1, 8);
        if rank == Rank(1) {
            // Elsewhere, until it hears that it is late.
            loop {
                if let Some(error) = tether.failure(&call) {
                    return error;
                }
                thread::yield_now();
            }
        }
        tether.note(&call).unwrap();
        others_called.wait();
        tether.expire(&call, Duration::from_secs(9))
    });
    for (rank, error) in errors.iter().enumerate() {
        let Error::Deadline {
            missing, deadline, ..
        } = error.first()
        else {
            panic!("{error}");
        };
        assert_eq!(
            (missing.as_slice(), deadline.as_secs()),
            (&[Rank(1)][..], 9)
        );
        assert_eq!(
            matches!(error, Error::Poisoned { .. }),
            rank == 1,
            "{error}"
        );
    }
}

#[test]
fn one_ranks_pause_stops_all_clocks() {
    let is_stopped = |tether: &Tether| {
        let (before, begun) = (tether.running(), Instant::now());
        while begun.elapsed() < Duration::from_millis(20) {
            thread::yield_now();
        }
        tether.running() == before
    };
    let all_looked = Barrier::new(3);
    each(world(3), |tether| {
        // What rank 0 hands out arrives after what it did before.
        let fence = || {
            let mine = (tether.rank() == Rank(0)).then(Vec::new);
            tether.hand_out(mine, LONG).unwrap();
        };
        let pauses = (tether.rank() == Rank(0)).then(|| [tether.pause(), tether.pause()]);
        fence();
        assert!(is_stopped(&tether));
        all_looked.wait();
        // One guard is left.
        let left = pauses.map(|[one, other]| {
            drop(one);
            other
        });
        fence();
        assert!(is_stopped(&tether));
        all_looked.wait();
        drop(left);
        fence();
        assert!(!is_stopped(&tether));
        tether.shutdown(&goodbye(tether.rank(), 0), LONG).unwrap();
    });
}
