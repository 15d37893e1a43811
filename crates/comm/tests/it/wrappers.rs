//! Recording and faulty communicators, and rank threads.

use std::hint::black_box;
use std::time::Duration;

use candle_core::Device;
use polarshard_comm::ranks::Outcome;
use polarshard_comm::{
    Communicator, Error, Fault, Faulty, Op, Recording, Request, Shared, conformance, ranks,
};
use polarshard_partition::{Call, Class, Collective, Rank, Span, Wire};

use crate::{LONG, boxed, floats, run, size, world};

#[test]
fn every_operation_but_a_receive_is_recorded() {
    let outcomes = ranks::run(boxed(size(3)), |comm| {
        let mut comm = Recording::new(comm);
        let log = comm.log();
        let rank = comm.rank().0;
        let buffer = floats(&[1.0; 12]);
        let (root, span) = (Rank(2), Span::of_len(0, 5));
        run(&mut comm, Request::reduce_scatter(Class::Gradient, &buffer))?;
        let halves = buffer.to_dtype(candle_core::DType::BF16).unwrap();
        run(&mut comm, Request::all_gather(Class::Weight, &halves))?;
        let before = log.calls();
        assert_eq!(log.take(), before);

        let parcel = Span::of_len(5, 4);
        let mut ops = vec![Op::Reduce { span, root }];
        match rank {
            0 => ops.push(Op::Send {
                span: parcel,
                to: Rank(1),
            }),
            1 => ops.push(Op::Recv {
                span: parcel,
                from: Rank(0),
            }),
            _ => {}
        }
        run(
            &mut comm,
            Request::new(Class::Exchange, buffer.clone(), ops),
        )?;
        run(&mut comm, Request::broadcast(Class::Control, &buffer, root))?;
        // What is refused is not sent, and not recorded.
        let too_long = vec![Op::AllReduce(Span::of_len(0, 13))];
        run(&mut comm, Request::new(Class::Control, buffer, too_long)).unwrap_err();
        Box::new(comm).shutdown()?;
        Ok::<_, Error>((before, log.take(), log.calls()))
    });
    let call = |class, collective, elems, wire, root: Option<usize>| Call {
        class,
        collective,
        elems,
        wire,
        root: root.map(Rank),
    };
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let (before, after, rest) = outcome.unwrap();
        assert_eq!(
            before,
            [
                call(
                    Class::Gradient,
                    Collective::ReduceScatter,
                    12,
                    Wire::F32,
                    None
                ),
                call(Class::Weight, Collective::AllGather, 12, Wire::BF16, None),
            ]
        );
        let mut want = vec![call(
            Class::Exchange,
            Collective::Reduce,
            5,
            Wire::F32,
            Some(2),
        )];
        if rank == 0 {
            want.push(call(
                Class::Exchange,
                Collective::Send,
                4,
                Wire::F32,
                Some(1),
            ));
        }
        want.push(call(
            Class::Control,
            Collective::Broadcast,
            12,
            Wire::F32,
            Some(2),
        ));
        assert_eq!(after, want, "rank {rank}");
        assert!(rest.is_empty());
    }
}

/// Two all-reduces on two ranks, rank 1 with a fault in the second one: how both ranks end.
fn with_fault(fault: Fault) -> Vec<Outcome<Vec<f32>, Error>> {
    ranks::run(world(2), |comm| {
        let nth = if comm.rank() == Rank(1) { 1 } else { u64::MAX };
        let mut comm = Faulty::new(comm, nth, fault);
        let buffer = floats(&[1.0, 2.0]);
        run(&mut comm, Request::all_reduce(Class::Gradient, &buffer))?;
        run(&mut comm, Request::all_reduce(Class::Gradient, &buffer))?;
        Box::new(comm).shutdown()?;
        Ok(buffer.to_vec1().unwrap())
    })
}

#[test]
fn a_delayed_request_comes_in_the_end() {
    for outcome in with_fault(Fault::Delay(Duration::from_millis(1))) {
        assert_eq!(outcome.unwrap(), [4.0, 8.0]);
    }
}

#[test]
fn another_request_is_started_instead() {
    let shorter = |request: &Request| {
        let ops = vec![Op::AllReduce(Span::of_len(0, 1))];
        Request::new(request.class(), request.buffer().clone(), ops)
    };
    for outcome in with_fault(Fault::Replace(shorter)) {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}

#[test]
fn a_rank_that_leaves_hears_of_it_ever_after() {
    let mut comms = world(2).into_iter();
    let mut comm = Faulty::new(comms.next().unwrap(), 0, Fault::Leave);
    let buffer = floats(&[1.0]);
    let mut call = || run(&mut comm, Request::all_reduce(Class::Gradient, &buffer)).unwrap_err();
    let (first, second) = (call(), call());
    assert!(
        matches!(first, Error::PeerGone { peer: Rank(0), .. }),
        "{first}"
    );
    assert!(matches!(second, Error::Poisoned { .. }), "{second}");
    assert_eq!(
        (second.started().sequence, second.first().started().sequence),
        (1, 0)
    );
    let third = Box::new(comm).shutdown().unwrap_err();
    assert!(matches!(third, Error::Poisoned { .. }), "{third}");
}

#[test]
fn a_rank_may_go_on_after_a_request_that_was_not_started() {
    let outcomes = ranks::run(world(2), |comm| {
        let nth = if comm.rank() == Rank(1) { 0 } else { u64::MAX };
        let mut comm = Faulty::new(comm, nth, Fault::Fail);
        let buffer = floats(&[1.0]);
        let request = || Request::all_reduce(Class::Gradient, &buffer);
        let failed = match run(&mut comm, request()) {
            Err(error) => {
                assert!(matches!(error, Error::Injected { .. }) && !error.is_fatal());
                run(&mut comm, request())?;
                true
            }
            Ok(_) => false,
        };
        Box::new(comm).shutdown()?;
        Ok::<_, Error>((failed, buffer.to_vec1::<f32>().unwrap()))
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        assert_eq!(outcome.unwrap(), (rank == 1, vec![2.0]));
    }
}

#[test]
fn a_request_is_held_back_for_as_many_polls_as_asked() {
    let comm = world(1).pop().unwrap();
    let mut comm = Faulty::new(comm, 0, Fault::HoldBack { polls: 3 });
    let buffer = floats(&[5.0]);
    let pending = comm
        .start(Request::all_reduce(Class::Gradient, &buffer))
        .unwrap();
    // The second request is done after the first one, which by then is only held back.
    run(
        &mut comm,
        Request::all_reduce(Class::Gradient, &floats(&[1.0])),
    )
    .unwrap();
    let polls = [(); 5].map(|()| pending.is_done());
    assert_eq!(polls, [false, false, false, true, true]);
    assert_eq!(
        pending.finish(LONG).unwrap().to_vec1::<f32>().unwrap(),
        [5.0]
    );
}

#[test]
fn ranks_end_in_values() {
    let outcomes = ranks::run(vec![0, 1, 2, 3], |rank| match rank {
        0 => Ok("fine"),
        1 => Err("broken"),
        2 => panic!("rank {rank} gives up"),
        _ => std::panic::panic_any(7),
    });
    let panicked = |message: &str| Outcome::Panicked(message.to_owned());
    assert_eq!(
        outcomes,
        [
            Outcome::Done("fine"),
            Outcome::Failed("broken"),
            panicked("rank 2 gives up"),
            panicked("no message"),
        ]
    );
}

#[test]
fn ranks_have_deep_stacks() {
    fn descend(levels: usize) -> usize {
        let frame = black_box([levels; 128]);
        if levels == 0 {
            return 0;
        }
        descend(levels - 1) + frame[levels % 128] / levels
    }
    const LEVELS: usize = (16 << 20) / (128 * size_of::<usize>());
    let outcomes = ranks::run(vec![()], |()| Ok::<_, ()>(descend(LEVELS)));
    assert_eq!(outcomes, [Outcome::Done(LEVELS)]);
}

#[test]
fn handles_follow_each_other_in_one_world() {
    let outcomes = ranks::run(world(3), |comm| {
        let shared = Shared::new(comm);
        for case in conformance::CASES {
            (case.run)(Box::new(shared.clone()), &Device::Cpu).unwrap();
            assert_eq!(shared.rank(), shared.clone().rank());
        }
        let other = shared.clone();
        assert!(shared.into_inner().is_none());
        Box::new(other.into_inner().unwrap()).shutdown()
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}
