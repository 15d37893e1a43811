//! What the rendezvous needs of threads: a lock, a way to wait for a change, and the time.
//!
//! A trait, so that a test can put a scheduler in its place that explores the interleavings, with a
//! clock of its own.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a look at the state finds.
#[derive(Debug)]
pub enum Look<R> {
    /// What was waited for.
    Found(R),
    /// Nothing yet. Look again after a change, and at this time if one is given.
    Again(Option<Duration>),
}

/// A state that threads change and wait on. Times are counted from when it was made.
pub trait Monitor<S> {
    /// Holds `state`.
    fn new(state: S) -> Self;

    /// Changes the state, and wakes everyone who waits.
    fn update<R>(&self, change: impl FnOnce(&mut S, Duration) -> R) -> R;

    /// Blocks until `look` finds something, then wakes everyone else who waits: a look may change
    /// the state as well.
    fn wait<R>(&self, look: impl FnMut(&mut S, Duration) -> Look<R>) -> R;
}

/// The monitor of real threads: a mutex, a condition variable, and the monotonic clock.
#[derive(Debug)]
pub struct Blocking<S> {
    state: Mutex<S>,
    changed: Condvar,
    made: Instant,
}

impl<S> Monitor<S> for Blocking<S> {
    fn new(state: S) -> Self {
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            made: Instant::now(),
        }
    }

    fn update<R>(&self, change: impl FnOnce(&mut S, Duration) -> R) -> R {
        // No change is left half done by a panic: the closures are the crate's own, and do not call
        // out.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut state, self.made.elapsed());
        self.changed.notify_all();
        result
    }

    fn wait<R>(&self, mut look: impl FnMut(&mut S, Duration) -> Look<R>) -> R {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let now = self.made.elapsed();
            state = match look(&mut state, now) {
                Look::Found(result) => {
                    self.changed.notify_all();
                    return result;
                }
                Look::Again(None) => self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Look::Again(Some(until)) => {
                    self.changed
                        .wait_timeout(state, until.saturating_sub(now))
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }
}
