//! What can go wrong, and who did what.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, DeviceLocation};
use polarshard_partition::{Class, Rank, Span, WorldSize};

use crate::Op;

/// What one rank called, without its data: what is compared between ranks and named in errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Called {
    /// [`crate::Communicator::start`].
    Request {
        /// What the traffic is for.
        class: Class,
        /// The buffer's element type.
        dtype: DType,
        /// The operations of the group.
        ops: Vec<Op>,
    },
    /// [`crate::Communicator::shutdown`].
    Shutdown,
}

/// How many operations of a group a message spells out.
const SPELLED_OUT: usize = 4;

/// `gradient reduce-scatter of 4096 f32`
impl fmt::Display for Called {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Request { class, dtype, ops } = self else {
            return write!(f, "shutdown");
        };
        let dtype = dtype.as_str();
        match ops.as_slice() {
            [] => write!(f, "{class} request of no operations, {dtype}"),
            [op] => write!(f, "{class} {op} {dtype}"),
            ops => {
                write!(f, "{class} group of {} operations in {dtype}: ", ops.len())?;
                for (i, op) in ops.iter().take(SPELLED_OUT).enumerate() {
                    write!(f, "{}{op}", if i == 0 { "" } else { ", " })?;
                }
                match ops.len().saturating_sub(SPELLED_OUT) {
                    0 => Ok(()),
                    more => write!(f, " and {more} more"),
                }
            }
        }
    }
}

/// One call of one rank: what an error is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// Who called.
    pub rank: Rank,
    /// Which of the rank's calls it was, from 0.
    pub sequence: u64,
    /// What was called.
    pub called: Called,
}

/// `rank 2, call 17, gradient reduce-scatter of 4096 f32`
impl fmt::Display for Started {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            sequence,
            called,
        } = self;
        write!(f, "rank {rank}, call {sequence}, {called}")
    }
}

/// How a rank went away without [`crate::Communicator::shutdown`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// Its communicator was dropped: it returned early, with an error perhaps.
    Returned,
    /// It panicked.
    Panicked,
    /// Its process or its connection ended.
    Lost,
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Returned => "returned early",
            Self::Panicked => "panicked",
            Self::Lost => "was lost",
        })
    }
}

/// What is wrong with a request by itself, whatever the other ranks do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Invalid {
    /// The buffer has another number of dimensions than one.
    #[error("the buffer has the shape {shape:?} instead of one dimension")]
    NotFlat {
        /// The buffer's shape.
        shape: Vec<usize>,
    },
    /// The buffer's elements do not lie side by side.
    #[error("the buffer of {len} elements is not contiguous")]
    NotContiguous {
        /// The buffer's length.
        len: usize,
    },
    /// The buffer's elements do not travel.
    #[error("the dtype {} is none of f16, bf16, f32 and f64", dtype.as_str())]
    Dtype {
        /// The buffer's dtype.
        dtype: DType,
    },
    /// The buffer lies where the backend does not reach: on another device, or on a second handle of
    /// the same one, whose work it cannot wait for.
    #[error("the buffer's device is not the communicator's: {buffer:?}, made apart from {own:?}")]
    Device {
        /// Where the buffer is.
        buffer: DeviceLocation,
        /// Where the communicator works.
        own: DeviceLocation,
    },
    /// A span ends after the buffer, or before it begins.
    #[error("{op} works on {span}, outside the buffer of {len} elements")]
    OutOfBounds {
        /// The operation.
        op: Op,
        /// Its span.
        span: Span,
        /// The buffer's length.
        len: usize,
    },
    /// A root or peer is no rank of the world.
    #[error("{op} names a rank outside the world of {}", world.get())]
    OutsideWorld {
        /// The operation.
        op: Op,
        /// The number of ranks.
        world: WorldSize,
    },
    /// A span cannot be cut into one equal part a rank.
    #[error("{op} cannot be cut into {} equal parts", world.get())]
    Indivisible {
        /// The operation.
        op: Op,
        /// The number of ranks.
        world: WorldSize,
    },
    /// Two operations of one group touch the same element, and one of them writes it.
    #[error("{first} on {} and {second} on {} overlap", first.span(), second.span())]
    Overlap {
        /// The one that begins first.
        first: Op,
        /// The other one.
        second: Op,
    },
}

/// Why a collective did not happen. Every kind says which call of which rank it is about.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request is wrong by itself. Nothing was sent: the rank may go on.
    #[error("{started}: {reason}")]
    Invalid {
        /// This rank's call.
        started: Box<Started>,
        /// What is wrong with it.
        reason: Invalid,
    },
    /// A fault that a test asked for, in place of the call. Nothing was sent: the rank may go on.
    #[error("{started}: failed on purpose")]
    Injected {
        /// This rank's call.
        started: Box<Started>,
    },
    /// Two ranks called different things.
    #[error("{started}, does not match {peer}")]
    Mismatch {
        /// This rank's call.
        started: Box<Started>,
        /// The other rank's call.
        peer: Box<Started>,
    },
    /// What one rank sends is not what the other one receives.
    #[error(
        "{started}, does not match {peer}: of send {n} from rank {from} to rank {to}, \
         {} go out and {} are expected",
        elements(*sent), elements(*received)
    )]
    Unpaired {
        /// This rank's call.
        started: Box<Started>,
        /// The other rank's call.
        peer: Box<Started>,
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// Which of the sends from the one to the other, from 0.
        n: usize,
        /// Elements sent; `None` if there is no such send.
        sent: Option<usize>,
        /// Elements received; `None` if there is no such receive.
        received: Option<usize>,
    },
    /// A rank went away.
    #[error("{started}: rank {peer} {how}")]
    PeerGone {
        /// This rank's call.
        started: Box<Started>,
        /// Who went away.
        peer: Rank,
        /// How it went away.
        how: Departure,
    },
    /// Not all ranks came in time.
    #[error("{started}: not done within {deadline:?}, missing {}", ranks(missing))]
    Deadline {
        /// This rank's call.
        started: Box<Started>,
        /// The time that was given.
        deadline: Duration,
        /// Who had not come.
        missing: Vec<Rank>,
    },
    /// The data could not be read or written.
    #[error("{started}: {source}")]
    Tensor {
        /// This rank's call.
        started: Box<Started>,
        /// What candle says.
        source: Arc<candle_core::Error>,
    },
    /// The library under the backend failed, or what it stands on.
    #[error("{started}: {message}")]
    Backend {
        /// This rank's call.
        started: Box<Started>,
        /// What the library says.
        message: String,
    },
    /// The thread that does this rank's collectives panicked.
    #[error("{started}: the communication thread panicked: {message}")]
    Panicked {
        /// This rank's call.
        started: Box<Started>,
        /// The panic's message.
        message: String,
    },
    /// An earlier failure, on this rank or another one, ended the world.
    #[error("{started}: the world has failed before: {first}")]
    Poisoned {
        /// This rank's call.
        started: Box<Started>,
        /// The failure that came first.
        first: Box<Self>,
    },
}

impl Error {
    /// Whether the world has ended: every outstanding and later call, on every rank, returns an
    /// error. After any other error nothing was sent and the rank may go on.
    pub fn is_fatal(&self) -> bool {
        !matches!(self, Self::Invalid { .. } | Self::Injected { .. })
    }

    /// This rank's call that the error is about.
    pub fn started(&self) -> &Started {
        match self {
            Self::Invalid { started, .. }
            | Self::Injected { started }
            | Self::Mismatch { started, .. }
            | Self::Unpaired { started, .. }
            | Self::PeerGone { started, .. }
            | Self::Deadline { started, .. }
            | Self::Tensor { started, .. }
            | Self::Backend { started, .. }
            | Self::Panicked { started, .. }
            | Self::Poisoned { started, .. } => started,
        }
    }

    /// The failure that ended the world: the error itself, or the one that poisoned it.
    pub fn first(&self) -> &Self {
        match self {
            Self::Poisoned { first, .. } => first.first(),
            error => error,
        }
    }
}

fn elements(count: Option<usize>) -> String {
    count.map_or_else(|| "no elements".to_owned(), |n| format!("{n} elements"))
}

pub(crate) fn ranks(ranks: &[Rank]) -> String {
    match ranks {
        [] => "no rank".to_owned(),
        [one] => format!("rank {one}"),
        many => {
            let names: Vec<String> = many.iter().map(ToString::to_string).collect();
            format!("ranks {}", names.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started(ops: Vec<Op>) -> Box<Started> {
        Box::new(Started {
            rank: Rank(2),
            sequence: 17,
            called: Called::Request {
                class: Class::Exchange,
                dtype: DType::BF16,
                ops,
            },
        })
    }

    #[test]
    fn a_call_is_spelled_out() {
        let send = |i| Op::Send {
            span: Span::of_len(10 * i, i),
            to: Rank(i),
        };
        let texts = [
            started(Vec::new()).to_string(),
            started(vec![Op::AllReduce(Span::of_len(0, 9))]).to_string(),
            started((0..6).map(send).collect()).to_string(),
        ];
        assert_eq!(
            texts,
            [
                "rank 2, call 17, exchange request of no operations, bf16",
                "rank 2, call 17, exchange all-reduce of 9 bf16",
                "rank 2, call 17, exchange group of 6 operations in bf16: send of 0 to rank 0, \
                 send of 1 to rank 1, send of 2 to rank 2, send of 3 to rank 3 and 2 more",
            ]
        );
    }

    #[test]
    fn a_deadline_names_who_is_missing() {
        let error = Error::Deadline {
            started: started(vec![Op::ReduceScatter(Span::of_len(0, 8))]),
            deadline: Duration::from_secs(3),
            missing: vec![Rank(1), Rank(3)],
        };
        let text = "rank 2, call 17, exchange reduce-scatter of 8 bf16: not done within 3s, missing ranks 1, 3";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn the_first_failure_is_carried() {
        let gone = Error::PeerGone {
            started: started(Vec::new()),
            peer: Rank(0),
            how: Departure::Panicked,
        };
        let poisoned = Error::Poisoned {
            started: started(Vec::new()),
            first: Box::new(gone.clone()),
        };
        assert_eq!(poisoned.first().to_string(), gone.to_string());
        assert!(poisoned.to_string().ends_with("rank 0 panicked"));
    }
}
