//! The crate from outside.
#![expect(
    clippy::unwrap_used,
    reason = "clippy allows it in test functions, but not in their helpers"
)]

mod backend;
mod failures;
#[cfg(feature = "nccl")]
mod nccl;
mod processes;
mod rendezvous;
mod tether;
mod wrappers;

use std::time::Duration;

use candle_core::{Device, Tensor};
use polarshard_comm::{Communicator, Error, Loopback, Request};
use polarshard_partition::WorldSize;

/// Longer than any test takes: what must be noticed at once cannot hide behind it.
const LONG: Duration = Duration::from_secs(600);

fn size(ranks: usize) -> WorldSize {
    WorldSize::new(ranks).unwrap()
}

fn world(ranks: usize) -> Vec<Loopback> {
    Loopback::world(size(ranks), LONG)
}

/// The same, for wrappers and the conformance cases.
fn boxed(world: WorldSize) -> Vec<Box<dyn Communicator>> {
    let ranks = Loopback::world(world, LONG).into_iter();
    ranks
        .map(|rank| Box::new(rank) as Box<dyn Communicator>)
        .collect()
}

fn floats(values: &[f32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

/// Runs a request to its end; the error of the start or of the end.
fn run(comm: &mut impl Communicator, request: Request) -> Result<Tensor, Error> {
    comm.start(request)?.finish(LONG)
}
