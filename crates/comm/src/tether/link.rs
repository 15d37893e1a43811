//! A rank's own connection: what it says, what it hears, and what it knows by that.

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use polarshard_partition::Rank;

use super::frame::Frame;
use super::hub;
use crate::clock::{self, Clock};
use crate::sync::{Blocking, Look, Monitor};
use crate::{Departure, Error, Introduction, Pause, SetupError, Started};

/// How many of its latest calls a rank remembers.
const REMEMBERED: usize = 64;

/// How long to wait for the hub's verdict on a call that is not done in time.
const VERDICT: Duration = hub::GRACE.saturating_add(Duration::from_secs(2));

/// A rank's connection and what came over it.
#[derive(Debug)]
pub(crate) struct Link {
    me: Introduction,
    monitor: Blocking<State>,
    writer: Mutex<TcpStream>,
}

/// What a rank knows of its world.
#[derive(Debug, Default)]
pub(crate) struct State {
    clock: Clock,
    /// This rank's own guards.
    guards: usize,
    /// The latest calls of this rank.
    calls: VecDeque<Started>,
    /// What rank 0 has handed out and nobody here has taken.
    payloads: VecDeque<Vec<u8>>,
    /// A rank that went away, which no call has met yet, perhaps.
    gone: Option<(Rank, Departure, Option<String>)>,
    /// What ended the world.
    first: Option<Error>,
    /// All ranks have reached their shutdown.
    is_over: bool,
}

impl Link {
    /// The link of a rank that has been let in, and the thread that reads its connection.
    pub(super) fn start(me: Introduction, stream: TcpStream) -> io::Result<Arc<Self>> {
        let reader = stream.try_clone()?;
        let link = Arc::new(Self {
            me,
            monitor: Blocking::new(State::default()),
            writer: Mutex::new(stream),
        });
        let watched = Arc::clone(&link);
        thread::Builder::new()
            .name(format!("tether-of-{}", link.me.rank))
            .spawn(move || watched.watch(reader))?;
        Ok(link)
    }

    pub(super) fn me(&self) -> &Introduction {
        &self.me
    }

    pub(super) fn hand_out(
        &self,
        mine: Option<Vec<u8>>,
        deadline: Duration,
    ) -> Result<Vec<u8>, SetupError> {
        if let Some(bytes) = mine {
            self.send(&Frame::Payload(bytes));
        }
        let found = |state: &mut State| match state.payloads.pop_front() {
            Some(bytes) => Some(Ok(bytes)),
            None => state.setup_failure().map(Err),
        };
        let late = |_: &mut State| {
            Err(SetupError::Deadline {
                me: Box::new(self.me.clone()),
                deadline,
                missing: vec![Rank(0)],
                strangers: Vec::new(),
            })
        };
        self.wait(deadline, found, late)
    }

    pub(crate) fn note(&self, started: &Started) -> Result<(), Error> {
        self.monitor.update(|state, _| {
            if let Some(error) = state.failure(started) {
                return Err(error);
            }
            if state.calls.len() == REMEMBERED {
                state.calls.pop_front();
            }
            state.calls.push_back(started.clone());
            Ok(())
        })
    }

    pub(crate) fn failure(&self, started: &Started) -> Option<Error> {
        self.monitor.update(|state, _| state.failure(started))
    }

    /// The same before there are calls.
    #[cfg(feature = "nccl")]
    pub(crate) fn setup_failure(&self) -> Option<SetupError> {
        self.monitor.update(|state, _| state.setup_failure())
    }

    pub(crate) fn fail(&self, error: &Error) {
        let is_news = self.monitor.update(|state, _| {
            // A rank that is gone is the reason for what goes wrong after it.
            let is_news = state.first.is_none() && state.gone.is_none();
            if is_news {
                state.first = Some(error.clone());
            }
            is_news
        });
        if is_news {
            self.send(&Frame::Failed(error.clone()));
        }
    }

    pub(crate) fn expire(&self, started: &Started, deadline: Duration) -> Error {
        let asked = self
            .monitor
            .update(|state, _| match state.failure(started) {
                Some(error) => Err(error),
                None => Ok(state.calls.iter().cloned().collect()),
            });
        let mut calls: Vec<Started> = match asked {
            Ok(calls) => calls,
            Err(error) => return error,
        };
        // It may be too long ago to be remembered.
        if calls.iter().all(|call| call.sequence != started.sequence) {
            calls.insert(0, started.clone());
        }
        self.send(&Frame::Stuck {
            sequence: started.sequence,
            deadline,
            calls,
        });
        self.await_failure(started, VERDICT).unwrap_or_else(|| {
            let error = Error::Deadline {
                started: Box::new(started.clone()),
                deadline,
                missing: Vec::new(),
            };
            self.fail(&error);
            error
        })
    }

    /// Waits a while for bad news that is on its way. No pause stops this time.
    pub(crate) fn await_failure(&self, started: &Started, time: Duration) -> Option<Error> {
        let mut over = None;
        self.monitor.wait(|state, now| {
            let over = *over.get_or_insert(now.saturating_add(time));
            match state.failure(started) {
                Some(error) => Look::Found(Some(error)),
                None if now >= over => Look::Found(None),
                None => Look::Again(Some(over)),
            }
        })
    }

    pub(crate) fn running(&self) -> Duration {
        self.monitor.update(|state, now| state.clock.running(now))
    }

    pub(crate) fn pause(self: &Arc<Self>) -> Pause {
        self.hold_pause(true);
        let this = Arc::clone(self);
        Pause::new(move || this.hold_pause(false))
    }

    fn hold_pause(&self, is_begun: bool) {
        // Locked around both, so that the hub hears of the guards in their order.
        let mut writer = self.writer();
        let is_news = self.monitor.update(|state, now| {
            if is_begun {
                state.clock.pause(now);
                state.guards += 1;
                state.guards == 1
            } else {
                state.clock.resume(now);
                state.guards -= 1;
                state.guards == 0
            }
        });
        let frame = if is_begun {
            Frame::Pause
        } else {
            Frame::Resume
        };
        if is_news {
            // A connection that is broken is noticed by the thread that reads it.
            let _ = frame.send(&mut *writer);
        }
    }

    pub(crate) fn shutdown(&self, started: &Started, deadline: Duration) -> Result<(), Error> {
        self.note(started)?;
        self.send(&Frame::Done);
        let found = |state: &mut State| match state.is_over {
            true => Some(Some(Ok(()))),
            false => state.failure(started).map(|error| Some(Err(error))),
        };
        self.wait(deadline, found, |_| None)
            .unwrap_or_else(|| Err(self.expire(started, deadline)))
    }

    pub(crate) fn leave(&self, how: Departure, said: Option<String>) {
        let is_news = self.monitor.update(|state, _| {
            let is_news = !state.is_over && state.first.is_none() && state.gone.is_none();
            if is_news {
                state.gone = Some((self.me.rank, how, said.clone()));
            }
            is_news
        });
        if is_news {
            self.send(&Frame::Leave { how, said });
        }
    }

    /// Makes everyone who waits look again, after a change outside the state.
    #[cfg(feature = "nccl")]
    pub(crate) fn wake(&self) {
        self.monitor.update(|_, _| ());
    }

    /// Blocks until `found` gives something, within the `deadline`, pauses left out; `late` decides
    /// when it is over.
    pub(crate) fn wait<R>(
        &self,
        deadline: Duration,
        found: impl FnMut(&mut State) -> Option<R>,
        late: impl Fn(&mut State) -> R,
    ) -> R {
        clock::wait(&self.monitor, |state| &state.clock, deadline, found, late)
    }

    fn writer(&self) -> MutexGuard<'_, TcpStream> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, frame: &Frame) {
        // A connection that is broken is noticed by the thread that reads it.
        let _ = frame.send(&mut *self.writer());
    }

    /// This rank has nothing more to say. The other direction stays open, so that nothing that is on
    /// its way either way is lost.
    pub(super) fn hang_up(&self) {
        let _ = self.writer().shutdown(Shutdown::Write);
    }

    /// Reads until the connection ends.
    fn watch(&self, mut reader: TcpStream) {
        while let Ok(frame) = Frame::receive(&mut reader) {
            let is_last = matches!(frame, Frame::Failed(_) | Frame::Gone { .. } | Frame::Over);
            if let Some(answer) = self.monitor.update(|state, now| state.hear(frame, now)) {
                self.send(&answer);
            }
            if is_last {
                self.hang_up();
            }
        }
        // The hub goes last: without a last word it did not go in order.
        self.monitor.update(|state, _| {
            if !state.is_over && state.first.is_none() {
                state.gone.get_or_insert((Rank(0), Departure::Lost, None));
            }
        });
    }
}

impl State {
    /// Takes in what the hub says; the answer, if it wants one.
    fn hear(&mut self, frame: Frame, now: Duration) -> Option<Frame> {
        match frame {
            Frame::Paused(true) => self.clock.pause(now),
            Frame::Paused(false) => self.clock.resume(now),
            Frame::Tell => return Some(Frame::Calls(self.calls.iter().cloned().collect())),
            Frame::Payload(bytes) => self.payloads.push_back(bytes),
            Frame::Gone { rank, how, said } => {
                self.gone.get_or_insert((rank, how, said));
            }
            Frame::Failed(error) => {
                self.first.get_or_insert(error);
            }
            Frame::Over => self.is_over = true,
            // Nothing that the hub says any more.
            _ => {}
        }
        None
    }

    /// Why `started` can never be done, if so.
    fn failure(&mut self, started: &Started) -> Option<Error> {
        if self.first.is_none() {
            let (peer, how, _) = self.gone.as_ref()?;
            self.first = Some(Error::PeerGone {
                started: Box::new(started.clone()),
                peer: *peer,
                how: *how,
            });
        }
        self.first.as_ref().map(|first| first.seen_by(started))
    }

    fn setup_failure(&self) -> Option<SetupError> {
        let (peer, how, said) = self.gone.clone()?;
        Some(SetupError::PeerGone { peer, how, said })
    }
}
