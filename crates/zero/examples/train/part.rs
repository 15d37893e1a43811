//! What this process is to do: all ranks, one of them, or none.

use anyhow::{Result, bail, ensure};
use polarshard_comm::launch::Launch;
use polarshard_partition::WorldSize;

use crate::options::{DeviceKind, Options};

/// What this process is to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Every rank, each a thread.
    Threads(WorldSize),
    /// No rank: it starts a process a rank, and waits for them.
    Parent(WorldSize),
    /// One rank.
    Rank(Launch),
}

impl Part {
    /// What follows from the options and from what a launcher said, if one started this process.
    pub(crate) fn of(options: &Options, launch: Option<Launch>) -> Result<Self> {
        let part = match (options.device, options.spawn, launch) {
            (_, Some(count), Some(launch)) => bail!(
                "--spawn {count} contradicts the launcher that started this process as rank {} of {}: leave one of \
                 them out",
                launch.rank(),
                launch.world()
            ),
            (DeviceKind::Cpu, Some(count), None) => bail!(
                "--spawn {count} starts a process a rank, which needs --device cuda and a build with --features nccl; \
                 on the CPU the ranks are threads, as many as --world says"
            ),
            (DeviceKind::Cpu, None, Some(launch)) => bail!(
                "a launcher started this process as rank {} of {}, and on the CPU the ranks are threads of one process: \
                 give --device cuda, or start it without a launcher (the example `rendezvous` of polarshard-comm tries \
                 a launcher without a GPU)",
                launch.rank(),
                launch.world()
            ),
            (DeviceKind::Cpu, None, None) => {
                Self::Threads(WorldSize::new(options.world.map_or(4, usize::from))?)
            }
            (DeviceKind::Cuda, Some(count), None) => Self::Parent(WorldSize::new(count.get())?),
            (DeviceKind::Cuda, None, Some(launch)) => Self::Rank(launch),
            (DeviceKind::Cuda, None, None) => bail!(
                "with --device cuda a rank is a process: start them with --spawn N, or with torchrun, srun or mpirun"
            ),
        };
        let (by, world) = match &part {
            Self::Threads(world) => ("--world", *world),
            Self::Parent(world) => ("--spawn", *world),
            Self::Rank(launch) => ("the launcher", launch.world()),
        };
        if let Some(given) = options.world {
            ensure!(
                given.get() == world.get(),
                "--world {given} contradicts {by}, which says {world}"
            );
        }
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use polarshard_partition::Rank;

    use super::*;

    fn size(ranks: usize) -> WorldSize {
        WorldSize::new(ranks).unwrap()
    }

    fn launch() -> Launch {
        Launch::new(Rank(1), size(2), "a", 1).unwrap()
    }

    fn part(options: &str, launch: Option<Launch>) -> Result<Part> {
        let words = ["train"].into_iter().chain(options.split_whitespace());
        Part::of(&Options::try_parse_from(words)?, launch)
    }

    #[test]
    fn on_the_cpu_ranks_are_threads() {
        assert_eq!(part("", None).unwrap(), Part::Threads(size(4)));
        assert_eq!(part("--world 3", None).unwrap(), Part::Threads(size(3)));
    }

    #[test]
    fn on_gpus_ranks_are_processes() {
        assert_eq!(
            part("--device cuda --spawn 2", None).unwrap(),
            Part::Parent(size(2))
        );
        assert_eq!(
            part("--device cuda --world 2", Some(launch())).unwrap(),
            Part::Rank(launch())
        );
    }

    #[test]
    fn contradictions_are_named() {
        for (options, launch, want) in [
            (
                "--spawn 2",
                None,
                "--spawn 2 starts a process a rank, which needs --device cuda",
            ),
            (
                "--spawn 2",
                Some(launch()),
                "--spawn 2 contradicts the launcher that started this process as rank 1 of 2",
            ),
            (
                "--device cuda --spawn 2",
                Some(launch()),
                "--spawn 2 contradicts the launcher",
            ),
            (
                "",
                Some(launch()),
                "a launcher started this process as rank 1 of 2, and on the CPU",
            ),
            (
                "--device cuda",
                None,
                "with --device cuda a rank is a process",
            ),
            (
                "--device cuda --spawn 2 --world 4",
                None,
                "--world 4 contradicts --spawn, which says 2",
            ),
            (
                "--device cuda --world 4",
                Some(launch()),
                "--world 4 contradicts the launcher, which says 2",
            ),
        ] {
            let error = part(options, launch).unwrap_err().to_string();
            assert!(error.starts_with(want), "{options}: {error}");
        }
    }
}
