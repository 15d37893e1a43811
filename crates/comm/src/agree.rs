//! Whether two ranks called things that fit together. For every backend that can compare calls.

use polarshard_partition::Rank;

use crate::{Called, Error, Op, Started};

/// What is wrong between two calls that should be the same one, from the side of `mine`.
///
/// Class, dtype and collectives must be the same, in the same order: kind, length and root. Where
/// they lie in the buffers may differ. The n-th send from one to the other must be as long as the
/// n-th receive there.
pub fn disagreement(mine: &Started, peer: &Started) -> Option<Error> {
    if !is_alike(&mine.called, &peer.called) {
        return Some(Error::Mismatch {
            started: Box::new(mine.clone()),
            peer: Box::new(peer.clone()),
        });
    }
    unpaired(mine, peer, mine.rank, peer.rank)
        .or_else(|| unpaired(mine, peer, peer.rank, mine.rank))
}

fn is_alike(mine: &Called, peer: &Called) -> bool {
    match (mine, peer) {
        (Called::Shutdown, Called::Shutdown) => true,
        (
            Called::Request { class, dtype, ops },
            Called::Request {
                class: peer_class,
                dtype: peer_dtype,
                ops: peer_ops,
            },
        ) => {
            (class, dtype) == (peer_class, peer_dtype) && collectives(ops).eq(collectives(peer_ops))
        }
        _ => false,
    }
}

fn collectives(ops: &[Op]) -> impl Iterator<Item = impl PartialEq> {
    ops.iter()
        .filter(|op| op.is_collective())
        .map(|op| (op.collective(), op.span().len(), op.peer()))
}

/// The first send from `from` to `to` that is not received as it is sent; the two ranks are those
/// of `mine` and `peer`.
fn unpaired(mine: &Started, peer: &Started, from: Rank, to: Rank) -> Option<Error> {
    let (sender, receiver) = if mine.rank == from {
        (mine, peer)
    } else {
        (peer, mine)
    };
    let mut sends = lengths(
        &sender.called,
        |op| matches!(op, Op::Send { to: rank, .. } if *rank == to),
    );
    let mut receives = lengths(
        &receiver.called,
        |op| matches!(op, Op::Recv { from: rank, .. } if *rank == from),
    );
    for n in 0.. {
        let (sent, received) = (sends.next(), receives.next());
        if sent != received {
            return Some(Error::Unpaired {
                started: Box::new(mine.clone()),
                peer: Box::new(peer.clone()),
                from,
                to,
                n,
                sent,
                received,
            });
        }
        if sent.is_none() {
            break;
        }
    }
    None
}

fn lengths(called: &Called, which: impl Fn(&Op) -> bool) -> impl Iterator<Item = usize> {
    let ops = match called {
        Called::Request { ops, .. } => ops.as_slice(),
        Called::Shutdown => &[],
    };
    ops.iter()
        .filter(move |op| which(op))
        .map(|op| op.span().len())
}

impl Error {
    /// The failure of the world, from the side of `started`: mirrored if it is a party to it, and
    /// otherwise carried.
    pub(crate) fn seen_by(&self, mine: &Started) -> Self {
        let is_mine = |started: &Started| started == mine;
        let boxed = || Box::new(mine.clone());
        match self {
            error if is_mine(error.started()) => error.clone(),
            Self::Mismatch { started, peer } if is_mine(peer) => Self::Mismatch {
                started: boxed(),
                peer: started.clone(),
            },
            Self::Unpaired {
                started,
                peer,
                from,
                to,
                n,
                sent,
                received,
            } if is_mine(peer) => Self::Unpaired {
                started: boxed(),
                peer: started.clone(),
                from: *from,
                to: *to,
                n: *n,
                sent: *sent,
                received: *received,
            },
            Self::PeerGone { started, peer, how } if started.sequence == mine.sequence => {
                Self::PeerGone {
                    started: boxed(),
                    peer: *peer,
                    how: *how,
                }
            }
            Self::Deadline {
                started,
                deadline,
                missing,
            } if started.sequence == mine.sequence && !missing.contains(&mine.rank) => {
                Self::Deadline {
                    started: boxed(),
                    deadline: *deadline,
                    missing: missing.clone(),
                }
            }
            error => Self::Poisoned {
                started: boxed(),
                first: Box::new(error.first().clone()),
            },
        }
    }
}
