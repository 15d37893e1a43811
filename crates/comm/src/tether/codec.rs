//! Bytes of what ranks tell each other: little-endian numbers, texts and lists after their length.

use std::time::Duration;

use candle_core::DType;
use polarshard_partition::{Class, Digest, Rank, Span, WorldSize};

use crate::{Called, Departure, Error, Introduction, Op, Started};

/// A message being written.
#[derive(Debug, Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

/// A message being read; `None` from any method means that it is no message of ours.
#[derive(Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl Writer {
    pub(super) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn size(&mut self, value: usize) {
        self.u64(value as u64);
    }

    pub(super) fn bytes(&mut self, value: &[u8]) {
        self.size(value.len());
        self.0.extend(value);
    }

    pub(super) fn text(&mut self, value: &str) {
        self.bytes(value.as_bytes());
    }

    pub(super) fn option<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        self.u8(value.is_some().into());
        if let Some(value) = value {
            write(self, value);
        }
    }

    pub(super) fn list<T>(&mut self, values: &[T], write: impl Fn(&mut Self, &T)) {
        self.size(values.len());
        values.iter().for_each(|value| write(self, value));
    }

    pub(super) fn rank(&mut self, rank: Rank) {
        self.size(rank.0);
    }

    pub(super) fn duration(&mut self, value: Duration) {
        self.u64(u64::try_from(value.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(super) fn departure(&mut self, how: Departure) {
        self.u8(match how {
            Departure::Returned => 0,
            Departure::Panicked => 1,
            Departure::Lost => 2,
        });
    }

    /// Must stay as it is, so that versions can tell each other apart.
    pub(super) fn introduction(&mut self, one: &Introduction) {
        self.rank(one.rank);
        self.size(one.world.get());
        self.text(&one.job);
        self.text(&one.version);
        self.u64(one.digest.0);
        self.u64(one.process.into());
        self.text(&one.host);
    }

    pub(super) fn started(&mut self, started: &Started) {
        self.rank(started.rank);
        self.u64(started.sequence);
        let called = match &started.called {
            Called::Shutdown => None,
            Called::Request { class, dtype, ops } => Some((*class, *dtype, ops)),
        };
        self.option(called, |writer, (class, dtype, ops)| {
            writer.u8(class_code(class));
            writer.text(dtype.as_str());
            writer.list(ops, |writer, op| writer.op(*op));
        });
    }

    fn op(&mut self, op: Op) {
        self.u8(match op {
            Op::AllReduce(_) => 0,
            Op::Reduce { .. } => 1,
            Op::ReduceScatter(_) => 2,
            Op::AllGather(_) => 3,
            Op::Broadcast { .. } => 4,
            Op::Send { .. } => 5,
            Op::Recv { .. } => 6,
        });
        self.size(op.span().start);
        self.size(op.span().end);
        if let Some(peer) = op.peer() {
            self.rank(peer);
        }
    }

    /// The failure itself, not what it poisoned; causes that only this process has become texts.
    pub(super) fn error(&mut self, error: &Error) {
        let error = error.first();
        let kind = match error {
            Error::Mismatch { .. } => 0,
            Error::Unpaired { .. } => 1,
            Error::PeerGone { .. } => 2,
            Error::Deadline { .. } => 3,
            Error::Panicked { .. } => 4,
            _ => 5,
        };
        self.u8(kind);
        self.started(error.started());
        match error {
            Error::Mismatch { peer, .. } => self.started(peer),
            Error::Unpaired {
                peer,
                from,
                to,
                n,
                sent,
                received,
                ..
            } => {
                self.started(peer);
                self.rank(*from);
                self.rank(*to);
                self.size(*n);
                self.option(*sent, Self::size);
                self.option(*received, Self::size);
            }
            Error::PeerGone { peer, how, .. } => {
                self.rank(*peer);
                self.departure(*how);
            }
            Error::Deadline {
                deadline, missing, ..
            } => {
                self.duration(*deadline);
                self.list(missing, |writer, rank| writer.rank(*rank));
            }
            Error::Panicked { message, .. } | Error::Backend { message, .. } => self.text(message),
            Error::Tensor { source, .. } => self.text(&source.to_string()),
            other => self.text(&other.to_string()),
        }
    }
}

impl<'a> Reader<'a> {
    pub(super) fn u8(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*first))
    }

    pub(super) fn size(&mut self) -> Option<usize> {
        usize::try_from(self.u64()?).ok()
    }

    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.size()?;
        let (first, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(first)
    }

    pub(super) fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    pub(super) fn option<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Option<T>,
    ) -> Option<Option<T>> {
        match self.u8()? {
            0 => Some(None),
            1 => read(self).map(Some),
            _ => None,
        }
    }

    pub(super) fn list<T>(&mut self, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        // Collected one by one: a length that lies ends the bytes, not the memory.
        (0..self.size()?).map(|_| read(self)).collect()
    }

    pub(super) fn rank(&mut self) -> Option<Rank> {
        self.size().map(Rank)
    }

    pub(super) fn duration(&mut self) -> Option<Duration> {
        self.u64().map(Duration::from_nanos)
    }

    pub(super) fn departure(&mut self) -> Option<Departure> {
        match self.u8()? {
            0 => Some(Departure::Returned),
            1 => Some(Departure::Panicked),
            2 => Some(Departure::Lost),
            _ => None,
        }
    }

    pub(super) fn introduction(&mut self) -> Option<Introduction> {
        let introduction = Introduction {
            rank: self.rank()?,
            world: WorldSize::new(self.size()?).ok()?,
            job: self.text()?,
            version: self.text()?,
            digest: Digest(self.u64()?),
            process: u32::try_from(self.u64()?).ok()?,
            host: self.text()?,
        };
        (introduction.rank.0 < introduction.world.get()).then_some(introduction)
    }

    pub(super) fn started(&mut self) -> Option<Started> {
        Some(Started {
            rank: self.rank()?,
            sequence: self.u64()?,
            called: match self.option(Self::request)? {
                Some(request) => request,
                None => Called::Shutdown,
            },
        })
    }

    fn request(&mut self) -> Option<Called> {
        let code = self.u8()?;
        Some(Called::Request {
            class: Class::ALL
                .into_iter()
                .find(|class| class_code(*class) == code)?,
            dtype: self.text()?.parse::<DType>().ok()?,
            ops: self.list(Self::op)?,
        })
    }

    fn op(&mut self) -> Option<Op> {
        let kind = self.u8()?;
        let (start, end) = (self.size()?, self.size()?);
        // Built by hand: a span from outside may end before it begins.
        let span = Span { start, end };
        Some(match kind {
            0 => Op::AllReduce(span),
            1 => Op::Reduce {
                span,
                root: self.rank()?,
            },
            2 => Op::ReduceScatter(span),
            3 => Op::AllGather(span),
            4 => Op::Broadcast {
                span,
                root: self.rank()?,
            },
            5 => Op::Send {
                span,
                to: self.rank()?,
            },
            6 => Op::Recv {
                span,
                from: self.rank()?,
            },
            _ => return None,
        })
    }

    pub(super) fn error(&mut self) -> Option<Error> {
        let kind = self.u8()?;
        let started = Box::new(self.started()?);
        Some(match kind {
            0 => Error::Mismatch {
                started,
                peer: Box::new(self.started()?),
            },
            1 => Error::Unpaired {
                started,
                peer: Box::new(self.started()?),
                from: self.rank()?,
                to: self.rank()?,
                n: self.size()?,
                sent: self.option(Self::size)?,
                received: self.option(Self::size)?,
            },
            2 => Error::PeerGone {
                started,
                peer: self.rank()?,
                how: self.departure()?,
            },
            3 => Error::Deadline {
                started,
                deadline: self.duration()?,
                missing: self.list(Self::rank)?,
            },
            4 => Error::Panicked {
                started,
                message: self.text()?,
            },
            5 => Error::Backend {
                started,
                message: self.text()?,
            },
            _ => return None,
        })
    }
}

fn class_code(class: Class) -> u8 {
    match class {
        Class::Gradient => 0,
        Class::Exchange => 1,
        Class::Weight => 2,
        Class::Control => 3,
    }
}
