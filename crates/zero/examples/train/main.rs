//! Trains a small transformer over bytes on several ranks, and shows what sharding did: what each rank held, what the
//! ranks sent and what the plan foresaw, that all came to the same weights, and, with `--compare`, that these are the
//! weights of unsharded training.
//!
//! ```text
//! cargo run --release --example train -- --world 4 --placement whole --compare
//! cargo run --release --example train -- --stop 60 --save target/half
//! cargo run --release --example train -- --resume target/half --world 2
//! cargo run --release --features nccl --example train -- --device cuda --spawn 2
//! ```

mod account;
mod compare;
mod curve;
mod gpu;
mod model;
mod options;
mod part;
mod pictures;
mod processes;
mod progress;
mod report;
mod saved;
mod table;
mod tallies;
mod text;
mod threads;
mod train;

use std::fs;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use polarshard_comm::launch::Launch;
use polarshard_partition::Rank;

use crate::options::Options;
use crate::part::Part;
use crate::saved::Saved;
use crate::table::grouped;
use crate::text::Text;
use crate::train::Run;

/// How long a rank may be behind the others: they share the cores of one machine.
const DEADLINE: Duration = Duration::from_secs(60);

fn main() -> Result<ExitCode> {
    let options = Options::parsed()?;
    match Part::of(&options, Launch::from_env()?)? {
        Part::Parent(world) => return processes::spawn(world),
        Part::Threads(world) => {
            train_and_tell(&options, |text| threads::train(world, &options, text))?;
        }
        Part::Rank(launch) if launch.rank() == Rank(0) => {
            train_and_tell(&options, |text| {
                let run = processes::train(&launch, &options, text)?;
                run.context("rank 0 has no run")
            })?;
        }
        Part::Rank(launch) => {
            processes::train(&launch, &options, &Text::read(&options)?)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn train_and_tell(options: &Options, train: impl FnOnce(&Text) -> Result<Run>) -> Result<()> {
    let text = Text::read(options)?;
    let (training, held_out) = (
        grouped(text.training_len() as u64),
        grouped(text.held_out_len() as u64),
    );
    println!("text: {training} bytes to train on, {held_out} held out");

    // Before training: a folder that cannot be written to or a file that cannot be read should not cost a run.
    for folder in [Some(&options.out), options.save.as_ref()]
        .into_iter()
        .flatten()
    {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        tempfile::tempfile_in(folder)
            .with_context(|| format!("cannot write to {}", folder.display()))?;
    }
    let beside = options.beside.as_deref().map(Saved::read).transpose()?;

    let started = Instant::now();
    let run = train(&text)?;
    report::tell(options, &text, &run, started.elapsed(), beside)
}
