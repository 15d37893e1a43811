//! The connections that hold a world of processes together: a star of TCP connections, with a hub in
//! rank 0's process, open from the first hello to the shutdown.
//!
//! They carry no data of collectives. They decide who is in the world ([`Tether::join`]), hand out
//! what rank 0 has for all, and notice when a process dies: its connection closes, and every other
//! rank is told its name. They stop all deadlines while one rank holds a [`Pause`]. When a call is not
//! done in time, the ranks tell their latest calls, so that the error names both sides.
//!
//! Nothing is encrypted and nobody has to prove who it is: the network is trusted, as NCCL's own
//! connections trust it.

mod codec;
mod dial;
mod frame;
mod host;
mod hub;
mod link;
mod verdict;

use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use polarshard_partition::{Digest, Rank, WorldSize};

use self::dial::{Attempt, Dial};
use self::host::Host;
use crate::launch::Launch;
use crate::{Departure, Error, Introduction, Pause, SetupError, Started};

pub(crate) use self::link::Link;

/// The version of this crate and of what travels here: what must be the same on all ranks.
pub(crate) fn version() -> String {
    format!(
        "{}, protocol {}",
        env!("CARGO_PKG_VERSION"),
        frame::PROTOCOL
    )
}

/// One rank's end of the connections. Dropping it without [`shutdown`](Self::shutdown) tells the
/// other ranks that this one is gone.
#[derive(Debug)]
pub struct Tether {
    link: Arc<Link>,
    /// Rank 0 keeps the hub; it goes after the link, when the others have been told.
    host: Option<Host>,
}

impl Tether {
    /// Joins the world of `launch`, and blocks until all ranks have: ranks of the same version, that
    /// expect as many ranks, and whose callers have the same `digest` of all that must be alike.
    ///
    /// Rank 0 listens on the first of [`Launch::ports`] that is free. If it cannot join it stays until
    /// every other rank has been told why, for the `deadline` at most.
    ///
    /// # Errors
    /// [`SetupError::Disagree`] on all ranks if two do not fit together, with both sides;
    /// [`SetupError::Deadline`] if not all came in time, with those who did not;
    /// [`SetupError::Unreachable`] if nobody answered as rank 0; [`SetupError::Listen`] on rank 0 if
    /// no port is free.
    pub fn join(launch: &Launch, digest: Digest, deadline: Duration) -> Result<Self, SetupError> {
        let me = Introduction::new(launch, digest);
        Self::join_as(me, launch.address(), launch.ports(), deadline)
    }

    /// The same under another name than the launcher's.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn join_as(
        me: Introduction,
        address: &str,
        ports: [u16; 2],
        deadline: Duration,
    ) -> Result<Self, SetupError> {
        let dial = Dial {
            me: &me,
            address,
            begun: Instant::now(),
            deadline,
        };
        if me.rank != Rank(0) {
            let stream = dial.connect(ports)?;
            return Self::hold(me, stream, None);
        }
        let (host, own, port) = host::open(&dial, ports)?;
        let to_self = Dial {
            address: &own,
            ..dial
        };
        match to_self.attempt(port) {
            Ok(stream) => Self::hold(me, stream, Some(host)),
            Err(Attempt::Final(error)) => Err(error),
            Err(Attempt::Again(trouble)) => Err(SetupError::Unreachable {
                address: own,
                me: Box::new(me),
                ports,
                deadline,
                trouble,
            }),
        }
    }

    /// Hands out bytes of rank 0: it brings `Some`, the others `None`, and all get them.
    ///
    /// # Errors
    /// [`SetupError::PeerGone`] if a rank went away, and [`SetupError::Deadline`].
    pub fn hand_out(
        &self,
        mine: Option<Vec<u8>>,
        deadline: Duration,
    ) -> Result<Vec<u8>, SetupError> {
        self.link.hand_out(mine, deadline)
    }

    /// Who this is.
    pub fn rank(&self) -> Rank {
        self.link.me().rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> WorldSize {
        self.link.me().world
    }

    /// Notes that this rank has come to a call, for when the ranks compare theirs.
    ///
    /// # Errors
    /// What ended the world before.
    pub fn note(&self, started: &Started) -> Result<(), Error> {
        self.link.note(started)
    }

    /// Why `started` can never be done, if so.
    pub fn failure(&self, started: &Started) -> Option<Error> {
        self.link.failure(started)
    }

    /// Ends the world with a failure of this rank: the others are told.
    pub fn fail(&self, error: &Error) {
        self.link.fail(error);
    }

    /// Ends the world because a call that was noted is not done within `deadline`, and says why: the
    /// ranks tell their latest calls, which takes a few seconds at most.
    pub fn expire(&self, started: &Started, deadline: Duration) -> Error {
        self.link.expire(started, deadline)
    }

    /// How long the world has been running, pauses of any rank left out: what deadlines are measured
    /// by.
    pub fn running(&self) -> Duration {
        self.link.running()
    }

    /// Stops the deadlines of all ranks until the guard is dropped.
    pub fn pause(&self) -> Pause {
        self.link.pause()
    }

    /// Blocks until all ranks do the same; `started` is a [`Called::Shutdown`](crate::Called).
    ///
    /// # Errors
    /// A rank is gone, does something else, or does not come within `deadline`.
    pub fn shutdown(&self, started: &Started, deadline: Duration) -> Result<(), Error> {
        self.link.shutdown(started, deadline)
    }

    /// Tells the others that this rank goes away, and why.
    pub fn leave(&self, how: Departure, said: Option<String>) {
        self.link.leave(how, said);
    }

    /// What the threads of a backend share.
    #[cfg(feature = "nccl")]
    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    fn hold(me: Introduction, stream: TcpStream, host: Option<Host>) -> Result<Self, SetupError> {
        let rank = me.rank;
        let failed = |e: std::io::Error| SetupError::Backend {
            rank,
            message: e.to_string(),
        };
        let link = Link::start(me, stream).map_err(failed)?;
        Ok(Self { link, host })
    }
}

impl Drop for Tether {
    fn drop(&mut self) {
        let how = if thread::panicking() {
            Departure::Panicked
        } else {
            Departure::Returned
        };
        // After a shutdown nobody listens any more.
        self.link.leave(how, None);
        self.link.hang_up();
        drop(self.host.take());
    }
}
