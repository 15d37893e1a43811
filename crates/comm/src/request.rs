//! What a rank asks of its world: a group of operations on spans of one flat buffer.

use std::fmt;

use candle_core::{DType, Tensor};
use polarshard_partition::{Class, Collective, Rank, Span, Wire, WorldSize};

use crate::{Called, Invalid};

/// One operation of a [`Request`], on a span of its buffer, in place.
///
/// Sums are the only reduction. f16 and bf16 have the precision of the backend's sum: `Loopback`
/// adds in f32 in rank order and rounds once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Every rank's span becomes the sum over the ranks.
    AllReduce(Span),
    /// The root's span becomes the sum over the ranks; the others' stay as they are.
    Reduce {
        /// What is summed.
        span: Span,
        /// Where the sum goes.
        root: Rank,
    },
    /// The span, a multiple of the world size long, is cut into equal parts; on rank r part r
    /// becomes its sum over the ranks. The other parts are unspecified afterwards.
    ReduceScatter(Span),
    /// The span, a multiple of the world size long, is cut into equal parts; rank r contributes
    /// part r, and every rank gets all of them.
    AllGather(Span),
    /// Every rank's span becomes the root's.
    Broadcast {
        /// What is copied.
        span: Span,
        /// Whose values are copied.
        root: Rank,
    },
    /// The span goes to one rank, which receives it in the same request.
    Send {
        /// What is sent.
        span: Span,
        /// The receiver.
        to: Rank,
    },
    /// The span comes from one rank, which sends it in the same request. The n-th `Recv` from a
    /// rank takes what that rank's n-th `Send` to this one gives.
    Recv {
        /// Where it is written.
        span: Span,
        /// The sender.
        from: Rank,
    },
}

impl Op {
    /// The part of the buffer that the operation reads or writes.
    pub fn span(&self) -> Span {
        match *self {
            Self::AllReduce(span) | Self::ReduceScatter(span) | Self::AllGather(span) => span,
            Self::Reduce { span, .. }
            | Self::Broadcast { span, .. }
            | Self::Send { span, .. }
            | Self::Recv { span, .. } => span,
        }
    }

    /// The one rank that the operation names: a root, a receiver or a sender.
    pub fn peer(&self) -> Option<Rank> {
        match *self {
            Self::AllReduce(_) | Self::ReduceScatter(_) | Self::AllGather(_) => None,
            Self::Reduce { root, .. } | Self::Broadcast { root, .. } => Some(root),
            Self::Send { to, .. } => Some(to),
            Self::Recv { from, .. } => Some(from),
        }
    }

    /// How the operation is counted; a `Recv` is counted where it is sent.
    pub fn collective(&self) -> Option<Collective> {
        match self {
            Self::AllReduce(_) => Some(Collective::AllReduce),
            Self::Reduce { .. } => Some(Collective::Reduce),
            Self::ReduceScatter(_) => Some(Collective::ReduceScatter),
            Self::AllGather(_) => Some(Collective::AllGather),
            Self::Broadcast { .. } => Some(Collective::Broadcast),
            Self::Send { .. } => Some(Collective::Send),
            Self::Recv { .. } => None,
        }
    }

    /// Whether all ranks must call it alike; sends and receives concern two ranks only.
    pub(crate) fn is_collective(&self) -> bool {
        !matches!(self, Self::Send { .. } | Self::Recv { .. })
    }

    /// The part of a scattered or gathered `span` that belongs to `rank`.
    pub(crate) fn part(span: Span, world: WorldSize, rank: Rank) -> Span {
        let len = span.len() / world.get();
        Span::of_len(span.start + rank.0 * len, len)
    }
}

/// `reduce of 8 to rank 0`: with the length, without the position, which is the rank's own business.
impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A request that is refused may hold a span that ends before it begins.
        let len = self.span().end.saturating_sub(self.span().start);
        match self {
            Self::AllReduce(_) => write!(f, "all-reduce of {len}"),
            Self::Reduce { root, .. } => write!(f, "reduce of {len} to rank {root}"),
            Self::ReduceScatter(_) => write!(f, "reduce-scatter of {len}"),
            Self::AllGather(_) => write!(f, "all-gather of {len}"),
            Self::Broadcast { root, .. } => write!(f, "broadcast of {len} from rank {root}"),
            Self::Send { to, .. } => write!(f, "send of {len} to rank {to}"),
            Self::Recv { from, .. } => write!(f, "receive of {len} from rank {from}"),
        }
    }
}

/// A group of operations that starts as one, on spans of one flat buffer.
///
/// All ranks start the same requests in the same order. A rank that has nothing to do in one,
/// nothing to send in an exchange say, starts it with no operations.
#[derive(Debug, Clone)]
pub struct Request {
    class: Class,
    buffer: Tensor,
    ops: Vec<Op>,
}

impl Request {
    /// A group of `ops` on a 1-D contiguous `buffer`, a view into a larger tensor included: results
    /// are written through.
    pub fn new(class: Class, buffer: Tensor, ops: Vec<Op>) -> Self {
        Self { class, buffer, ops }
    }

    /// [`Op::AllReduce`] of the whole buffer.
    pub fn all_reduce(class: Class, buffer: &Tensor) -> Self {
        Self::new(class, buffer.clone(), vec![Op::AllReduce(whole(buffer))])
    }

    /// [`Op::ReduceScatter`] of the whole buffer.
    pub fn reduce_scatter(class: Class, buffer: &Tensor) -> Self {
        Self::new(
            class,
            buffer.clone(),
            vec![Op::ReduceScatter(whole(buffer))],
        )
    }

    /// [`Op::AllGather`] of the whole buffer.
    pub fn all_gather(class: Class, buffer: &Tensor) -> Self {
        Self::new(class, buffer.clone(), vec![Op::AllGather(whole(buffer))])
    }

    /// [`Op::Broadcast`] of the whole buffer.
    pub fn broadcast(class: Class, buffer: &Tensor, root: Rank) -> Self {
        let span = whole(buffer);
        Self::new(class, buffer.clone(), vec![Op::Broadcast { span, root }])
    }

    /// What the traffic is for.
    pub fn class(&self) -> Class {
        self.class
    }

    /// The tensor that is read and written.
    pub fn buffer(&self) -> &Tensor {
        &self.buffer
    }

    /// The operations, in the order in which they are matched with the other ranks'.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// The buffer's element type on the wire, if it is one that travels.
    pub fn wire(&self) -> Option<Wire> {
        match self.buffer.dtype() {
            DType::F16 => Some(Wire::F16),
            DType::BF16 => Some(Wire::BF16),
            DType::F32 => Some(Wire::F32),
            DType::F64 => Some(Wire::F64),
            _ => None,
        }
    }

    /// The request without its data: what is compared between ranks and named in errors.
    pub fn called(&self) -> Called {
        Called::Request {
            class: self.class,
            dtype: self.buffer.dtype(),
            ops: self.ops.clone(),
        }
    }

    /// Everything that can be checked without the other ranks. Backends do it before anything is
    /// sent, so that what it finds is local and recoverable.
    ///
    /// # Errors
    /// The first thing found wrong; see [`Invalid`].
    pub fn check(&self, world: WorldSize) -> Result<(), Invalid> {
        let shape = self.buffer.dims();
        let &[len] = shape else {
            return Err(Invalid::NotFlat {
                shape: shape.to_vec(),
            });
        };
        if !self.buffer.is_contiguous() {
            return Err(Invalid::NotContiguous { len });
        }
        if self.wire().is_none() {
            return Err(Invalid::Dtype {
                dtype: self.buffer.dtype(),
            });
        }
        for &op in &self.ops {
            let span = op.span();
            if span.start > span.end || span.end > len {
                return Err(Invalid::OutOfBounds { op, span, len });
            }
            if op.peer().is_some_and(|peer| peer.0 >= world.get()) {
                return Err(Invalid::OutsideWorld { op, world });
            }
            let is_cut = matches!(op, Op::ReduceScatter(_) | Op::AllGather(_));
            if is_cut && span.len() % world.get() != 0 {
                return Err(Invalid::Indivisible { op, world });
            }
        }
        self.check_overlap()
    }

    /// No two operations of a group may touch the same element, except to send it: their order is
    /// unspecified.
    fn check_overlap(&self) -> Result<(), Invalid> {
        let mut ops: Vec<&Op> = self.ops.iter().filter(|op| !op.span().is_empty()).collect();
        ops.sort_by_key(|op| op.span().start);
        // The operation that reaches furthest, among all that came before and among those that
        // write.
        let (mut any, mut writer): (Option<&Op>, Option<&Op>) = (None, None);
        for op in ops {
            let is_send = matches!(op, Op::Send { .. });
            let before = if is_send { writer } else { any };
            if let Some(before) = before.filter(|b| b.span().end > op.span().start) {
                return Err(Invalid::Overlap {
                    first: *before,
                    second: *op,
                });
            }
            any = further(any, op);
            if !is_send {
                writer = further(writer, op);
            }
        }
        Ok(())
    }
}

fn further<'a>(before: Option<&'a Op>, op: &'a Op) -> Option<&'a Op> {
    match before {
        Some(before) if before.span().end >= op.span().end => Some(before),
        _ => Some(op),
    }
}

fn whole(buffer: &Tensor) -> Span {
    Span::of_len(0, buffer.elem_count())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All pairs, one by one.
    fn any_overlap(ops: &[Op]) -> bool {
        let is_send = |op: &Op| matches!(op, Op::Send { .. });
        (0..ops.len()).any(|i| {
            ops[..i].iter().any(|other| {
                other.span().intersect(ops[i].span()).is_some()
                    && !(is_send(other) && is_send(&ops[i]))
            })
        })
    }

    #[test]
    fn overlaps_are_found_whatever_the_order() {
        const LEN: usize = 4;
        let world = WorldSize::new(2).unwrap();
        let buffer = Tensor::zeros(LEN, DType::F32, &candle_core::Device::Cpu).unwrap();
        let spans = || (0..=LEN).flat_map(|start| (start..=LEN).map(move |end| (start, end)));
        let mut ops = Vec::new();
        for (start, end) in spans() {
            let span = Span::new(start, end);
            ops.push(Op::Send { span, to: Rank(1) });
            ops.push(Op::AllReduce(span));
        }
        let (mut found, mut free) = (0, 0);
        for (i, &a) in ops.iter().enumerate() {
            for &b in &ops {
                for &c in &ops[i..] {
                    let group = vec![a, b, c];
                    let want = any_overlap(&group);
                    let request = Request::new(Class::Control, buffer.clone(), group);
                    let got = request.check(world);
                    assert_eq!(got.is_err(), want, "{:?}: {got:?}", request.ops());
                    if let Err(reason) = got {
                        assert!(matches!(reason, Invalid::Overlap { .. }), "{reason}");
                        found += 1;
                    } else {
                        free += 1;
                    }
                }
            }
        }
        assert!(found > 1000 && free > 1000, "{found} {free}");
    }
}
