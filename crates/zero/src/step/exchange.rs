//! Swaps of slices between ranks: one parcel for each pair of ranks that have something for one another.

use polarshard_comm::{Op, Request};
use polarshard_partition::{Class, RankExchange, Span};

use super::fragments::Fragments;
use crate::channel::Channel;
use crate::error::Result;
use crate::flat;

/// Sends this rank's parcels from `fragments`, in their dtype, and puts what comes into them.
pub(crate) fn exchange(
    channel: &mut Channel,
    plan: &RankExchange,
    fragments: &mut Fragments,
) -> Result<()> {
    let buffer = flat::zeros(plan.len, fragments.dtype(), fragments.device())?;
    for piece in plan.sends.iter().flat_map(|parcel| &parcel.pieces) {
        flat::write(&buffer, piece.at, &fragments.read(piece.param, piece.span)?)?;
    }
    let sends = plan.sends.iter().map(|parcel| Op::Send {
        span: parcel.span,
        to: parcel.peer,
    });
    let receives = plan.receives.iter().map(|parcel| Op::Recv {
        span: parcel.span,
        from: parcel.peer,
    });
    let ops = sends.chain(receives).collect();
    let buffer = channel
        .start(Request::new(Class::Exchange, buffer, ops))?
        .wait()?;
    for piece in plan.receives.iter().flat_map(|parcel| &parcel.pieces) {
        let span = Span::of_len(piece.at, piece.span.len());
        fragments.put(piece.param, piece.span.start, flat::view(&buffer, span)?);
    }
    Ok(())
}
