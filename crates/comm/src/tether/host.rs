//! Rank 0's side of the connections: a door that listens, and a thread a connection.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::dial::{Attempt, Dial};
use super::frame::{Frame, MAGIC};
use super::hub::{Hub, Line, Sends};
use crate::{Introduction, SetupError, Stranger};

/// How often the door is looked after, while ranks come and later.
const POLL: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// How long somebody may take to say who it is.
const HELLO: Duration = Duration::from_secs(10);

/// How long a rank may take to receive what it is sent: it has a thread that does nothing else.
const WRITE: Duration = Duration::from_secs(5);

/// How long the ranks may take, at the end, to hear why.
const LINGER: Duration = Duration::from_secs(2);

/// The hub of a world, at work. Dropping it waits until the ranks have heard the last word.
#[derive(Debug)]
pub(super) struct Host {
    shared: Arc<Shared>,
    door: Option<thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    desk: Mutex<Desk>,
    made: Instant,
}

#[derive(Debug)]
struct Desk {
    hub: Hub,
    lines: BTreeMap<Line, TcpStream>,
    next: usize,
    /// When rank 0 itself had enough.
    closing: Option<Duration>,
}

impl Host {
    /// Listens for the ranks of `own`'s world.
    fn new(listener: TcpListener, own: Introduction, deadline: Duration) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            desk: Mutex::new(Desk {
                hub: Hub::new(own, deadline),
                lines: BTreeMap::new(),
                next: 0,
                closing: None,
            }),
            made: Instant::now(),
        });
        let host = Arc::clone(&shared);
        let door = thread::Builder::new()
            .name("tether-door".to_owned())
            .spawn(move || host.keep_door(&listener, deadline))?;
        Ok(Self {
            shared,
            door: Some(door),
        })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let now = self.shared.made.elapsed();
        self.shared.desk().closing = Some(now);
        if let Some(door) = self.door.take() {
            // Bounded by the deadline of the setup and by `LINGER`.
            let _ = door.join();
        }
    }
}

/// Listens on the first port that is free, and returns where this machine itself finds the hub. What
/// holds a port may be the store of the launcher's agent, but also another rank 0 of this world: then
/// both are told.
pub(super) fn open(dial: &Dial<'_>, ports: [u16; 2]) -> Result<(Host, String, u16), SetupError> {
    let interface = interface(dial.address);
    let own = match interface {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for port in ports {
        let listening = TcpListener::bind((interface, port));
        match listening.and_then(|door| Host::new(door, dial.me.clone(), dial.deadline)) {
            Ok(host) => return Ok((host, own.to_string(), port)),
            Err(e) => last = e,
        }
        if let Err(Attempt::Final(error)) = dial.attempt(port) {
            return Err(error);
        }
    }
    Err(SetupError::Listen {
        ports,
        source: Arc::new(last),
    })
}

/// This machine alone if the address says so literally, else everywhere: a machine's own name often
/// stands for its loopback, but to itself only.
fn interface(address: &str) -> IpAddr {
    let resolve = || (address, 0).to_socket_addrs().ok()?.next();
    match (address.parse::<IpAddr>(), resolve()) {
        (Ok(ip), _) if ip.is_loopback() => ip,
        (_, Some(at)) if address == "localhost" => at.ip(),
        (_, Some(SocketAddr::V6(_))) => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    }
}

impl Shared {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        // The hub panics for broken invariants only, and then every rank loses its connection.
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep_door(self: &Arc<Self>, listener: &TcpListener, deadline: Duration) {
        loop {
            while let Ok((stream, from)) = listener.accept() {
                self.answer(stream, from);
            }
            let now = self.made.elapsed();
            let mut desk = self.desk();
            let sends = desk.hub.tick(now);
            desk.send(sends);
            if desk.is_over(now, deadline) {
                // The threads of the connections end with them.
                for stream in desk.lines.values() {
                    let _ = stream.shutdown(std::net::Shutdown::Both);
                }
                return;
            }
            let poll = if desk.hub.is_running() {
                POLL.1
            } else {
                POLL.0
            };
            drop(desk);
            thread::sleep(poll);
        }
    }

    /// One more connection, on a thread of its own: whoever is silent holds nobody up.
    fn answer(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) {
        let shared = Arc::clone(self);
        let line = {
            let mut desk = self.desk();
            desk.next += 1;
            Line(desk.next)
        };
        // Without a thread there is no connection: its process will try again.
        let _ = thread::Builder::new()
            .name(format!("tether-{}", line.0))
            .spawn(move || {
                if let Err(did) = shared.serve(line, stream, from) {
                    let stranger = Stranger { host: from, did };
                    shared.desk().hub.note_stranger(stranger);
                }
                let mut desk = shared.desk();
                desk.lines.remove(&line);
                let sends = desk.hub.close(line);
                desk.send(sends);
            });
    }

    /// Until the connection ends; what it did if it was never one of a rank.
    fn serve(&self, line: Line, mut stream: TcpStream, from: SocketAddr) -> Result<(), String> {
        let who = greet(&mut stream, from)?;
        let writer = stream.try_clone().map_err(|e| e.to_string())?;
        {
            let mut desk = self.desk();
            desk.lines.insert(line, writer);
            let sends = desk.hub.arrive(line, who);
            desk.send(sends);
        }
        while let Ok(frame) = Frame::receive(&mut stream) {
            let now = self.made.elapsed();
            let mut desk = self.desk();
            let sends = desk.hub.hear(line, frame, now);
            desk.send(sends);
        }
        Ok(())
    }
}

impl Desk {
    fn send(&mut self, sends: Sends) {
        let mut sends = VecDeque::from(sends);
        while let Some((line, frame)) = sends.pop_front() {
            let Some(stream) = self.lines.get_mut(&line) else {
                continue;
            };
            if frame.send(stream).is_err() {
                let _ = stream.shutdown(std::net::Shutdown::Both);
                self.lines.remove(&line);
                sends.extend(self.hub.close(line));
            }
        }
    }

    fn is_over(&self, now: Duration, deadline: Duration) -> bool {
        let Some(closing) = self.closing else {
            return false;
        };
        if self.hub.is_telling() && now < deadline {
            return false;
        }
        self.lines.is_empty() || now >= closing.saturating_add(LINGER)
    }
}

/// Says that this is rank 0, and hears who the other side is.
fn greet(stream: &mut TcpStream, from: SocketAddr) -> Result<Introduction, String> {
    let setup = |stream: &mut TcpStream| {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(WRITE))?;
        stream.set_read_timeout(Some(HELLO))?;
        stream.write_all(&MAGIC)
    };
    setup(stream).map_err(|e| format!("came and went: {e}"))?;
    let mut magic = [0; MAGIC.len()];
    stream
        .read_exact(&mut magic)
        .map_err(|e| format!("said nothing: {e}"))?;
    if magic != MAGIC {
        return Err(format!(
            "spoke something else: {:?}",
            magic.escape_ascii().to_string()
        ));
    }
    match Frame::receive(stream) {
        Ok(Frame::Hello(mut who)) => {
            who.host = from.ip().to_string();
            let endless = stream.set_read_timeout(None);
            endless.map_err(|e| e.to_string())?;
            Ok(who)
        }
        Ok(_) => Err("did not say who it is".to_owned()),
        Err(e) => Err(format!("did not say who it is: {e}")),
    }
}
