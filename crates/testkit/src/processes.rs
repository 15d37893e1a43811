//! Ranks that are processes, over NCCL: a test that starts its own executable once more for each rank.

use std::env;
use std::process::{Command, exit};

use anyhow::{Context, Result, bail};
use candle_core::Device;
use polarshard_comm::launch::{Launch, spawn};
use polarshard_comm::{Nccl, Shared, nccl};
use polarshard_partition::{Digest, Rank, WorldSize};

use crate::harness::DEADLINE;

/// In the environment of a rank: which world of which test it belongs to.
const VARIABLE: &str = "POLARSHARD_TEST_WORLD";

/// What a rank that did its part exits with: neither what a program that ran no test gives, nor what a failed one does.
const DONE: i32 = 40;

/// A world of processes.
#[derive(Debug, Clone, Copy)]
pub struct World<'a> {
    /// The path of the test function that asks for it.
    pub test: &'a str,
    /// Tells the worlds of one test apart.
    pub number: usize,
    /// How many ranks.
    pub size: usize,
    /// The rank that will be killed, if one will.
    pub lost: Option<Rank>,
}

/// One rank in its process.
#[derive(Debug)]
pub struct Member {
    /// The GPU of its local rank; ranks share GPUs if there are fewer of them.
    pub device: Device,
    /// Who it is, and where the others are.
    pub launch: Launch,
}

impl Member {
    /// The process that was launched so.
    ///
    /// # Errors
    /// If there is no GPU.
    pub fn new(launch: Launch) -> Result<Self> {
        let device = nccl::device_of(&launch)?;
        Ok(Self { device, launch })
    }

    /// Joins the world. Optimizers use it one after the other.
    ///
    /// # Errors
    /// Those of [`Nccl::connect`].
    pub fn connect(&self) -> Result<Shared<Nccl>> {
        let comm = Nccl::connect(&self.launch, &self.device, Digest(0), DEADLINE)?;
        Ok(Shared::new(comm))
    }
}

impl World<'_> {
    /// The only world of a test, of which no rank is to be killed.
    pub fn of(test: &str, size: usize) -> World<'_> {
        World {
            test,
            number: 0,
            size,
            lost: None,
        }
    }

    /// Runs `rank` on every rank, each in a process of its own that comes here through the same test.
    ///
    /// # Errors
    /// If a rank fails, with what it said on the standard error; if one ends that should be killed, or the other way
    /// round; and if the test is not found under its name.
    pub fn run(self, rank: impl FnOnce(&Member) -> Result<()>) -> Result<()> {
        match env::var(VARIABLE) {
            Err(_) => self.spawn(),
            Ok(world) if world == self.name() => match member().and_then(|member| rank(&member)) {
                // At once: the test harness and the test's other worlds have nothing to add.
                Ok(()) => exit(DONE),
                Err(error) => {
                    let rank = env::var("RANK").unwrap_or_default();
                    eprintln!("rank {rank}: {error:?}");
                    exit(1)
                }
            },
            Ok(_) => Ok(()),
        }
    }

    fn name(&self) -> String {
        format!("{}#{}", self.test, self.number)
    }

    fn spawn(&self) -> Result<()> {
        let executable = env::current_exe()?;
        let family = spawn(WorldSize::new(self.size)?, |_| {
            let mut command = Command::new(&executable);
            command
                .args(["--exact", self.test, "--include-ignored", "--nocapture"])
                .env(VARIABLE, self.name());
            command
        })?;
        // Whatever a rank ends with counts as a failure there: the others have time to do the same.
        let exits = family.wait(2 * DEADLINE)?;
        for (rank, status) in exits.statuses.iter().enumerate() {
            let is_lost = self.lost == Some(Rank(rank));
            match status.code() {
                Some(DONE) if !is_lost => {}
                None if is_lost => {}
                Some(0) => bail!("there is no test `{}`", self.test),
                _ => bail!("rank {rank} of {}: {status}", self.name()),
            }
        }
        Ok(())
    }
}

fn member() -> Result<Member> {
    let launch = Launch::from_env()?.context("a rank that was not launched")?;
    Member::new(launch)
}
