//! Runs ranks as threads.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

/// candle's backward recurses over the graph: the default of 2 MiB is too small for deep models.
const STACK_BYTES: usize = 64 << 20;

/// How a rank ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome<T, E> {
    /// It returned a value.
    Done(T),
    /// It returned an error.
    Failed(E),
    /// It panicked, with this message.
    Panicked(String),
}

impl<T, E> Outcome<T, E> {
    /// The value.
    ///
    /// # Panics
    /// If the rank failed or panicked, with what it said.
    #[track_caller]
    pub fn unwrap(self) -> T
    where
        E: fmt::Display,
    {
        match self {
            Self::Done(value) => value,
            Self::Failed(error) => panic!("the rank failed: {error}"),
            Self::Panicked(message) => panic!("the rank panicked: {message}"),
        }
    }

    /// The error.
    ///
    /// # Panics
    /// If the rank returned a value or panicked.
    #[track_caller]
    pub fn unwrap_err(self) -> E {
        match self {
            Self::Done(_) => panic!("the rank succeeded"),
            Self::Failed(error) => error,
            Self::Panicked(message) => panic!("the rank panicked: {message}"),
        }
    }

    /// Whether the rank returned a value.
    pub fn is_done(&self) -> bool {
        matches!(self, Self::Done(_))
    }
}

/// Runs `rank` on every one of `comms`, each on a thread of its own with a stack of 64 MiB, and
/// waits for all of them. A panic becomes a value.
///
/// # Panics
/// If the system cannot start a thread a rank.
pub fn run<C, T, E>(comms: Vec<C>, rank: impl Fn(C) -> Result<T, E> + Sync) -> Vec<Outcome<T, E>>
where
    C: Send,
    T: Send,
    E: Send,
{
    let rank = &rank;
    thread::scope(|scope| {
        let start = |(i, comm)| {
            thread::Builder::new()
                .name(format!("rank-{i}"))
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, move || outcome(|| rank(comm)))
                .expect("the system starts a thread a rank")
        };
        let threads: Vec<_> = comms.into_iter().enumerate().map(start).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread
                .join()
                .expect("a rank's panic is caught in its thread")
        };
        threads.into_iter().map(join).collect()
    })
}

fn outcome<T, E>(rank: impl FnOnce() -> Result<T, E>) -> Outcome<T, E> {
    match catch_unwind(AssertUnwindSafe(rank)) {
        Ok(Ok(value)) => Outcome::Done(value),
        Ok(Err(error)) => Outcome::Failed(error),
        Err(panic) => Outcome::Panicked(panic_message(&*panic)),
    }
}

/// What a panic said, as far as it is text.
#[must_use]
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}
