//! The clock of a world, which stands still during pauses.

use std::time::Duration;

use crate::sync::{Look, Monitor};

/// Tells how long the world has been running, pauses left out.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    holders: usize,
    /// When the pause under way began.
    since: Duration,
    /// How long the pauses before it took together.
    paused: Duration,
}

impl Clock {
    /// How long the world has been running.
    pub(crate) fn running(&self, now: Duration) -> Duration {
        let now = if self.is_paused() { self.since } else { now };
        now.saturating_sub(self.paused)
    }

    /// When to look again at something that is late when the clock shows `over`; `None` if it is
    /// late already.
    fn look_again<R>(&self, now: Duration, over: Duration) -> Option<Look<R>> {
        let running = self.running(now);
        if running >= over {
            None
        } else if self.is_paused() {
            Some(Look::Again(None))
        } else {
            Some(Look::Again(Some(now.saturating_add(over - running))))
        }
    }

    /// One more holder of a pause.
    pub(crate) fn pause(&mut self, now: Duration) {
        if !self.is_paused() {
            self.since = now;
        }
        self.holders += 1;
    }

    /// One holder less.
    pub(crate) fn resume(&mut self, now: Duration) {
        self.holders -= 1;
        if !self.is_paused() {
            self.paused += now.saturating_sub(self.since);
        }
    }

    fn is_paused(&self) -> bool {
        self.holders > 0
    }
}

/// Blocks until `found` gives something, within the `deadline` by the `clock` of the state; `late`
/// decides when it is over.
pub(crate) fn wait<S, R>(
    monitor: &impl Monitor<S>,
    clock: impl Fn(&S) -> &Clock,
    deadline: Duration,
    mut found: impl FnMut(&mut S) -> Option<R>,
    late: impl Fn(&mut S) -> R,
) -> R {
    let mut over = None;
    monitor.wait(|state, now| {
        if let Some(result) = found(state) {
            return Look::Found(result);
        }
        let clock = clock(state);
        let over = *over.get_or_insert(clock.running(now).saturating_add(deadline));
        let again = clock.look_again(now, over);
        again.unwrap_or_else(|| Look::Found(late(state)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_leaves_pauses_out() {
        let seconds = Duration::from_secs;
        let mut clock = Clock::default();
        assert_eq!(clock.running(seconds(10)), seconds(10));
        clock.pause(seconds(10));
        clock.pause(seconds(12));
        clock.resume(seconds(15));
        assert!(clock.is_paused());
        assert_eq!(clock.running(seconds(19)), seconds(10));
        clock.resume(seconds(20));
        assert!(!clock.is_paused());
        assert_eq!(clock.running(seconds(25)), seconds(15));
        clock.pause(seconds(30));
        clock.resume(seconds(31));
        assert_eq!(clock.running(seconds(31)), seconds(20));
    }
}
