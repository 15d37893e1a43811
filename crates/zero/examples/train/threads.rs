//! All ranks as threads of this process, on its CPU.

use anyhow::{Context, Result, anyhow};
use candle_core::Device;
use polarshard_comm::{Loopback, ranks};
use polarshard_partition::WorldSize;

use crate::DEADLINE;
use crate::options::Options;
use crate::text::Text;
use crate::train::{self, Run};

/// Trains on all ranks.
pub(crate) fn train(world: WorldSize, options: &Options, text: &Text) -> Result<Run> {
    if world.get() > 1 && std::env::var_os("RAYON_NUM_THREADS").is_none() {
        eprintln!(
            "with RAYON_NUM_THREADS=1 in the environment the ranks would not share one pool of threads"
        );
    }
    let world = Loopback::world(world, DEADLINE);
    let outcomes = ranks::run(world, |comm| {
        train::train(Box::new(comm), &Device::Cpu, options, text)
    });
    let runs: Vec<_> = outcomes
        .into_iter()
        .enumerate()
        .map(|(rank, outcome)| match outcome {
            ranks::Outcome::Done(run) => Ok(run),
            ranks::Outcome::Failed(error) => Err(error.context(format!("rank {rank} failed"))),
            ranks::Outcome::Panicked(message) => Err(anyhow!("rank {rank} panicked: {message}")),
        })
        .collect::<Result<_>>()?;
    runs.into_iter().flatten().next().context("no rank 0")
}
