//! All ranks as threads of this process, on its CPU.

use anyhow::{Context, Result, ensure};
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
    let mut first = None;
    // All of them, each once: a rank may only know that another one failed.
    let mut failures = Vec::new();
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let failure = match outcome {
            ranks::Outcome::Done(run) => {
                first = first.or(run);
                continue;
            }
            ranks::Outcome::Failed(error) => format!("{error:#}"),
            ranks::Outcome::Panicked(message) => format!("rank {rank} panicked: {message}"),
        };
        if !failures.contains(&failure) {
            failures.push(failure);
        }
    }
    ensure!(failures.is_empty(), failures.join("\n"));
    first.context("no rank 0")
}
