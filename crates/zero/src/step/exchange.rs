//! Swaps of slices between ranks: one parcel for each pair of ranks that have something for one another.

use polarshard_comm::{Op, Pending, Request};
use polarshard_partition::{Class, ExchangeKind, Plan, Rank, RankExchange, Span};

use super::fragments::Fragments;
use crate::channel::Channel;
use crate::error::Result;
use crate::flat::{self, Write};

/// One rank's part in an exchange, the same in every step.
#[derive(Debug)]
pub(super) struct Exchange(RankExchange);

impl Exchange {
    pub(super) fn new(plan: &Plan, kind: ExchangeKind, rank: Rank) -> Self {
        Self(plan.exchange(kind, rank))
    }

    /// Sends this rank's parcels from `fragments`, in their dtype.
    pub(super) fn send(&self, channel: &mut Channel, fragments: &Fragments) -> Result<Pending> {
        let RankExchange {
            len,
            sends,
            receives,
        } = &self.0;
        let buffer = flat::zeros(*len, fragments.dtype(), fragments.device())?;
        let pieces = sends.iter().flat_map(|parcel| &parcel.pieces);
        let packed = pieces.map(|piece| {
            let (flat, at) = (&buffer, piece.at);
            let values = fragments.read(piece.param, piece.span)?;
            Ok(Write { flat, at, values })
        });
        flat::write_all(&packed.collect::<Result<Vec<_>>>()?)?;
        let sends = sends.iter().map(|parcel| Op::Send {
            span: parcel.span,
            to: parcel.peer,
        });
        let receives = receives.iter().map(|parcel| Op::Recv {
            span: parcel.span,
            from: parcel.peer,
        });
        let ops = sends.chain(receives).collect();
        channel.start(Request::new(Class::Exchange, buffer, ops))
    }

    /// Puts what comes into `fragments`.
    pub(super) fn receive(&self, in_flight: Pending, fragments: &mut Fragments) -> Result<()> {
        let buffer = in_flight.wait()?;
        for piece in self.0.receives.iter().flat_map(|parcel| &parcel.pieces) {
            let span = Span::of_len(piece.at, piece.span.len());
            fragments.put(piece.param, piece.span.start, flat::view(&buffer, span)?);
        }
        Ok(())
    }
}
