//! Checkpoints that fit any world: whole tensors by parameter name, however the run was sharded.
//!
//! A parameter's tensors are put together, window by window, on the rank that owns most of it, which writes them to its
//! file: `master/NAME`, and `momentum/NAME` or `first/NAME` and `second/NAME`, all in fp32. The index is written last.

mod durable;
mod index;
mod load;
mod names;
mod save;
mod tensor_file;

use polarshard_comm::Pause;
use polarshard_partition::{Rank, UpdateGroup};

use crate::channel::Channel;
use crate::error::{Error, Result};

pub(crate) use self::load::load;
pub(crate) use self::save::save;

/// A tensor that is kept for each parameter of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Master,
    Momentum,
    First,
    Second,
}

impl Kind {
    fn of(group: UpdateGroup) -> &'static [Self] {
        match group {
            UpdateGroup::Muon => &[Self::Master, Self::Momentum],
            UpdateGroup::AdamW => &[Self::Master, Self::First, Self::Second],
        }
    }

    /// What a parameter of the other group has, and one of this group has not.
    fn of_other(group: UpdateGroup) -> &'static [Self] {
        match group {
            UpdateGroup::Muon => &[Self::First, Self::Second],
            UpdateGroup::AdamW => &[Self::Momentum],
        }
    }

    fn key(self, name: &str) -> String {
        let kind = match self {
            Self::Master => "master",
            Self::Momentum => "momentum",
            Self::First => "first",
            Self::Second => "second",
        };
        format!("{kind}/{name}")
    }
}

/// Waits until all ranks have come, within the deadline, and only then lets the clock stand still.
fn all_come(channel: &mut Channel) -> Result<Pause> {
    channel.collect_in_order(&[])?;
    Ok(channel.comm().pause())
}

/// Fails on all ranks if it failed on one.
fn together(channel: &mut Channel, result: Result<()>) -> Result<()> {
    if let Err(error) = &result
        && error.is_fatal()
    {
        return result;
    }
    let failed = channel.collect(&[f64::from(u8::from(result.is_err()))])?;
    result?;
    let ranks: Vec<_> = (0..failed.len())
        .filter(|rank| failed[*rank][0] != 0.0)
        .map(Rank)
        .collect();
    if ranks.is_empty() {
        Ok(())
    } else {
        Err(Error::CheckpointFailed {
            rank: channel.rank(),
            failed: ranks,
        })
    }
}
