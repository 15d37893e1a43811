//! What travels on a connection between a rank and rank 0: a magic number each way, then frames.

use std::io::{self, Read, Write};
use std::time::Duration;

use polarshard_partition::Rank;

use super::codec::{Reader, Writer};
use crate::{Departure, Error, Introduction, Started, Stranger};

/// The first bytes each way.
pub(super) const MAGIC: [u8; 8] = *b"polshard";

/// Changes with any frame. It is part of the version that an `Introduction` tells.
pub(super) const PROTOCOL: u32 = 1;

/// No frame is longer: a length above it is no length.
const MAX_LEN: usize = 64 << 20;

/// One message.
#[derive(Debug, Clone)]
pub(super) enum Frame {
    // From a rank to the hub.
    /// Who has come. Must stay as it is, as `Disagree`: versions tell each other apart with them.
    Hello(Introduction),
    /// The deadline is over, and the world not complete.
    Late,
    /// The rank holds a pause.
    Pause,
    /// It holds none any more.
    Resume,
    /// One of the latest calls, all of which are told, is not done in time.
    Stuck {
        sequence: u64,
        deadline: Duration,
        calls: Vec<Started>,
    },
    /// The answer to `Tell`.
    Calls(Vec<Started>),
    /// The rank goes away in disorder, perhaps with a reason.
    Leave {
        how: Departure,
        said: Option<String>,
    },
    /// The rank has reached its shutdown.
    Done,

    // Both ways.
    /// Bytes of rank 0 for all.
    Payload(Vec<u8>),
    /// What ended the world.
    Failed(Error),

    // From the hub to a rank.
    /// Two processes do not fit together.
    Disagree(Introduction, Introduction),
    /// Rank 0 belongs to another run.
    OtherRun(String),
    /// Not all came in time.
    Absent {
        missing: Vec<Rank>,
        strangers: Vec<Stranger>,
    },
    /// All are here.
    Begin,
    /// Whether deadlines stand still.
    Paused(bool),
    /// Asks for the latest calls.
    Tell,
    /// A rank went away.
    Gone {
        rank: Rank,
        how: Departure,
        said: Option<String>,
    },
    /// All ranks have reached their shutdown.
    Over,
    /// The world that was here is complete, or has ended already.
    Closed,
}

impl Frame {
    /// Writes the frame, in one go.
    pub(super) fn send(&self, to: &mut impl Write) -> io::Result<()> {
        let mut writer = Writer::default();
        self.encode(&mut writer);
        let body = writer.0;
        let len = u32::try_from(body.len()).ok();
        let len = len.filter(|len| *len as usize <= MAX_LEN);
        let len = len.ok_or_else(|| malformed("a frame too long to send"))?;
        to.write_all(&[&len.to_le_bytes()[..], &body].concat())
    }

    /// Blocks until a frame has come.
    pub(super) fn receive(from: &mut impl Read) -> io::Result<Self> {
        let mut len = [0; 4];
        from.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_LEN {
            return Err(malformed("no frame"));
        }
        let mut body = Vec::new();
        from.take(len as u64).read_to_end(&mut body)?;
        if body.len() < len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut reader = Reader(&body);
        let frame = Self::decode(&mut reader).filter(|_| reader.0.is_empty());
        frame.ok_or_else(|| malformed("no frame"))
    }

    fn encode(&self, to: &mut Writer) {
        match self {
            Self::Hello(one) => {
                to.u8(0);
                to.introduction(one);
            }
            Self::Disagree(one, other) => {
                to.u8(1);
                to.introduction(one);
                to.introduction(other);
            }
            Self::Late => to.u8(2),
            Self::Pause => to.u8(3),
            Self::Resume => to.u8(4),
            Self::Stuck {
                sequence,
                deadline,
                calls,
            } => {
                to.u8(5);
                to.u64(*sequence);
                to.duration(*deadline);
                to.list(calls, Writer::started);
            }
            Self::Calls(calls) => {
                to.u8(6);
                to.list(calls, Writer::started);
            }
            Self::Leave { how, said } => {
                to.u8(7);
                to.departure(*how);
                to.option(said.as_deref(), Writer::text);
            }
            Self::Done => to.u8(8),
            Self::Payload(bytes) => {
                to.u8(9);
                to.bytes(bytes);
            }
            Self::Failed(error) => {
                to.u8(10);
                to.error(error);
            }
            Self::OtherRun(job) => {
                to.u8(11);
                to.text(job);
            }
            Self::Absent { missing, strangers } => {
                to.u8(12);
                to.list(missing, |to, rank| to.rank(*rank));
                to.list(strangers, |to, stranger| {
                    to.text(&stranger.host.to_string());
                    to.text(&stranger.did);
                });
            }
            Self::Begin => to.u8(13),
            Self::Paused(is_paused) => {
                to.u8(14);
                to.u8((*is_paused).into());
            }
            Self::Tell => to.u8(15),
            Self::Gone { rank, how, said } => {
                to.u8(16);
                to.rank(*rank);
                to.departure(*how);
                to.option(said.as_deref(), Writer::text);
            }
            Self::Over => to.u8(17),
            Self::Closed => to.u8(18),
        }
    }

    fn decode(from: &mut Reader<'_>) -> Option<Self> {
        Some(match from.u8()? {
            0 => Self::Hello(from.introduction()?),
            1 => Self::Disagree(from.introduction()?, from.introduction()?),
            2 => Self::Late,
            3 => Self::Pause,
            4 => Self::Resume,
            5 => Self::Stuck {
                sequence: from.u64()?,
                deadline: from.duration()?,
                calls: from.list(Reader::started)?,
            },
            6 => Self::Calls(from.list(Reader::started)?),
            7 => Self::Leave {
                how: from.departure()?,
                said: from.option(Reader::text)?,
            },
            8 => Self::Done,
            9 => Self::Payload(from.bytes()?.to_vec()),
            10 => Self::Failed(from.error()?),
            11 => Self::OtherRun(from.text()?),
            12 => Self::Absent {
                missing: from.list(Reader::rank)?,
                strangers: from.list(|from| {
                    let host = from.text()?.parse().ok()?;
                    let did = from.text()?;
                    Some(Stranger { host, did })
                })?,
            },
            13 => Self::Begin,
            14 => Self::Paused(from.u8()? != 0),
            15 => Self::Tell,
            16 => Self::Gone {
                rank: from.rank()?,
                how: from.departure()?,
                said: from.option(Reader::text)?,
            },
            17 => Self::Over,
            18 => Self::Closed,
            _ => return None,
        })
    }
}

fn malformed(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use polarshard_partition::{Class, Digest, Span, WorldSize};

    use super::*;
    use crate::{Called, Op};

    fn started(rank: usize, ops: Vec<Op>) -> Box<Started> {
        Box::new(Started {
            rank: Rank(rank),
            sequence: 1 << 40,
            called: Called::Request {
                class: Class::Weight,
                dtype: DType::BF16,
                ops,
            },
        })
    }

    fn frames() -> Vec<Frame> {
        let span = Span::of_len(3, 1 << 33);
        let peer = Rank(4);
        let ops = vec![
            Op::AllReduce(span),
            Op::Reduce { span, root: peer },
            Op::ReduceScatter(span),
            Op::AllGather(span),
            Op::Broadcast { span, root: peer },
            Op::Send { span, to: peer },
            Op::Recv { span, from: peer },
        ];
        let one = started(1, ops);
        let two = started(2, Vec::new());
        let shutdown = Started {
            called: Called::Shutdown,
            ..(*one).clone()
        };
        let introduction = Introduction {
            rank: Rank(2),
            world: WorldSize::new(3).expect("three ranks"),
            job: "job.1".to_owned(),
            version: "0.1.0, protocol 1".to_owned(),
            digest: Digest(u64::MAX),
            process: 77,
            host: "::1".to_owned(),
        };
        let stranger = Stranger {
            host: "127.0.0.1:80".parse().expect("an address"),
            did: "sent GET".to_owned(),
        };
        let how = Departure::Panicked;
        let errors = [
            Error::Mismatch {
                started: one.clone(),
                peer: two.clone(),
            },
            Error::Unpaired {
                started: one.clone(),
                peer: two.clone(),
                from: Rank(1),
                to: Rank(2),
                n: 5,
                sent: Some(6),
                received: None,
            },
            Error::PeerGone {
                started: one.clone(),
                peer,
                how,
            },
            Error::Deadline {
                started: one.clone(),
                deadline: Duration::from_millis(1500),
                missing: vec![Rank(0), peer],
            },
            Error::Panicked {
                started: one.clone(),
                message: "oh".to_owned(),
            },
            Error::Backend {
                started: one.clone(),
                message: "no".to_owned(),
            },
        ];
        let mut frames = vec![
            Frame::Hello(introduction.clone()),
            Frame::Disagree(introduction.clone(), introduction),
            Frame::Late,
            Frame::Pause,
            Frame::Resume,
            Frame::Stuck {
                sequence: 9,
                deadline: Duration::from_secs(9),
                calls: vec![(*one).clone()],
            },
            Frame::Calls(vec![(*two).clone(), shutdown]),
            Frame::Leave {
                how,
                said: Some("why".to_owned()),
            },
            Frame::Done,
            Frame::Payload(vec![0, 255]),
            Frame::OtherRun("x".to_owned()),
            Frame::Absent {
                missing: vec![peer],
                strangers: vec![stranger],
            },
            Frame::Begin,
            Frame::Paused(true),
            Frame::Tell,
            Frame::Gone {
                rank: peer,
                how,
                said: None,
            },
            Frame::Over,
            Frame::Closed,
        ];
        frames.extend(errors.map(Frame::Failed));
        frames
    }

    #[test]
    fn every_frame_arrives_as_it_was_sent() {
        let mut wire = Vec::new();
        for frame in frames() {
            frame.send(&mut wire).unwrap();
        }
        let mut wire = wire.as_slice();
        for frame in frames() {
            let got = Frame::receive(&mut wire).unwrap();
            assert_eq!(format!("{got:?}"), format!("{frame:?}"));
        }
        assert!(wire.is_empty());
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        for frame in frames() {
            let mut wire = Vec::new();
            frame.send(&mut wire).unwrap();
            for cut in 0..wire.len() {
                assert!(Frame::receive(&mut &wire[..cut]).is_err());
            }
            // A body that is cut short, or goes on, under a length that fits.
            for change in [-1, 1] {
                let len = wire.len() - 4;
                let mut other = wire.clone();
                other.resize(wire.len().saturating_add_signed(change), 0);
                let new = len.saturating_add_signed(change) as u32;
                other[..4].copy_from_slice(&new.to_le_bytes());
                assert!(Frame::receive(&mut other.as_slice()).is_err(), "{frame:?}");
            }
        }
        assert!(Frame::receive(&mut &b"GET / HTTP/1.1\r\n"[..]).is_err());
    }
}
