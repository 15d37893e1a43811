//! Where the ranks of one process meet: each brings what it called and a payload, and takes
//! everybody's payload away.
//!
//! It knows nothing of tensors, so that it can be explored with plain vectors.

use std::sync::Arc;
use std::time::Duration;

use polarshard_partition::{Rank, WorldSize};

use crate::agree::disagreement;
use crate::clock::{self, Clock};
use crate::sync::{Blocking, Monitor};
use crate::{Departure, Error, Pause, Started};

/// A meeting point of all ranks of a world, used over and over. Ranks meet in rounds; a rank is in
/// one round at a time.
#[derive(Debug)]
pub struct Rendezvous<P, M = Blocking<State<P>>> {
    monitor: M,
    deadline: Duration,
    _payload: std::marker::PhantomData<fn(P)>,
}

impl<P, M: Monitor<State<P>>> Rendezvous<P, M> {
    /// A meeting point; a meeting takes `deadline` at most.
    pub fn new(world: WorldSize, deadline: Duration) -> Self {
        Self {
            monitor: M::new(State {
                clock: Clock::default(),
                round: 0,
                seats: world.ranks().map(|_| None).collect(),
                met: None,
                departed: world.ranks().map(|_| None).collect(),
                first: None,
            }),
            deadline,
            _payload: std::marker::PhantomData,
        }
    }

    /// How long a meeting may take.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Blocks until every rank has come, and returns the payloads in rank order. `started.sequence`
    /// counts the rank's meetings.
    ///
    /// # Errors
    /// Another rank called something else, is gone, or did not come within the deadline; or the
    /// world had failed before.
    pub fn meet(&self, started: &Started, payload: P) -> Result<Arc<[P]>, Error> {
        self.monitor
            .update(|state, _| state.arrive(started, payload))?;
        self.wait(
            self.deadline,
            |state| state.outcome(started),
            |state, deadline| Err(state.expire(started, deadline)),
        )
    }

    /// Says that `rank` will not come again. Whoever waits for it gets an error at once.
    pub fn leave(&self, rank: Rank, how: Departure) {
        self.monitor.update(|state, _| {
            state.departed[rank.0].get_or_insert(how);
        });
    }

    /// Ends the world with `error`, unless another error did before.
    pub fn abort(&self, error: &Error) {
        self.monitor.update(|state, _| {
            state.abort(error.clone());
        });
    }

    /// What ended the world, if anything did.
    pub fn failure(&self) -> Option<Error> {
        self.monitor.update(|state, _| state.first.clone())
    }

    /// Stops all deadlines for as long as the guard lives, or any other one.
    pub fn pause(self: &Arc<Self>) -> Pause
    where
        P: 'static,
        M: Send + Sync + 'static,
    {
        self.monitor.update(|state, now| state.clock.pause(now));
        let this = Arc::clone(self);
        Pause::new(move || this.monitor.update(|state, now| state.clock.resume(now)))
    }

    /// Makes everyone who waits look again, after a change outside the state.
    pub fn wake(&self) {
        self.monitor.update(|_, _| ());
    }

    /// Blocks until `found` gives something, within the `deadline`; `late` decides when it is over.
    pub(crate) fn wait<R>(
        &self,
        deadline: Duration,
        found: impl FnMut(&mut State<P>) -> Option<R>,
        late: impl Fn(&mut State<P>, Duration) -> R,
    ) -> R {
        let late = |state: &mut State<P>| late(state, deadline);
        clock::wait(&self.monitor, |state| &state.clock, deadline, found, late)
    }
}

/// What the ranks share. Only a [`Monitor`] has to do with it.
#[derive(Debug)]
pub struct State<P> {
    clock: Clock,
    /// Which meeting is next, or under way.
    round: u64,
    /// Who has come to it. After a failure the seats stay as they were.
    seats: Vec<Option<(Started, P)>>,
    /// The payloads of the meeting before, and how many ranks have yet to take them.
    met: Option<(Arc<[P]>, usize)>,
    departed: Vec<Option<Departure>>,
    /// What ended the world.
    first: Option<Error>,
}

impl<P> State<P> {
    fn arrive(&mut self, started: &Started, payload: P) -> Result<(), Error> {
        if let Some(error) = self.failure(started) {
            return Err(error);
        }
        debug_assert_eq!(started.sequence, self.round, "a meeting was left out");
        let differs = self.present().find_map(|peer| disagreement(started, peer));
        if let Some(error) = differs {
            return Err(self.abort(error));
        }
        self.seats[started.rank.0] = Some((started.clone(), payload));
        if self.seats.iter().all(Option::is_some) {
            let payloads: Arc<[P]> = self
                .seats
                .iter_mut()
                .filter_map(|seat| seat.take().map(|(_, payload)| payload))
                .collect();
            self.met = Some((payloads, self.seats.len()));
            self.round += 1;
        }
        Ok(())
    }

    /// How the meeting ended that `started` took a seat in, if it has.
    fn outcome(&mut self, started: &Started) -> Option<Result<Arc<[P]>, Error>> {
        if self.round == started.sequence {
            return self.failure(started).map(Err);
        }
        // The next meeting cannot end without this rank, so these payloads are the ones of its own.
        let (payloads, takers) = self.met.take()?;
        if takers > 1 {
            self.met = Some((Arc::clone(&payloads), takers - 1));
        }
        Some(Ok(payloads))
    }

    /// Why `started` can never be done, if so.
    fn failure(&mut self, started: &Started) -> Option<Error> {
        if let Some(first) = &self.first {
            return Some(first.seen_by(started));
        }
        let gone = self.departed.iter().enumerate();
        let (peer, how) = gone
            .filter_map(|(rank, how)| Some((Rank(rank), (*how)?)))
            .next()?;
        Some(self.abort(Error::PeerGone {
            started: Box::new(started.clone()),
            peer,
            how,
        }))
    }

    /// The end of the world because `started` is not done in time.
    pub(crate) fn expire(&mut self, started: &Started, deadline: Duration) -> Error {
        if let Some(error) = self.failure(started) {
            return error;
        }
        // A rank has come to as many meetings as are over, and to the one where it sits.
        let come = |seat: &Option<_>| self.round + u64::from(seat.is_some());
        let seats = self.seats.iter().enumerate();
        let missing = seats
            .filter(|(_, seat)| come(seat) <= started.sequence)
            .map(|(rank, _)| Rank(rank))
            .collect();
        self.abort(Error::Deadline {
            started: Box::new(started.clone()),
            deadline,
            missing,
        })
    }

    fn abort(&mut self, error: Error) -> Error {
        self.first.get_or_insert_with(|| error.clone());
        error
    }

    fn present(&self) -> impl Iterator<Item = &Started> {
        self.seats.iter().flatten().map(|(started, _)| started)
    }
}
