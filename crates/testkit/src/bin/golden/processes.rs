//! Ranks that are processes of this program, for all files of one world after the other.

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use polarshard_comm::Communicator;
use polarshard_comm::launch::{Launch, spawn};
use polarshard_partition::{Rank, WorldSize};
use polarshard_testkit::golden::Golden;
use polarshard_testkit::processes::Member;
use polarshard_testkit::replay::replay_rank;

use crate::{Arguments, Place, Verdict, judge};

/// How long the other ranks may go on after the first has ended badly.
const GRACE: Duration = Duration::from_secs(5);

/// Starts the ranks, or is one.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    ensure!(
        arguments.device == Place::Cuda,
        "`--backend nccl` needs `--device cuda`"
    );
    match Launch::from_env()? {
        Some(launch) => rank(arguments, launch),
        None => start(arguments),
    }
}

fn start(arguments: &Arguments) -> Result<Verdict> {
    let mut worlds: BTreeMap<WorldSize, Vec<&PathBuf>> = BTreeMap::new();
    for file in &arguments.files {
        let world = Golden::read(file)?.case.world;
        worlds.entry(world).or_default().push(file);
    }
    let executable = env::current_exe()?;
    let precisions: Vec<_> = arguments.iterate.iter().map(ToString::to_string).collect();
    let mut worst = Verdict::Faithful;
    for (world, files) in worlds {
        let family = spawn(world, |_| {
            let mut command = Command::new(&executable);
            command.args(["--device", "cuda", "--backend", "nccl", "--iterate"]);
            command.arg(precisions.join(",")).args(&files);
            command
        })?;
        worst = worst.max(match family.wait(GRACE)?.code() {
            0 => Verdict::Faithful,
            1 => Verdict::Unfaithful,
            _ => Verdict::Unreadable,
        });
    }
    Ok(worst)
}

fn rank(arguments: &Arguments, launch: Launch) -> Result<Verdict> {
    let member = Member::new(launch)?;
    let comm = member.connect()?;
    // The ranks have the same weights: the runs prove it.
    let verdict = judge(arguments, comm.rank() == Rank(0), |file, iterate| {
        let golden = Golden::read(file)?;
        ensure!(golden.case.world == comm.world(), "it is of another world");
        Ok(replay_rank(&golden, comm.clone(), &member.device, iterate)?)
    });
    let comm = comm.into_inner().context("an optimizer has not ended")?;
    Box::new(comm).shutdown()?;
    Ok(verdict)
}
