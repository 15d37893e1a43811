//! The gradients of a step: from the backward pass, through buckets and reductions, to the sums that a rank keeps.

mod buffers;
mod cycle;
mod held;
mod inbox;
mod intake;
mod lane;
mod reduced;

pub(crate) use buffers::{Buffer, Buffers};
pub(crate) use inbox::{Inbox, Socket};
pub(crate) use intake::Intake;
pub(crate) use reduced::Reduced;
