//! What a rank tells after training, and how it comes to the others.

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use polarshard_comm::{Communicator, Request};
use polarshard_partition::Class;
use polarshard_zero::MemoryUse;
use serde::{Deserialize, Serialize};

use crate::curve::Curve;
use crate::tallies::Tallies;

/// What a rank tells.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Account {
    pub(crate) curve: Curve,
    pub(crate) memory: MemoryUse,
    /// The most bytes of unreduced gradients that it held at once in any step.
    pub(crate) unreduced_peak: usize,
    /// Matrices that it orthogonalized in a step.
    pub(crate) orthogonalized: usize,
    /// Its calls in all steps.
    pub(crate) recorded: Tallies,
    /// Those that the plan foresees.
    pub(crate) predicted: Tallies,
    /// Whether its weights have the bits of rank 0's.
    pub(crate) identical: bool,
}

/// The accounts of all ranks, by rank: as bytes of JSON, one an element, since only numbers travel.
pub(crate) fn gather(comm: &mut dyn Communicator, own: &Account) -> Result<Vec<Account>> {
    let mut bytes = serde_json::to_vec(own)?;
    let lengths = all_gather(comm, &[bytes.len() as f64])?;
    let longest = lengths.into_iter().fold(0.0, f64::max) as usize;
    // All parts are equally long; JSON may end in blanks.
    bytes.resize(longest, b' ');
    let numbers: Vec<_> = bytes.into_iter().map(f64::from).collect();
    let all: Vec<_> = all_gather(comm, &numbers)?
        .into_iter()
        .map(|number| number as u8)
        .collect();
    let accounts = all.chunks(longest).enumerate();
    accounts
        .map(|(rank, bytes)| {
            serde_json::from_slice(bytes).with_context(|| format!("the account of rank {rank}"))
        })
        .collect()
}

/// The numbers of every rank, as many of each, one rank's after the other's.
fn all_gather(comm: &mut dyn Communicator, own: &[f64]) -> Result<Vec<f64>> {
    let (rank, world) = (comm.rank().0, comm.world().get());
    let mut all = vec![0.0; world * own.len()];
    all[rank * own.len()..][..own.len()].copy_from_slice(own);
    let buffer = Tensor::new(all, &Device::Cpu)?;
    let in_flight = comm.start(Request::all_gather(Class::Control, &buffer))?;
    Ok(in_flight.finish(comm.deadline())?.to_vec1()?)
}
