//! How a rank finds rank 0 and is let in.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::frame::{Frame, MAGIC};
use crate::{Aspect, Introduction, SetupError};

/// How long a connection, or an answer to it, may take before the next port is tried.
const ANSWER: Duration = Duration::from_secs(2);

/// The shortest and longest time between two attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));

/// How long rank 0 may take to say who is missing.
const LAST_WORD: Duration = Duration::from_secs(1);

/// Why an attempt failed.
#[derive(Debug)]
pub(super) enum Attempt {
    /// Rank 0 is not there, or not yet.
    Again(String),
    /// There will be no world.
    Final(SetupError),
}

/// Where and who, and when it is over.
#[derive(Debug)]
pub(super) struct Dial<'a> {
    pub(super) me: &'a Introduction,
    pub(super) address: &'a str,
    pub(super) begun: Instant,
    pub(super) deadline: Duration,
}

impl Dial<'_> {
    /// Tries the ports in turn until rank 0 has let this rank in and all others have come.
    pub(super) fn connect(&self, ports: [u16; 2]) -> Result<TcpStream, SetupError> {
        let mut pause = BACKOFF.0;
        let mut trouble = ports.map(|_| None);
        loop {
            for (port, trouble) in ports.into_iter().zip(&mut trouble) {
                match self.attempt(port) {
                    Ok(stream) => return Ok(stream),
                    Err(Attempt::Final(error)) => return Err(error),
                    // An attempt that the deadline cut short says less than the one before it.
                    Err(Attempt::Again(why)) if trouble.is_none() || !self.left().is_zero() => {
                        *trouble = Some(format!("port {port}: {why}"));
                    }
                    Err(Attempt::Again(_)) => {}
                }
            }
            let left = self.left();
            if left.is_zero() {
                return Err(SetupError::Unreachable {
                    me: Box::new(self.me.clone()),
                    address: self.address.to_owned(),
                    ports,
                    deadline: self.deadline,
                    trouble: trouble.into_iter().flatten().collect::<Vec<_>>().join(", "),
                });
            }
            thread::sleep(pause.min(left));
            pause = (2 * pause).min(BACKOFF.1);
        }
    }

    /// One attempt on one port; blocks until the world is complete if rank 0 is there.
    pub(super) fn attempt(&self, port: u16) -> Result<TcpStream, Attempt> {
        let again = |e: io::Error| Attempt::Again(e.to_string());
        let mut stream = self.reach(port).map_err(again)?;
        self.introduce(&mut stream).map_err(|e| {
            Attempt::Again(format!(
                "something listens, but does not answer as rank 0: {e}"
            ))
        })?;
        let mut is_late = false;
        loop {
            let left = if is_late { LAST_WORD } else { self.left() };
            stream
                .set_read_timeout(Some(at_least(left)))
                .map_err(again)?;
            match Frame::receive(&mut stream) {
                Ok(Frame::Begin) => {
                    stream.set_read_timeout(None).map_err(again)?;
                    return Ok(stream);
                }
                Ok(frame) => {
                    if let Some(end) = self.refusal(frame) {
                        return Err(end);
                    }
                }
                Err(e) if is_timeout(&e) && !is_late => {
                    is_late = true;
                    Frame::Late.send(&mut stream).map_err(again)?;
                }
                Err(e) if is_timeout(&e) => {
                    return Err(Attempt::Final(self.late(Vec::new(), Vec::new())));
                }
                Err(e) => return Err(Attempt::Again(format!("rank 0 is gone: {e}"))),
            }
        }
    }

    fn reach(&self, port: u16) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        for at in (self.address, port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&at, at_least(self.left().min(ANSWER))) {
                Ok(stream) => return Ok(stream),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// Says who this is, and makes sure that the other side is a rank 0.
    fn introduce(&self, stream: &mut TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(ANSWER))?;
        stream.write_all(&MAGIC)?;
        Frame::Hello(self.me.clone()).send(stream)?;
        stream.set_read_timeout(Some(at_least(self.left().min(ANSWER))))?;
        let mut magic = [0; MAGIC.len()];
        stream.read_exact(&mut magic)?;
        if magic == MAGIC {
            return Ok(());
        }
        let said = magic.escape_ascii().to_string();
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("it says {said:?}"),
        ))
    }

    /// What a frame that is not `Begin` means for the attempt.
    fn refusal(&self, frame: Frame) -> Option<Attempt> {
        match frame {
            Frame::Disagree(one, other) => {
                // Another version may know aspects that this one does not.
                let aspect = Aspect::of(&one, &other).unwrap_or(Aspect::Version);
                Some(Attempt::Final(SetupError::Disagree {
                    aspect,
                    one: Box::new(one),
                    other: Box::new(other),
                }))
            }
            Frame::OtherRun(job) => Some(Attempt::Again(format!(
                "rank 0 there belongs to the run {job:?}, this one to {:?}",
                self.me.job
            ))),
            Frame::Closed => Some(Attempt::Again("the world there has ended".to_owned())),
            Frame::Absent { missing, strangers } => {
                Some(Attempt::Final(self.late(missing, strangers)))
            }
            _ => None,
        }
    }

    fn late(
        &self,
        missing: Vec<polarshard_partition::Rank>,
        strangers: Vec<crate::Stranger>,
    ) -> SetupError {
        SetupError::Deadline {
            me: Box::new(self.me.clone()),
            deadline: self.deadline,
            missing,
            strangers,
        }
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_sub(self.begun.elapsed())
    }
}

/// Sockets take no time of zero.
fn at_least(time: Duration) -> Duration {
    time.max(Duration::from_millis(1))
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}
