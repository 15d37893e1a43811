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

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use polarshard_partition::{Class, Span};

    use super::*;

    fn started(rank: usize, ops: &[Op]) -> Started {
        Started {
            rank: Rank(rank),
            sequence: 5,
            called: Called::Request {
                class: Class::Exchange,
                dtype: DType::F32,
                ops: ops.to_vec(),
            },
        }
    }

    fn send(to: usize, len: usize) -> Op {
        Op::Send {
            span: Span::of_len(0, len),
            to: Rank(to),
        }
    }

    fn recv(from: usize, len: usize) -> Op {
        Op::Recv {
            span: Span::of_len(9, len),
            from: Rank(from),
        }
    }

    #[test]
    fn positions_and_other_peers_do_not_matter() {
        let reduce = |start| Op::AllReduce(Span::of_len(start, 4));
        let zero = started(
            0,
            &[send(1, 3), reduce(10), send(1, 2), recv(1, 7), send(4, 1)],
        );
        let one = started(
            1,
            &[recv(0, 3), send(0, 7), recv(3, 8), recv(0, 2), reduce(20)],
        );
        assert!(disagreement(&zero, &one).is_none());
        assert!(disagreement(&one, &zero).is_none());
    }

    #[test]
    fn a_wrong_parcel_is_found_from_both_sides() {
        for (sends, receives, n, sent, received) in [
            (&[3][..], &[4][..], 0, Some(3), Some(4)),
            (&[3, 2], &[3], 1, Some(2), None),
            (&[], &[3], 0, None, Some(3)),
        ] {
            let sends: Vec<Op> = sends.iter().map(|&len| send(1, len)).collect();
            let receives: Vec<Op> = receives.iter().map(|&len| recv(0, len)).collect();
            let (zero, one) = (started(0, &sends), started(1, &receives));
            for (mine, other) in [(&zero, &one), (&one, &zero)] {
                let error = disagreement(mine, other).unwrap();
                for (seen, by, to) in [(&error, mine, other), (&error.seen_by(other), other, mine)]
                {
                    let Error::Unpaired {
                        started,
                        peer,
                        from: Rank(0),
                        to: Rank(1),
                        n: at,
                        sent: s,
                        received: r,
                    } = seen
                    else {
                        panic!("{seen}");
                    };
                    assert_eq!((&**started, &**peer), (by, to));
                    assert_eq!((*at, *s, *r), (n, sent, received));
                }
            }
        }
    }
}
