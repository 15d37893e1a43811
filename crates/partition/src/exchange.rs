//! What ranks swap so that each matrix is whole where it is computed.

use crate::slices::owners;
use crate::{MatrixId, ParamId, Piece, Plan, Policy, Rank, Route, Slice, Span};

/// What ranks swap so that each matrix is whole where it is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExchangeKind {
    /// `CopyToOwners` under `ReduceScatter`: fp32 slices of the reduced gradients of split Muon
    /// parameters, each from its owner to every other owner. A piece lies in one slice.
    Gradients,
    /// fp32 slices of the momentum's update. `ExchangeUpdate`: of each split matrix, from each
    /// owner to every other. `AssignOwner`: of every matrix, to its compute owner. A piece lies in
    /// one matrix.
    Updates,
    /// `AssignOwner`: slices of the orthogonalized update, from the compute owner to the owners. A
    /// piece lies in one matrix.
    Results,
}

/// One rank's part in an exchange.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct RankExchange {
    /// Elements of the buffer: what is sent, then what is received.
    pub len: usize,
    /// What it sends, one parcel a peer, peers ascending.
    pub sends: Vec<Parcel>,
    /// What it receives, one parcel a peer, peers ascending.
    pub receives: Vec<Parcel>,
}

/// All that goes from one rank to one other in one exchange.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Parcel {
    /// The other rank.
    pub peer: Rank,
    /// The elements, in the buffer.
    pub span: Span,
    /// What they are, by parameter and ascending in it, so in the same order on both sides.
    pub pieces: Vec<Piece>,
}

/// A run of a parameter that goes to or comes from a peer.
type Transfer = (Rank, ParamId, Span);

impl Plan {
    /// The exchanges of this route and policy, in order.
    pub fn exchange_kinds(&self) -> &'static [ExchangeKind] {
        match (self.policy(), self.route()) {
            (Policy::CopyToOwners, Route::ReduceScatter) => &[ExchangeKind::Gradients],
            (Policy::CopyToOwners, _) => &[],
            (Policy::ExchangeUpdate, _) => &[ExchangeKind::Updates],
            (Policy::AssignOwner, _) => &[ExchangeKind::Updates, ExchangeKind::Results],
        }
    }

    /// What `rank` sends and receives in an exchange; nothing in one that is not of this route and
    /// policy. No rank sends to itself, and none sends two parcels to one peer.
    pub fn exchange(&self, kind: ExchangeKind, rank: Rank) -> RankExchange {
        if !self.exchange_kinds().contains(&kind) {
            return RankExchange::default();
        }
        let (sends, receives) = match (kind, self.policy()) {
            (ExchangeKind::Gradients, _) => self.gradients(rank),
            (ExchangeKind::Updates, Policy::AssignOwner) => self.to_compute_owners(rank),
            (ExchangeKind::Updates, _) => self.between_owners(rank),
            (ExchangeKind::Results, _) => {
                let (to, from) = self.to_compute_owners(rank);
                (from, to)
            }
        };
        let mut len = 0;
        let sends = parcels(sends, &mut len);
        let receives = parcels(receives, &mut len);
        RankExchange {
            len,
            sends,
            receives,
        }
    }

    /// By parameter: each slice of a split one to every other owner.
    fn gradients(&self, rank: Rank) -> (Vec<Transfer>, Vec<Transfer>) {
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for param in self.full_momentum(rank) {
            let slices = self.layout().slices(param);
            let peers = owners(slices);
            for slice in slices {
                if slice.rank == rank {
                    sends.extend(
                        peers
                            .iter()
                            .filter(|peer| *peer != rank)
                            .map(|peer| (peer, param, slice.span)),
                    );
                } else {
                    receives.push((slice.rank, param, slice.span));
                }
            }
        }
        (sends, receives)
    }

    /// By matrix: each owner's slice to every other owner.
    fn between_owners(&self, rank: Rank) -> (Vec<Transfer>, Vec<Transfer>) {
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for (id, own) in self.matrix_parts(rank) {
            let (param, matrix) = self.params().matrix(id);
            for other in self
                .layout()
                .slices_within(param, matrix.span)
                .filter(|slice| slice.rank != rank)
            {
                sends.push((other.rank, param, own.span));
                receives.push((other.rank, param, other.span));
            }
        }
        (sends, receives)
    }

    /// By matrix: each slice to the compute owner.
    fn to_compute_owners(&self, rank: Rank) -> (Vec<Transfer>, Vec<Transfer>) {
        let sends = self.matrix_parts(rank).filter_map(|(id, own)| {
            let owner = self.compute_owner(id).filter(|owner| *owner != rank)?;
            Some((owner, own.param, own.span))
        });
        let receives = self.jobs(rank).iter().flat_map(|id| {
            let (param, matrix) = self.params().matrix(*id);
            let others = self
                .layout()
                .slices_within(param, matrix.span)
                .filter(|slice| slice.rank != rank);
            others.map(|slice| (slice.rank, slice.param, slice.span))
        });
        (sends.collect(), receives.collect())
    }

    /// The slices of matrices that a rank owns.
    fn matrix_parts(&self, rank: Rank) -> impl Iterator<Item = (MatrixId, Slice)> + '_ {
        self.layout().rank_slices(rank).flat_map(|slice| {
            let matrices = self.params().matrices_touching(slice.param, slice.span);
            matrices.filter_map(|(id, matrix)| Some((id, slice.within(matrix.span)?)))
        })
    }
}

/// Packs transfers into one parcel a peer, behind `len` elements of the buffer.
fn parcels(mut transfers: Vec<Transfer>, len: &mut usize) -> Vec<Parcel> {
    transfers.sort_unstable();
    let of_peers = transfers.chunk_by(|a, b| a.0 == b.0);
    let parcel = |transfers: &[Transfer]| {
        let start = *len;
        let pieces = transfers.iter().map(|&(_, param, span)| {
            let piece = Piece {
                param,
                span,
                at: *len,
            };
            *len += span.len();
            piece
        });
        let pieces = pieces.collect();
        Parcel {
            peer: transfers[0].0,
            span: Span::new(start, *len),
            pieces,
        }
    };
    of_peers.map(parcel).collect()
}
