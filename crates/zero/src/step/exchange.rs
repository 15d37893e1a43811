//! Swaps of slices between ranks: one parcel for each pair of ranks that have something for one another.

use candle_core::{DType, Device};
use polarshard_comm::{Op, Pending, Request};
use polarshard_partition::{Class, RankExchange, Span};

use super::fragments::Fragments;
use crate::channel::Channel;
use crate::error::Result;
use crate::flat;

/// A swap under way.
#[must_use = "what comes is put in only by `land`"]
pub(super) struct Swap {
    plan: RankExchange,
    pending: Pending,
}

impl Swap {
    /// Sends this rank's parcels from `fragments`.
    pub(super) fn start(
        channel: &mut Channel,
        plan: RankExchange,
        dtype: DType,
        device: &Device,
        fragments: &Fragments,
    ) -> Result<Self> {
        let buffer = flat::zeros(plan.len, dtype, device)?;
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
        let pending = channel.start(Request::new(Class::Exchange, buffer, ops))?;
        Ok(Self { plan, pending })
    }

    /// Puts what comes into `fragments`.
    pub(super) fn land(self, fragments: &mut Fragments) -> Result<()> {
        let buffer = self.pending.wait()?;
        for piece in self.plan.receives.iter().flat_map(|parcel| &parcel.pieces) {
            let span = Span::of_len(piece.at, piece.span.len());
            let values = flat::view(&buffer, span)?.to_dtype(DType::F32)?;
            fragments.put(piece.param, piece.span.start, values);
        }
        Ok(())
    }
}
