//! How far a step has come.

use crate::error::Error;

/// The micro-batches of one step.
#[derive(Debug)]
pub(crate) struct Cycle {
    /// Micro-batches complete.
    pub(crate) done: usize,
    /// The sum of their weights.
    pub(crate) weight: f64,
    /// By parameter: whether a gradient came in any micro-batch.
    pub(crate) present: Vec<bool>,
    /// The weight of the micro-batch under way.
    pub(super) current: f64,
    /// By parameter: whether a gradient came in this micro-batch.
    pub(super) arrived: Vec<bool>,
    /// The first error and its micro-batch; everything of this step will be dropped.
    failed: Option<(usize, Error)>,
}

impl Cycle {
    pub(super) fn new(parameters: usize) -> Self {
        Self {
            done: 0,
            weight: 0.0,
            present: vec![false; parameters],
            current: 1.0,
            arrived: vec![false; parameters],
            failed: None,
        }
    }

    /// Begins a micro-batch.
    pub(super) fn begin(&mut self, weight: f64) {
        self.arrived.fill(false);
        self.current = weight;
    }

    /// Notes that a gradient came.
    pub(super) fn arrive(&mut self, param: usize) {
        self.arrived[param] = true;
        self.present[param] = true;
    }

    /// Ends a micro-batch, with the error that it met first.
    pub(super) fn end(&mut self) -> Result<(), Error> {
        let ended = match &self.failed {
            Some((at, error)) if *at == self.done => Err(error.clone()),
            _ => Ok(()),
        };
        self.done += 1;
        self.weight += self.current;
        ended
    }

    /// Remembers an error of the micro-batch under way, unless there was one before.
    pub(super) fn fail(&mut self, error: &Error) {
        self.failed
            .get_or_insert_with(|| (self.done, error.clone()));
    }

    /// Whether an error was met that ends the optimizer.
    pub(super) fn has_ended(&self) -> bool {
        let failed = self.failed.as_ref();
        failed.is_some_and(|(_, error)| error.is_fatal())
    }

    /// Whether an error was met in this step.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }
}
