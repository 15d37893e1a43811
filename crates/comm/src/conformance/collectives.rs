//! Each collective alone: every dtype, many lengths, every root, and views.

use candle_core::{DType, Device};
use polarshard_partition::{Class, Span};

use super::{DTYPES, Rig, UNTOUCHED, Verdict, expect, ranks_of};
use crate::{Communicator, Op, Request};

const LENGTHS: [usize; 5] = [0, 1, 2, 33, 1023];

/// Lengths of one rank's part.
const PARTS: [usize; 4] = [0, 1, 3, 130];

pub(super) fn all_reduce(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    for dtype in DTYPES {
        for len in LENGTHS {
            let mine = rig.mine(dtype, len)?;
            let got = rig.request(Request::all_reduce(Class::Gradient, &mine))?;
            let want = rig.sums(Span::of_len(0, len));
            expect(format_args!("{len} {dtype:?}"), &got, &want)?;
            expect(
                format_args!("{len} {dtype:?}, the caller's tensor"),
                &mine,
                &want,
            )?;
        }
    }
    rig.shutdown()
}

pub(super) fn reduce(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    for dtype in DTYPES {
        for root in ranks_of(rig.size()) {
            for len in LENGTHS {
                let span = Span::of_len(0, len);
                let mine = rig.mine(dtype, len)?;
                rig.run(&mine, vec![Op::Reduce { span, root }])?;
                let want = if root.0 == rig.rank() {
                    rig.sums(span)
                } else {
                    Rig::values(rig.rank(), span)
                };
                expect(format_args!("{len} {dtype:?} to {root}"), &mine, &want)?;
            }
        }
    }
    rig.shutdown()
}

pub(super) fn reduce_scatter(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    for dtype in DTYPES {
        for part in PARTS {
            let mine = rig.mine(dtype, rig.size() * part)?;
            rig.request(Request::reduce_scatter(Class::Gradient, &mine))?;
            let own = Span::of_len(rig.rank() * part, part);
            let got = mine.narrow(0, own.start, own.len())?;
            expect(format_args!("{part} {dtype:?}"), &got, &rig.sums(own))?;
        }
    }
    rig.shutdown()
}

pub(super) fn all_gather(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    for dtype in DTYPES {
        for part in PARTS {
            let mut values = vec![UNTOUCHED; rig.size() * part];
            let own = Span::of_len(rig.rank() * part, part);
            values[own.start..own.end].copy_from_slice(&Rig::values(rig.rank(), own));
            let mine = rig.tensor(dtype, values)?;
            rig.request(Request::all_gather(Class::Weight, &mine))?;
            let part_of = |rank| Rig::values(rank, Span::of_len(rank * part, part));
            let want: Vec<f64> = (0..rig.size()).flat_map(part_of).collect();
            expect(format_args!("{part} {dtype:?}"), &mine, &want)?;
        }
    }
    rig.shutdown()
}

pub(super) fn broadcast(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    for dtype in DTYPES {
        for root in ranks_of(rig.size()) {
            for len in LENGTHS {
                let mine = rig.mine(dtype, len)?;
                rig.request(Request::broadcast(Class::Weight, &mine, root))?;
                let want = Rig::values(root.0, Span::of_len(0, len));
                expect(format_args!("{len} {dtype:?} from {root}"), &mine, &want)?;
            }
        }
    }
    rig.shutdown()
}

/// A buffer that is a view, and a span that is not all of the buffer: results land in the larger
/// tensor, and nothing else of it changes.
pub(super) fn views(comm: Box<dyn Communicator>, device: &Device) -> Verdict {
    let mut rig = Rig { comm, device };
    const BEFORE: usize = 5;
    let len = 6 * rig.size();
    let span = Span::of_len(2, len);
    let root = polarshard_partition::Rank(rig.size() - 1);
    let ops = [
        Op::AllReduce(span),
        Op::Reduce { span, root },
        Op::ReduceScatter(span),
        Op::AllGather(span),
        Op::Broadcast { span, root },
    ];
    for op in ops {
        let mut values = vec![UNTOUCHED; BEFORE + span.end + 9];
        values[BEFORE + 2..][..len].copy_from_slice(&Rig::values(rig.rank(), Span::of_len(0, len)));
        let whole = rig.tensor(DType::F32, values.clone())?;
        let view = whole.narrow(0, BEFORE, span.end + 1)?;
        rig.run(&view, vec![op])?;

        let own = Span::of_len(6 * rig.rank(), 6);
        // Where the result is specified, and what it is.
        let (written, want) = match op {
            Op::AllReduce(_) => (Span::of_len(0, len), rig.sums(Span::of_len(0, len))),
            Op::ReduceScatter(_) => (own, rig.sums(own)),
            Op::AllGather(_) => (
                Span::of_len(0, len),
                (0..rig.size())
                    .flat_map(|rank| Rig::values(rank, Span::of_len(6 * rank, 6)))
                    .collect(),
            ),
            Op::Broadcast { .. } => (
                Span::of_len(0, len),
                Rig::values(root.0, Span::of_len(0, len)),
            ),
            _ if root.0 == rig.rank() => (Span::of_len(0, len), rig.sums(Span::of_len(0, len))),
            _ => (Span::of_len(0, 0), Vec::new()),
        };
        let start = BEFORE + span.start;
        values[start + written.start..start + written.end].copy_from_slice(&want);
        let specified = if matches!(op, Op::ReduceScatter(_)) {
            vec![
                Span::of_len(0, start),
                own.shift(start),
                Span::new(start + len, values.len()),
            ]
        } else {
            vec![Span::of_len(0, values.len())]
        };
        for part in specified {
            let got = whole.narrow(0, part.start, part.len())?;
            expect(
                format_args!("{op} at {part}"),
                &got,
                &values[part.start..part.end],
            )?;
        }
    }
    rig.shutdown()
}
