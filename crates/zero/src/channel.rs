//! The way to the other ranks: a communicator, and how many requests went through it.

use std::time::Duration;

use candle_core::{Device, Tensor};
use polarshard_comm::{Communicator, Pending, Request};
use polarshard_partition::{Class, Rank, WorldSize};

use crate::error::{Error, Result};

#[derive(Debug)]
pub(crate) struct Channel {
    comm: Box<dyn Communicator>,
    issued: u64,
}

impl Channel {
    pub(crate) fn new(comm: Box<dyn Communicator>) -> Self {
        Self { comm, issued: 0 }
    }

    pub(crate) fn rank(&self) -> Rank {
        self.comm.rank()
    }

    pub(crate) fn world(&self) -> WorldSize {
        self.comm.world()
    }

    /// A hash of the order in which this and other optimizers of this rank have used the world.
    pub(crate) fn history(&self) -> u64 {
        self.comm.history()
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.comm.deadline()
    }

    /// Requests started so far, the same on all ranks that have not drifted.
    pub(crate) fn issued(&self) -> u64 {
        self.issued
    }

    /// Starts a request. An error ends the optimizer, even one that the communicator survives: this rank is a request
    /// behind the others.
    pub(crate) fn start(&mut self, request: Request) -> Result<Pending> {
        let started = self.comm.start(request);
        let in_flight = started.map_err(|error| Error::from(error).ending())?;
        self.issued += 1;
        Ok(in_flight)
    }

    /// Sums of control values over ranks, on the host.
    pub(crate) fn sum(&mut self, values: Vec<f64>) -> Result<Vec<f64>> {
        let len = values.len();
        let buffer = Tensor::from_vec(values, len, &Device::Cpu)?;
        let deadline = self.deadline();
        let sums = self
            .start(Request::all_reduce(Class::Control, &buffer))?
            .finish(deadline)?;
        Ok(sums.to_vec1()?)
    }

    /// The control values of every rank, by rank.
    pub(crate) fn collect(&mut self, values: &[f64]) -> Result<Vec<Vec<f64>>> {
        let mut all = vec![0.0; values.len() * self.world().get()];
        let own = self.rank().0 * values.len();
        all[own..own + values.len()].copy_from_slice(values);
        let len = all.len();
        let buffer = Tensor::from_vec(all, len, &Device::Cpu)?;
        let deadline = self.deadline();
        let all = self
            .start(Request::all_gather(Class::Control, &buffer))?
            .finish(deadline)?
            .to_vec1()?;
        Ok(all
            .chunks(values.len().max(1))
            .map(<[f64]>::to_vec)
            .collect())
    }

    /// The same, if all ranks have used the world in the same order; to be asked before anything is done that an
    /// optimizer of another model could take part in unnoticed.
    pub(crate) fn collect_in_order(&mut self, values: &[f64]) -> Result<Vec<Vec<f64>>> {
        let rank = self.rank();
        let told = [&[exact(self.history())], values].concat();
        let all = self.collect(&told)?;
        let differing = differing(&all, 0, rank);
        if !differing.is_empty() {
            return Err(Error::OtherOrder { rank, differing });
        }
        Ok(all.iter().map(|told| told[1..].to_vec()).collect())
    }

    pub(crate) fn comm(&self) -> &dyn Communicator {
        &*self.comm
    }

    pub(crate) fn shutdown(self) -> Result<()> {
        Ok(self.comm.shutdown()?)
    }
}

/// 52 bits of a hash, which an f64 holds exactly.
pub(crate) fn exact(hash: u64) -> f64 {
    (hash >> 12) as f64
}

/// The ranks whose number at `index` is not that of `rank`.
pub(crate) fn differing(by_rank: &[Vec<f64>], index: usize, rank: Rank) -> Vec<Rank> {
    (0..by_rank.len())
        .filter(|other| by_rank[*other][index] != by_rank[rank.0][index])
        .map(Rank)
        .collect()
}
