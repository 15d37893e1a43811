//! Where the gradients of a backward pass meet the optimizer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use candle_core::Tensor;
use polarshard_partition::ParamId;

use super::intake::Intake;
use crate::error::{Error, Result};

/// The optimizer's intake, open to the weights' hooks during its own backward pass only.
#[derive(Debug)]
pub(crate) struct Inbox {
    intake: Mutex<Intake>,
    open: AtomicBool,
}

impl Inbox {
    pub(crate) fn new(intake: Intake) -> Arc<Self> {
        Arc::new(Self {
            intake: Mutex::new(intake),
            open: AtomicBool::new(false),
        })
    }

    /// The intake. Never held while candle runs a backward pass.
    pub(crate) fn intake(&self) -> MutexGuard<'_, Intake> {
        self.intake.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn into_intake(self) -> Intake {
        self.intake
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a backward pass during which hooks may hand gradients in.
    pub(crate) fn while_open<T>(&self, backward: impl FnOnce() -> T) -> T {
        self.open.store(true, Ordering::Relaxed);
        let result = backward();
        self.open.store(false, Ordering::Relaxed);
        result
    }
}

/// What the hooks of a store hold: the way to the optimizer, once there is one. It keeps nothing alive.
#[derive(Debug, Default)]
pub(crate) struct Socket {
    inbox: Mutex<Weak<Inbox>>,
}

impl Socket {
    pub(crate) fn connect(&self, inbox: &Arc<Inbox>) {
        *self.inbox.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(inbox);
    }

    /// Hands in the gradient of a weight, whose id is known once there is an optimizer.
    pub(crate) fn deliver(
        &self,
        param: Option<ParamId>,
        name: &str,
        gradient: &Tensor,
    ) -> Result<()> {
        let inbox = self
            .inbox
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .upgrade();
        match (param, inbox) {
            (Some(param), Some(inbox)) if inbox.open.load(Ordering::Relaxed) => {
                inbox.intake().accept(param, gradient)
            }
            _ => Err(Error::OutsideBackward {
                name: name.to_string(),
            }),
        }
    }
}
