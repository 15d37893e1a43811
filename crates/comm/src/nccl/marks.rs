//! Events that are used again and again.
//!
//! The driver makes whoever creates or destroys an event wait for copies to pageable memory, of which any thread may have
//! one under way. Such a copy can wait for the very collective that has to be aborted, so the engine must not do either.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, DriverError};

/// The events that nobody uses.
#[derive(Debug)]
pub(super) struct Marks {
    context: Arc<CudaContext>,
    free: Mutex<Vec<CudaEvent>>,
}

impl Marks {
    /// None yet.
    pub(super) fn new(context: &Arc<CudaContext>) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            free: Mutex::default(),
        })
    }

    /// An event to be recorded; a new one if all are in use.
    pub(super) fn take(self: &Arc<Self>) -> Result<Mark, DriverError> {
        let free = self
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let event = match free {
            Some(event) => event,
            None => self.context.new_event(None)?,
        };
        Ok(Mark {
            event: Some(event),
            marks: Arc::clone(self),
        })
    }
}

/// An event in use.
#[derive(Debug)]
pub(super) struct Mark {
    /// There until it is dropped.
    event: Option<CudaEvent>,
    marks: Arc<Marks>,
}

impl Deref for Mark {
    type Target = CudaEvent;

    fn deref(&self) -> &CudaEvent {
        self.event.as_ref().expect("it is not dropped")
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let mut free = self
            .marks
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        free.extend(self.event.take());
    }
}
