//! What a rank brings to a meeting on Loopback and takes from it: copies, so that no storage is
//! locked while it waits.

use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device, Tensor};
use polarshard_partition::{Rank, Span, WorldSize};

use crate::{Op, Request};

type Result<T> = std::result::Result<T, Arc<candle_core::Error>>;

/// What one rank brings: a part for each of its collectives, and what it sends to whom.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    collectives: Vec<Part>,
    sends: Vec<(Rank, Tensor)>,
}

/// What one rank brings to one collective.
#[derive(Debug)]
struct Part {
    /// Its data; nothing if the rank gives none to this collective.
    data: Option<Tensor>,
    /// The sum over the ranks, if it is wanted whole: made once, by the first rank that needs it.
    /// Rank 0's is used.
    sum: OnceLock<Result<Tensor>>,
}

impl Parts {
    /// Copies what `rank` gives out of the buffer.
    pub(crate) fn read(request: &Request, rank: Rank, world: WorldSize) -> Result<Self> {
        let mut parts = Self::default();
        for op in request.ops() {
            let given = match *op {
                Op::AllReduce(span) | Op::Reduce { span, .. } | Op::ReduceScatter(span) => {
                    Some(span)
                }
                Op::AllGather(span) => Some(Op::part(span, world, rank)),
                Op::Broadcast { span, root } => (root == rank).then_some(span),
                Op::Send { span, to } => {
                    parts.sends.push((to, copy_out(request.buffer(), span)?));
                    continue;
                }
                Op::Recv { .. } => continue,
            };
            parts.collectives.push(Part {
                data: given
                    .map(|span| copy_out(request.buffer(), span))
                    .transpose()?,
                sum: OnceLock::new(),
            });
        }
        Ok(parts)
    }

    /// Writes what `rank` gets from everybody's parts into the buffer. The calls agree, so the
    /// parts match.
    pub(crate) fn write(request: &Request, rank: Rank, all: &[Self]) -> Result<()> {
        let world = all.len();
        let buffer = request.buffer();
        let mut received = vec![0; world];
        let mut next = 0..;
        for op in request.ops() {
            if let Op::Recv { span, from } = *op {
                let mut sends = all[from.0].sends.iter().filter(|(to, _)| *to == rank);
                if let Some((_, data)) = sends.nth(received[from.0]) {
                    copy_in(buffer, span.start, data)?;
                }
                received[from.0] += 1;
                continue;
            }
            if !op.is_collective() {
                continue;
            }
            let Some(i) = next.next() else { break };
            let data = |rank: usize| all[rank].collectives[i].data.as_ref();
            let inputs = || (0..world).filter_map(data);
            match *op {
                Op::AllReduce(span) => {
                    let shared = &all[0].collectives[i].sum;
                    let total = shared.get_or_init(|| sum(inputs(), 0..span.len()));
                    copy_in(buffer, span.start, total.as_ref().map_err(Arc::clone)?)?;
                }
                Op::Reduce { span, root } if root == rank => {
                    copy_in(buffer, span.start, &sum(inputs(), 0..span.len())?)?;
                }
                Op::ReduceScatter(span) => {
                    let len = span.len() / world;
                    let start = rank.0 * len;
                    copy_in(
                        buffer,
                        span.start + start,
                        &sum(inputs(), start..start + len)?,
                    )?;
                }
                Op::AllGather(span) => {
                    let len = span.len() / world;
                    for (peer, data) in inputs().enumerate().filter(|(peer, _)| *peer != rank.0) {
                        copy_in(buffer, span.start + peer * len, data)?;
                    }
                }
                Op::Broadcast { span, root } if root != rank => {
                    if let Some(data) = data(root.0) {
                        copy_in(buffer, span.start, data)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The sum in rank order, in f32 (f64 in f64), rounded once.
fn sum<'a>(
    inputs: impl Iterator<Item = &'a Tensor>,
    range: std::ops::Range<usize>,
) -> Result<Tensor> {
    let mut total: Option<Tensor> = None;
    let mut dtype = DType::F32;
    for input in inputs {
        dtype = input.dtype();
        let exact = if dtype == DType::F64 {
            dtype
        } else {
            DType::F32
        };
        let input = input.narrow(0, range.start, range.len())?.to_dtype(exact)?;
        total = Some(match total {
            None => input,
            Some(total) => (total + input)?,
        });
    }
    let total = total.ok_or_else(|| candle_core::Error::Msg("a sum over no ranks".to_owned()))?;
    Ok(total.to_dtype(dtype)?)
}

/// A copy on the host. The source's storage is locked for the time of copying only.
fn copy_out(buffer: &Tensor, span: Span) -> Result<Tensor> {
    Ok(buffer
        .detach()
        .narrow(0, span.start, span.len())?
        .force_contiguous()?
        .to_device(&Device::Cpu)?)
}

fn copy_in(buffer: &Tensor, at: usize, data: &Tensor) -> Result<()> {
    if data.elem_count() > 0 {
        let data = data.to_device(buffer.device())?;
        buffer.detach().slice_set(&data, 0, at)?;
    }
    Ok(())
}
