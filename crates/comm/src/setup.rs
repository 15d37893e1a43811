//! Why a world of processes did not come to be.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use polarshard_partition::{Digest, Rank, WorldSize};

use crate::Departure;
use crate::launch::Launch;
use crate::tether::version;

/// What one process says of itself when it joins: what all ranks must agree on, and who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Introduction {
    /// Its rank.
    pub rank: Rank,
    /// How many ranks it believes there are.
    pub world: WorldSize,
    /// Which run it belongs to, [`Launch::job`].
    pub job: String,
    /// The version of this crate that it was built with.
    pub version: String,
    /// The digest of what its caller wants all ranks to have alike.
    pub digest: Digest,
    /// Its process id.
    pub process: u32,
    /// Its address, as rank 0 sees it.
    pub host: String,
}

impl Introduction {
    /// What this process says of itself.
    pub fn new(launch: &Launch, digest: Digest) -> Self {
        Self {
            rank: launch.rank(),
            world: launch.world(),
            job: launch.job().to_owned(),
            version: version(),
            digest,
            process: std::process::id(),
            host: "this machine".to_owned(),
        }
    }
}

/// `rank 3 (process 4242 on 10.0.0.7)`
impl fmt::Display for Introduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            process,
            host,
            ..
        } = self;
        write!(f, "rank {rank} (process {process} on {host})")
    }
}

/// What two processes that should form a world do not agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aspect {
    /// The version of this crate, or of the protocol.
    Version,
    /// The number of ranks.
    World,
    /// Both are the same rank.
    Rank,
    /// The caller's digest: configuration, model, layout.
    Digest,
}

impl Aspect {
    /// The first aspect in which two processes of one world do not fit together.
    pub fn of(one: &Introduction, other: &Introduction) -> Option<Self> {
        if one.version != other.version {
            Some(Self::Version)
        } else if one.world != other.world {
            Some(Self::World)
        } else if one.rank == other.rank {
            Some(Self::Rank)
        } else if one.digest != other.digest {
            Some(Self::Digest)
        } else {
            None
        }
    }

    /// What one of the two has in this aspect.
    fn shown(self, one: &Introduction) -> String {
        match self {
            Self::Version => format!("{one} has version {}", one.version),
            Self::World => format!("{one} expects {} ranks", one.world),
            Self::Rank => one.to_string(),
            Self::Digest => format!("{one} has the digest {}", one.digest),
        }
    }
}

impl fmt::Display for Aspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version => "of different versions",
            Self::World => "of worlds of different sizes",
            Self::Rank => "the same rank",
            Self::Digest => "configured differently",
        })
    }
}

/// Why this process is no rank of a world, or could not become one.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// A variable of the launcher has a value that means nothing.
    #[error("{name} is {value:?} instead of {expected}")]
    Variable {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// One variable of the launcher is set, and another one that belongs to it is not.
    #[error("{given} is set, but {missing} is not")]
    Unset {
        /// The variable that is there.
        given: String,
        /// The variable that is not.
        missing: String,
    },
    /// A rank is no rank of the world.
    #[error("rank {rank} is outside the world of {world} ranks")]
    OutsideWorld {
        /// The rank.
        rank: usize,
        /// The number of ranks.
        world: usize,
    },
    /// The ranks of a machine do not fit into the world, or a rank of the machine not among them.
    #[error(
        "local rank {local_rank} of {local_world} on this machine does not fit a world of {world}"
    )]
    OutsideMachine {
        /// The rank among those of its machine.
        local_rank: usize,
        /// How many the machine has.
        local_world: usize,
        /// The number of ranks.
        world: usize,
    },
    /// A child process could not be started or awaited.
    #[error("the process of rank {rank}: {source}")]
    Child {
        /// The child's rank.
        rank: Rank,
        /// What the system says.
        source: Arc<io::Error>,
    },
    /// Rank 0 can listen on neither of the ports.
    #[error("rank 0 can listen neither on port {} nor on port {}: {source}", ports[0], ports[1])]
    Listen {
        /// The ports.
        ports: [u16; 2],
        /// What the system says about the second one.
        source: Arc<io::Error>,
    },
    /// Nobody answered as rank 0 in time.
    #[error(
        "{me} found no rank 0 at {address}, ports {} and {}, within {deadline:?}: {trouble}",
        ports[0], ports[1]
    )]
    Unreachable {
        /// This process.
        me: Box<Introduction>,
        /// Where it looked.
        address: String,
        /// On which ports.
        ports: [u16; 2],
        /// For how long.
        deadline: Duration,
        /// What was wrong the last time.
        trouble: String,
    },
    /// Two processes do not fit together.
    #[error("two ranks are {aspect}: {}, {}", aspect.shown(one), aspect.shown(other))]
    Disagree {
        /// In what.
        aspect: Aspect,
        /// One side.
        one: Box<Introduction>,
        /// The other side.
        other: Box<Introduction>,
    },
    /// Not all ranks came in time.
    #[error(
        "{me} waited for the other ranks: not all came within {deadline:?}, missing {}{}",
        crate::error::ranks(missing),
        visitors(strangers)
    )]
    Deadline {
        /// This process.
        me: Box<Introduction>,
        /// The time that was given.
        deadline: Duration,
        /// Who had not come.
        missing: Vec<Rank>,
        /// Who came to rank 0 instead, speaking something else: a port scan, another program.
        strangers: Vec<Stranger>,
    },
    /// A rank went away before the world was complete.
    #[error("rank {peer} {how}{}", because(said))]
    PeerGone {
        /// Who went away.
        peer: Rank,
        /// How.
        how: Departure,
        /// What it said about the reason, if anything.
        said: Option<String>,
    },
    /// A library that the backend needs cannot be loaded.
    #[error("no usable {library}, tried {}: {reason}", tried.join(", "))]
    Library {
        /// The library.
        library: &'static str,
        /// The names it was looked for under.
        tried: Vec<String>,
        /// What the loader says.
        reason: String,
    },
    /// The device is none on which the backend can work.
    #[error("{0}")]
    Device(String),
    /// A call into the backend's library failed.
    #[error("rank {rank}: {message}")]
    Backend {
        /// This rank.
        rank: Rank,
        /// What the library says.
        message: String,
    },
}

/// Something that connected to rank 0 and is no rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stranger {
    /// Where it came from.
    pub host: SocketAddr,
    /// What it did.
    pub did: String,
}

fn visitors(strangers: &[Stranger]) -> String {
    let shown = strangers.iter().take(4);
    shown
        .map(|Stranger { host, did }| format!("; {host} {did}"))
        .collect()
}

fn because(said: &Option<String>) -> String {
    said.as_ref()
        .map_or_else(String::new, |said| format!(": {said}"))
}
