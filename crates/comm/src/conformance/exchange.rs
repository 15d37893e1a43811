//! Sends and receives, and groups.

use candle_core::{DType, Device};
use polarshard_partition::{Rank, Span};

use super::{DTYPES, Rig, UNTOUCHED, Verdict, expect, ranks_of};
use crate::{Communicator, Op};

/// Every kind of operation in one group, several times over, on disjoint spans of one buffer.
pub(super) fn group(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    const ROUNDS: usize = 10;
    let size = rig.size();
    for dtype in DTYPES {
        let (mut ops, mut want) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let root = Rank(round % size);
            let span = Span::of_len(want.len(), 3 + round);
            ops.push(Op::AllReduce(span));
            want.extend(rig.sums(span));

            let span = Span::of_len(want.len(), 1 + round);
            ops.push(Op::Reduce { span, root });
            want.extend(if root.0 == rig.rank() {
                rig.sums(span)
            } else {
                Rig::values(rig.rank(), span)
            });

            let span = Span::of_len(want.len(), 2 * size);
            ops.push(Op::AllGather(span));
            for rank in 0..size {
                want.extend(Rig::values(rank, Span::of_len(span.start + 2 * rank, 2)));
            }

            let span = Span::of_len(want.len(), round);
            ops.push(Op::Broadcast { span, root });
            want.extend(Rig::values(root.0, span));

            // An element between the operations that stays as it is.
            want.extend(Rig::values(rig.rank(), Span::of_len(want.len(), 1)));
        }
        let mine = rig.mine(dtype, want.len())?;
        rig.run(&mine, ops)?;
        expect(format_args!("{dtype:?}"), &mine, &want)?;
    }
    rig.shutdown()
}

/// Each rank sends to its right and receives from its left, twice over, in one group: the n-th
/// receive takes the n-th send.
pub(super) fn ring(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    let (rank, size) = (rig.rank(), rig.size());
    let (right, left) = ((rank + 1) % size, (rank + size - 1) % size);
    for dtype in DTYPES {
        for len in [0, 1, 7, 400] {
            let (first, second) = (Span::of_len(0, len), Span::of_len(len, len + 1));
            let mut values = Rig::values(rank, Span::of_len(0, 2 * len + 1));
            values.extend(vec![UNTOUCHED; 2 * len + 1]);
            let buffer = rig.tensor(dtype, values.clone())?;
            let (to, from) = (Rank(right), Rank(left));
            let by = 2 * len + 1;
            rig.run(
                &buffer,
                vec![
                    Op::Send { span: first, to },
                    Op::Recv {
                        span: first.shift(by),
                        from,
                    },
                    Op::Recv {
                        span: second.shift(by),
                        from,
                    },
                    Op::Send { span: second, to },
                ],
            )?;
            let mut want = Rig::values(rank, Span::of_len(0, by));
            want.extend(Rig::values(left, Span::of_len(0, by)));
            expect(format_args!("{len} {dtype:?}"), &buffer, &want)?;
        }
    }
    rig.shutdown()
}

/// Every rank sends every other one a parcel of its own length, some of them empty, sends first in
/// the buffer and receives after them: the exchange of split matrices.
pub(super) fn uneven(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    let (rank, size) = (rig.rank(), rig.size());
    let parcel = |from: usize, to: usize| (7 * from + 3 * to) % 5;
    let peers = || ranks_of(size).filter(|peer| peer.0 != rank);
    let (mut ops, mut values, mut want) = (Vec::new(), Vec::new(), Vec::new());
    for to in peers() {
        let span = Span::of_len(values.len(), parcel(rank, to.0));
        ops.push(Op::Send { span, to });
        values.extend(contents(rank, to.0, span.len()));
    }
    want.extend_from_slice(&values);
    for from in peers() {
        let span = Span::of_len(values.len(), parcel(from.0, rank));
        ops.push(Op::Recv { span, from });
        values.extend(vec![UNTOUCHED; span.len()]);
        want.extend(contents(from.0, rank, span.len()));
    }
    for dtype in DTYPES {
        let buffer = rig.tensor(dtype, values.clone())?;
        rig.run(&buffer, ops.clone())?;
        expect(format_args!("{dtype:?}"), &buffer, &want)?;
    }
    rig.shutdown()
}

/// Only rank 0 sends, only the last rank receives, over and over; the others start the exchange with
/// nothing to do, on a buffer of no elements.
pub(super) fn idle(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    let (rank, last) = (rig.rank(), rig.size() - 1);
    if last == 0 {
        return rig.shutdown();
    }
    for len in [4, 0, 9] {
        let span = Span::of_len(0, len);
        let (values, ops) = match rank {
            0 => (
                contents(0, last, len),
                vec![Op::Send {
                    span,
                    to: Rank(last),
                }],
            ),
            _ if rank == last => {
                let from = Rank(0);
                (vec![UNTOUCHED; len], vec![Op::Recv { span, from }])
            }
            _ => (Vec::new(), Vec::new()),
        };
        let buffer = rig.tensor(DType::F32, values)?;
        rig.run(&buffer, ops)?;
        if rank == last {
            expect(len, &buffer, &contents(0, last, len))?;
        }
    }
    rig.shutdown()
}

/// What one rank sends to another one.
fn contents(from: usize, to: usize, len: usize) -> Vec<f64> {
    (0..len).map(|i| (16 * from + 4 * to + i) as f64).collect()
}
