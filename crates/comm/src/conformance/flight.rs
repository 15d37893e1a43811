//! Requests in flight: their order, their end, and those that never take off.

use std::thread;

use candle_core::{DType, Device, Tensor};
use polarshard_partition::{Class, Rank, Span};

use super::{DTYPES, Rig, Verdict, ensure, expect};
use crate::{Communicator, Error, Invalid, Op, Request};

/// Requests of all classes and dtypes outstanding at once, finished in reverse order.
pub(super) fn many(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    const CLASSES: [Class; 4] = [
        Class::Gradient,
        Class::Exchange,
        Class::Weight,
        Class::Control,
    ];
    let deadline = rig.comm.deadline();
    let mut flight = Vec::new();
    for i in 0..40 {
        let (class, dtype, len) = (CLASSES[i % 4], DTYPES[i / 3 % 4], 1 + 13 * i);
        let mine = rig.mine(dtype, len)?;
        let root = Rank(i % rig.size());
        let (request, want) = if i % 2 == 0 {
            (
                Request::all_reduce(class, &mine),
                rig.sums(Span::of_len(0, len)),
            )
        } else {
            (
                Request::broadcast(class, &mine, root),
                Rig::values(root.0, Span::of_len(0, len)),
            )
        };
        flight.push((i, rig.comm.start(request)?, want));
    }
    for (i, pending, want) in flight.into_iter().rev() {
        expect(
            format_args!("request {i}"),
            &pending.finish(deadline)?,
            &want,
        )?;
    }
    rig.shutdown()
}

/// A request whose pending is dropped happens all the same, before the next one.
pub(super) fn dropped(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    let span = Span::of_len(0, 50);
    let unheard = rig.mine(DType::F32, span.len())?;
    drop(
        rig.comm
            .start(Request::all_reduce(Class::Gradient, &unheard))?,
    );
    let heard = rig.mine(DType::F32, span.len())?;
    rig.request(Request::all_reduce(Class::Gradient, &heard))?;
    let want = rig.sums(span);
    expect("the next request", &heard, &want)?;
    expect("the dropped request", &unheard, &want)?;
    rig.shutdown()
}

/// The three ways to the result: each gives the caller's own buffer back.
pub(super) fn verbs(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    let len = 20;
    let want = rig.sums(Span::of_len(0, len));
    let deadline = rig.comm.deadline();

    let mine = rig.mine(DType::F32, len)?;
    let pending = rig.comm.start(Request::all_reduce(Class::Control, &mine))?;
    expect("wait", &pending.wait()?, &want)?;
    expect("the buffer after wait", &mine, &want)?;

    let mine = rig.mine(DType::F32, len)?;
    let pending = rig.comm.start(Request::all_reduce(Class::Control, &mine))?;
    // The world's deadline ends this loop: a request that fails is done as well.
    while !pending.is_done() {
        thread::yield_now();
    }
    ensure(pending.is_done(), "what is done stays done")?;
    expect("finish", &pending.finish(deadline)?, &want)?;
    expect("the buffer after finish", &mine, &want)?;

    // Work on the result of one request is seen by the next one.
    let doubled = (rig.request(Request::all_reduce(Class::Control, &mine))? * 2.0)?;
    let got = rig.request(Request::all_reduce(Class::Control, &doubled))?;
    let factor = 2.0 * (rig.size() * rig.size()) as f64;
    let want: Vec<f64> = want.iter().map(|sum| factor * sum).collect();
    expect("a chain of requests", &got, &want)?;
    rig.shutdown()
}

/// What is wrong by itself is refused on the spot, and the world goes on.
pub(super) fn refused(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    let world = rig.comm.world();
    let outside = Rank(world.get());
    let buffer = rig.mine(DType::F32, 12 * world.get())?;
    let span = Span::of_len(0, 12 * world.get());
    let beyond = span.shift(1);
    let on_buffer = |op: Op| Request::new(Class::Control, buffer.clone(), vec![op]);
    let on_span = |tensor: Tensor| {
        Request::new(
            Class::Control,
            tensor,
            vec![Op::AllReduce(Span::of_len(0, 1))],
        )
    };
    let matrix = Tensor::zeros((3, 4), DType::F32, device)?;
    let column = matrix.narrow(1, 0, 1)?.squeeze(1)?;
    let wrong = [
        on_span(matrix),
        on_span(column),
        on_span(Tensor::zeros(3, DType::U32, device)?),
        on_buffer(Op::AllReduce(beyond)),
        on_buffer(Op::Reduce {
            span,
            root: outside,
        }),
        on_buffer(Op::Send { span, to: outside }),
        Request::new(
            Class::Control,
            buffer.clone(),
            vec![Op::AllReduce(span), Op::AllReduce(Span::of_len(3, 1))],
        ),
    ];
    let is_expected = |i: usize, reason: &Invalid| match i {
        0 => matches!(reason, Invalid::NotFlat { .. }),
        1 => matches!(reason, Invalid::NotContiguous { .. }),
        2 => matches!(reason, Invalid::Dtype { .. }),
        3 => matches!(reason, Invalid::OutOfBounds { .. }),
        4 | 5 => matches!(reason, Invalid::OutsideWorld { .. }),
        _ => matches!(reason, Invalid::Overlap { .. }),
    };
    for (i, request) in wrong.into_iter().enumerate() {
        refuse(&mut rig, request, |reason| is_expected(i, reason))?;
    }
    if world.get() > 1 {
        for op in [Op::ReduceScatter, Op::AllGather] {
            let span = Span::of_len(0, world.get() + 1);
            refuse(&mut rig, on_buffer(op(span)), |reason| {
                matches!(reason, Invalid::Indivisible { .. })
            })?;
        }
    }
    rig.request(Request::all_reduce(Class::Control, &buffer))?;
    expect("the world goes on", &buffer, &rig.sums(span))?;
    rig.shutdown()
}

fn refuse(rig: &mut Rig<'_>, request: Request, expected: impl Fn(&Invalid) -> bool) -> Verdict {
    let called = request.called();
    match rig.comm.start(request) {
        Err(error @ Error::Invalid { .. }) => {
            let Error::Invalid { started, reason } = &error else {
                unreachable!("matched above");
            };
            ensure(expected(reason), format_args!("another reason: {error}"))?;
            ensure(!error.is_fatal(), "a refusal is not the end of the world")?;
            ensure(
                started.rank == rig.comm.rank() && started.called == called,
                format_args!("the error is about another call: {error}"),
            )
        }
        Err(error) => Err(error.into()),
        Ok(_) => Err(format!("{called} was not refused").into()),
    }
}

/// Guards come and go, on one rank or several, while requests run.
pub(super) fn paused(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    let span = Span::of_len(0, 8);
    let outer = (rig.rank() == 0).then(|| rig.comm.pause());
    for i in 0..4 {
        let inner = (i % 2 == 0).then(|| rig.comm.pause());
        let mine = rig.mine(DType::F32, span.len())?;
        rig.request(Request::all_reduce(Class::Control, &mine))?;
        drop(inner);
        expect(format_args!("request {i}"), &mine, &rig.sums(span))?;
    }
    drop(outer);
    rig.shutdown()
}
