//! One rank goes wrong: every other one hears of it, in the right words, and nothing hangs.

use std::sync::Barrier;
use std::time::Duration;

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape};
use polarshard_comm::{
    Called, Communicator, Departure, Error, Fault, Faulty, Loopback, Op, Request, Started, ranks,
};
use polarshard_partition::{Class, Rank, Span};

use crate::{LONG, floats, run, size, world};

const CULPRIT: Rank = Rank(2);

/// What the ranks do, each time on 8 elements.
fn good(class: Class) -> Request {
    Request::all_reduce(class, &floats(&[1.0; 8]))
}

/// A good request on 4 ranks, one that goes wrong on the culprit, and another good one: the errors of
/// the last two on the others, and the culprit's own error of the first of these if it did not panic.
fn errors(fault: Fault) -> (Vec<(Rank, Error, Error)>, Option<Error>) {
    let outcomes = ranks::run(world(4), |comm| {
        let rank = comm.rank();
        let nth = if rank == CULPRIT { 1 } else { u64::MAX };
        let mut comm = Faulty::new(comm, nth, fault);
        run(&mut comm, good(Class::Gradient))?;
        let first = run(&mut comm, good(Class::Gradient)).unwrap_err();
        if rank == CULPRIT {
            return Err(first);
        }
        let second = run(&mut comm, good(Class::Gradient)).unwrap_err();
        let last = Box::new(comm).shutdown().unwrap_err();
        assert!(matches!(last, Error::Poisoned { .. }), "{last}");
        Ok((rank, first, second))
    });
    let (mut others, mut own) = (Vec::new(), None);
    for outcome in outcomes {
        match outcome {
            ranks::Outcome::Done(errors) => others.push(errors),
            ranks::Outcome::Failed(error) => own = Some(error),
            ranks::Outcome::Panicked(message) => {
                assert!(message.contains("on purpose"), "{message}");
            }
        }
    }
    assert_eq!(others.len(), 3);
    for (rank, first, second) in &others {
        assert!(first.is_fatal() && second.is_fatal());
        assert_eq!((first.started().rank, first.started().sequence), (*rank, 1));
        assert_eq!(
            (second.started().rank, second.started().sequence),
            (*rank, 2)
        );
        assert!(matches!(second, Error::Poisoned { .. }), "{second}");
        // All carry the same first failure.
        assert_eq!(second.first().to_string(), others[0].2.first().to_string());
    }
    (others, own)
}

#[test]
fn a_rank_that_panics_or_leaves_is_named_at_once() {
    for (fault, departure) in [
        (Fault::Panic, Departure::Panicked),
        (Fault::Leave, Departure::Returned),
    ] {
        let (others, _) = errors(fault);
        for (_, first, _) in others {
            let Error::PeerGone { peer, how, .. } = &first else {
                panic!("{first}");
            };
            assert_eq!((*peer, *how), (CULPRIT, departure));
        }
    }
}

fn other_collective(request: &Request) -> Request {
    Request::reduce_scatter(request.class(), request.buffer())
}

fn other_size(request: &Request) -> Request {
    Request::all_reduce(request.class(), &request.buffer().narrow(0, 0, 7).unwrap())
}

fn other_dtype(request: &Request) -> Request {
    Request::all_reduce(
        request.class(),
        &request.buffer().to_dtype(DType::F64).unwrap(),
    )
}

fn other_class(request: &Request) -> Request {
    Request::all_reduce(Class::Weight, request.buffer())
}

fn other_number(request: &Request) -> Request {
    let ops = vec![
        Op::AllReduce(Span::new(0, 4)),
        Op::AllReduce(Span::new(4, 8)),
    ];
    Request::new(request.class(), request.buffer().clone(), ops)
}

fn nothing(request: &Request) -> Request {
    Request::new(request.class(), request.buffer().clone(), Vec::new())
}

#[test]
fn a_rank_that_calls_something_else_is_named_with_both_calls() {
    for other in [
        other_collective,
        other_size,
        other_dtype,
        other_class,
        other_number,
        nothing,
    ] {
        let right = good(Class::Gradient).called();
        let wrong = other(&good(Class::Gradient)).called();
        let (others, own) = errors(Fault::Replace(other));
        let own = own.unwrap();
        for error in others.iter().map(|(_, first, _)| first).chain([&own]) {
            let Error::Mismatch { started, peer } = error.first() else {
                panic!("{error}");
            };
            let called = |party: &Started| {
                let is_culprit = party.rank == CULPRIT;
                let want = if is_culprit { &wrong } else { &right };
                assert_eq!((&party.called, party.sequence), (want, 1));
                is_culprit
            };
            assert_ne!(called(started), called(peer), "{error}");
        }
        // The culprit is party to it, so it is told what the other side did.
        assert!(matches!(own, Error::Mismatch { .. }), "{own}");
        assert_eq!(own.started().rank, CULPRIT);
    }
}

#[test]
fn both_sides_of_a_mismatch_see_it_as_their_own() {
    let outcomes = ranks::run(world(2), |mut comm| {
        let root = comm.rank();
        run(
            &mut comm,
            Request::broadcast(Class::Weight, &floats(&[1.0; 3]), root),
        )
    });
    let texts: Vec<String> = outcomes
        .into_iter()
        .map(|outcome| outcome.unwrap_err().to_string())
        .collect();
    let call = |rank| format!("rank {rank}, call 0, weight broadcast of 3 from rank {rank} f32");
    let (zero, one) = (call(0), call(1));
    assert_eq!(
        texts,
        [
            format!("{zero}, does not match {one}"),
            format!("{one}, does not match {zero}")
        ]
    );
}

#[test]
fn a_send_and_a_receive_of_different_lengths_are_named() {
    for (receives, received) in [(1, Some(4)), (0, None)] {
        let outcomes = ranks::run(world(3), |mut comm| {
            let ops = match comm.rank() {
                Rank(0) => vec![Op::Send {
                    span: Span::of_len(0, 3),
                    to: Rank(1),
                }],
                Rank(1) => {
                    let receive = Op::Recv {
                        span: Span::of_len(0, 4),
                        from: Rank(0),
                    };
                    vec![receive; receives]
                }
                _ => Vec::new(),
            };
            run(
                &mut comm,
                Request::new(Class::Exchange, floats(&[0.0; 4]), ops),
            )
        });
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            let error = outcome.unwrap_err();
            let Error::Unpaired {
                from,
                to,
                n,
                sent,
                received: got,
                ..
            } = error.first()
            else {
                panic!("{error}");
            };
            assert_eq!((*from, *to, *n), (Rank(0), Rank(1), 0));
            assert_eq!((*sent, *got), (Some(3), received));
            assert_eq!(
                matches!(error, Error::Poisoned { .. }),
                rank == 2,
                "{error}"
            );
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_when_the_deadline_is_over() {
    let deadline = Duration::from_millis(200);
    let (begun, over) = (Barrier::new(3), Barrier::new(4));
    let outcomes = ranks::run(Loopback::world(size(4), deadline), |mut comm| {
        if comm.rank() == CULPRIT {
            // There, but late.
            over.wait();
            return Ok(run(&mut comm, good(Class::Gradient)).unwrap_err());
        }
        // No deadline runs before all but the culprit have come.
        let pause = comm.pause();
        let pending = comm.start(good(Class::Gradient))?;
        begun.wait();
        drop(pause);
        let error = pending.wait().unwrap_err();
        over.wait();
        Ok::<_, Error>(error)
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let error = outcome.unwrap();
        let Error::Deadline {
            missing,
            deadline: given,
            ..
        } = error.first()
        else {
            panic!("{error}");
        };
        assert_eq!((missing.as_slice(), *given), (&[CULPRIT][..], deadline));
        let is_late = matches!(error, Error::Poisoned { .. });
        assert_eq!(is_late, Rank(rank) == CULPRIT, "{error}");
    }
}

#[test]
fn a_shorter_deadline_of_the_caller_ends_the_world() {
    let mut comms = world(2);
    let pending = comms[0].start(good(Class::Control)).unwrap();
    let error = pending.finish(Duration::ZERO).unwrap_err();
    let Error::Deadline { missing, .. } = &error else {
        panic!("{error}");
    };
    assert!(missing.contains(&Rank(1)), "{error}");
    let late = run(&mut comms[1], good(Class::Control)).unwrap_err();
    assert!(matches!(late.first(), Error::Deadline { .. }), "{late}");
}

#[test]
fn outstanding_requests_all_end_in_errors() {
    let mut comms = world(2);
    let pendings: Vec<_> = [(); 3]
        .map(|()| comms[0].start(good(Class::Gradient)).unwrap())
        .into();
    drop(comms.pop());
    for (i, pending) in pendings.into_iter().enumerate() {
        let error = pending.finish(LONG).unwrap_err();
        assert_eq!(error.started().sequence, i as u64);
        assert_eq!(matches!(error, Error::Poisoned { .. }), i > 0, "{error}");
        let Error::PeerGone { peer, .. } = error.first() else {
            panic!("{error}");
        };
        assert_eq!(*peer, Rank(1));
    }
}

#[test]
fn shutting_down_while_another_rank_goes_on_is_a_mismatch() {
    let outcomes = ranks::run(world(2), |mut comm| match comm.rank() {
        Rank(0) => Box::new(comm).shutdown(),
        _ => run(&mut comm, good(Class::Gradient)).map(drop),
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let error = outcome.unwrap_err();
        let Error::Mismatch { started, peer } = &error else {
            panic!("{error}");
        };
        let calls = [Called::Shutdown, good(Class::Gradient).called()];
        assert_eq!(started.called, calls[rank]);
        assert_eq!(peer.called, calls[1 - rank]);
    }
}

#[test]
fn shutdown_waits_for_what_is_outstanding() {
    let buffers = [(); 3].map(|()| floats(&[1.0; 8]));
    let outcomes = ranks::run(world(3), |mut comm| {
        let buffer = buffers[comm.rank().0].clone();
        drop(comm.start(Request::all_reduce(Class::Gradient, &buffer))?);
        Box::new(comm).shutdown()
    });
    outcomes.into_iter().for_each(ranks::Outcome::unwrap);
    for buffer in buffers {
        assert_eq!(buffer.to_vec1::<f32>().unwrap(), [3.0; 8]);
    }
}

/// Makes a tensor whose storage is shorter than its shape says: to read it panics.
struct TooShort;

impl CustomOp1 for TooShort {
    fn name(&self) -> &'static str {
        "too-short"
    }

    fn cpu_fwd(&self, _: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), layout.shape().clone()))
    }
}

#[test]
fn a_panic_between_the_ranks_ends_the_world_instead_of_hanging_it() {
    let outcomes = ranks::run(world(2), |mut comm| {
        let mut buffer = floats(&[1.0; 8]);
        if comm.rank() == Rank(0) {
            buffer = buffer.apply_op1_no_bwd(&TooShort).unwrap();
        }
        run(&mut comm, Request::all_reduce(Class::Gradient, &buffer))
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let error = outcome.unwrap_err();
        assert_eq!(matches!(error, Error::Panicked { .. }), rank == 0);
        assert!(matches!(error.first(), Error::Panicked { .. }), "{error}");
        assert_eq!(error.first().started().rank, Rank(0));
    }
}
