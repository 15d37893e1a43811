//! Who this process is, as its launcher says.
//!
//! [`Launch::from_env`] understands torchrun, srun, Open MPI and MPICH (any PMI); [`spawn`] is a small
//! launcher of its own, for the ranks of one machine.

mod hosts;
mod launchers;
mod spawn;

use polarshard_partition::{Rank, WorldSize};

use crate::SetupError;

pub use spawn::{Exits, Family, spawn};

/// One process of a world: its rank, and where rank 0 is to be found.
///
/// ```
/// use polarshard_comm::launch::Launch;
///
/// let environment = |name: &str| {
///     let value = match name {
///         "RANK" => "5",
///         "WORLD_SIZE" => "8",
///         "LOCAL_RANK" => "1",
///         "LOCAL_WORLD_SIZE" => "4",
///         "MASTER_ADDR" => "node-a",
///         "MASTER_PORT" => "29500",
///         _ => return None,
///     };
///     Some(value.to_owned())
/// };
/// let launch = Launch::from_lookup(environment)?.expect("RANK is set");
/// assert_eq!((launch.rank().0, launch.world().get(), launch.local_rank()), (5, 8, 1));
/// assert_eq!((launch.address(), launch.ports()), ("node-a", [29500, 29501]));
/// # Ok::<_, polarshard_comm::SetupError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    rank: Rank,
    world: WorldSize,
    local_rank: usize,
    local_world: usize,
    address: String,
    ports: [u16; 2],
    job: String,
}

impl Launch {
    /// Rank `rank` of `world`, all on one machine, with rank 0 at `address` and `port`.
    ///
    /// # Errors
    /// [`SetupError::OutsideWorld`] if there is no such rank, and [`SetupError::Variable`] for a world of
    /// more than 2²⁰ ranks and a port that is 0 or leaves no room for a second one.
    pub fn new(
        rank: Rank,
        world: WorldSize,
        address: impl Into<String>,
        port: u16,
    ) -> Result<Self, SetupError> {
        if world.get() > MOST_RANKS {
            return Err(variable("world", world.to_string(), A_WORLD));
        }
        if rank.0 >= world.get() {
            return Err(SetupError::OutsideWorld {
                rank: rank.0,
                world: world.get(),
            });
        }
        Ok(Self {
            rank,
            world,
            local_rank: rank.0,
            local_world: world.get(),
            address: address.into(),
            ports: ports("port", port)?,
            job: String::new(),
        })
    }

    /// What the environment says; `None` if no launcher that is known has set it. The first that is
    /// found wins: torchrun, srun, Open MPI, PMI.
    ///
    /// `MASTER_ADDR` and `MASTER_PORT` say where rank 0 is, whatever the launcher; torchrun sets them,
    /// for srun and Open MPI they can be left to be worked out. With `TORCHELASTIC_USE_AGENT_STORE`
    /// the agent itself listens there, and the next port is taken.
    ///
    /// # Errors
    /// [`SetupError::Variable`] and [`SetupError::Unset`], with the variable and its value;
    /// [`SetupError::OutsideWorld`] and [`SetupError::OutsideMachine`].
    pub fn from_env() -> Result<Option<Self>, SetupError> {
        // What is no text is shown as far as it is, by the error of whoever reads it.
        Self::from_lookup(|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
    }

    /// The same with another environment.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_lookup(
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, SetupError> {
        launchers::read(&lookup)
    }

    /// Sets which process of its machine this is: the ordinal of its device, usually.
    ///
    /// # Errors
    /// [`SetupError::OutsideMachine`] if there is no such rank on the machine, or the machine has more
    /// than the world.
    pub fn with_local(self, local_rank: usize, local_world: usize) -> Result<Self, SetupError> {
        if local_rank >= local_world || local_world > self.world.get() {
            return Err(SetupError::OutsideMachine {
                local_rank,
                local_world,
                world: self.world.get(),
            });
        }
        Ok(Self {
            local_rank,
            local_world,
            ..self
        })
    }

    /// Sets which run this is: processes of another one are turned away.
    #[must_use]
    pub fn with_job(self, job: impl Into<String>) -> Self {
        Self {
            job: job.into(),
            ..self
        }
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> WorldSize {
        self.world
    }

    /// Which of the processes of its machine this one is.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// How many ranks there are on this machine.
    pub fn local_world(&self) -> usize {
        self.local_world
    }

    /// The host of rank 0.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Where rank 0 listens: on the first of the two that is free.
    pub fn ports(&self) -> [u16; 2] {
        self.ports
    }

    /// Which run this is; empty if the launcher does not say. A restart is another run.
    pub fn job(&self) -> &str {
        &self.job
    }
}

const A_PORT: &str = "a port below 65535";

/// More than there are devices anywhere: a number beyond is a mistake, and tables of it would fill the memory.
const MOST_RANKS: usize = 1 << 20;
const A_WORLD: &str = "a number of ranks from 1 to 1048576";

fn ports(name: &str, port: u16) -> Result<[u16; 2], SetupError> {
    match port.checked_add(1) {
        Some(next) if port > 0 => Ok([port, next]),
        _ => Err(variable(name, port.to_string(), A_PORT)),
    }
}

fn variable(name: &str, value: String, expected: &'static str) -> SetupError {
    SetupError::Variable {
        name: name.to_owned(),
        value,
        expected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &str) -> Result<Option<Launch>, SetupError> {
        let pairs: Vec<(&str, &str)> = variables
            .split_whitespace()
            .map(|pair| pair.split_once('=').unwrap())
            .collect();
        Launch::from_lookup(|name| {
            let found = pairs.iter().find(|(key, _)| *key == name)?;
            Some(found.1.to_owned())
        })
    }

    #[test]
    fn every_launcher_is_understood() {
        let launch = |(rank, world), (local_rank, local_world), address: &str, port, job: &str| {
            let world = WorldSize::new(world).unwrap();
            Launch::new(Rank(rank), world, address, port)
                .and_then(|launch| launch.with_local(local_rank, local_world))
                .unwrap()
                .with_job(job)
        };
        for (variables, want) in [
            (
                "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=29500",
                launch((5, 8), (1, 4), "a", 29500, ""),
            ),
            // The agent holds the port; a restart is another run; an empty variable is none.
            (
                "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=29500 SLURM_PROCID= \
                 TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=x TORCHELASTIC_RESTART_COUNT=2",
                launch((1, 2), (1, 2), "a", 29501, "x.2"),
            ),
            (
                "SLURM_PROCID=6 SLURM_NTASKS=7 SLURM_LOCALID=2 SLURM_STEP_TASKS_PER_NODE=2(x2),3 \
                 SLURM_NODEID=2 SLURM_STEP_NODELIST=gpu[07-09,12],login SLURM_JOB_ID=4095 \
                 SLURM_STEP_ID=0",
                launch((6, 7), (2, 3), "gpu07", 61441, "4095.0"),
            ),
            // A step of its own size, in an allocation of another one.
            (
                "SLURM_PROCID=0 SLURM_NTASKS=9 SLURM_STEP_NUM_TASKS=1 SLURM_JOB_NODELIST=one \
                 SLURM_JOB_ID=1 MASTER_PORT=77",
                launch((0, 1), (0, 1), "one", 77, "1"),
            ),
            (
                "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_MCA_orte_hnp_uri=9.0;tcp://10.0.0.1,10.1.0.1:5000 \
                 MASTER_PORT=5000",
                launch(
                    (3, 4),
                    (1, 2),
                    "10.0.0.1",
                    5000,
                    "9.0;tcp://10.0.0.1,10.1.0.1:5000",
                ),
            ),
            (
                "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 MASTER_ADDR=b MASTER_PORT=9",
                launch((1, 2), (0, 1), "b", 9, ""),
            ),
        ] {
            assert_eq!(read(variables).unwrap(), Some(want), "{variables}");
        }
        assert_eq!(read("HOME=/root WORLD_SIZE=4").unwrap(), None);
    }

    #[test]
    fn mpirun_on_one_machine_needs_no_address() {
        let base = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2";
        let ports = |run: &str| {
            let launch = read(&format!("{base} PMIX_NAMESPACE={run}"));
            let launch = launch.unwrap().unwrap();
            assert_eq!(launch.address(), "127.0.0.1");
            launch.ports()
        };
        assert_eq!(ports("prterun-1@1"), ports("prterun-1@1"));
        assert_ne!(ports("prterun-1@1"), ports("prterun-2@1"));
        assert!(ports("prterun-1@1")[0] >= 61440);
    }

    #[test]
    fn the_variable_and_its_value_are_named() {
        for (variables, want) in [
            ("RANK=0", "RANK is set, but WORLD_SIZE is not"),
            ("RANK=x WORLD_SIZE=2", "RANK is \"x\" instead of a number"),
            (
                "RANK=0 WORLD_SIZE=0",
                "WORLD_SIZE is \"0\" instead of a number of ranks from 1 to 1048576",
            ),
            (
                "RANK=0 WORLD_SIZE=18446744073709551615",
                "WORLD_SIZE is \"18446744073709551615\" instead of a number of ranks from 1 to 1048576",
            ),
            (
                "RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=8 MASTER_ADDR=a",
                "local rank 0 of 8 on this machine does not fit a world of 1",
            ),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=3 LOCAL_WORLD_SIZE=2",
                "local rank 3 of 2 on this machine does not fit a world of 2",
            ),
            (
                "RANK=2 WORLD_SIZE=2",
                "rank 2 is outside the world of 2 ranks",
            ),
            ("RANK=0 WORLD_SIZE=1", "RANK is set, but MASTER_ADDR is not"),
            (
                "RANK=0 WORLD_SIZE=1 MASTER_ADDR=a",
                "RANK is set, but MASTER_PORT is not",
            ),
            (
                "RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=70000",
                "MASTER_PORT is \"70000\" instead of a port below 65535",
            ),
            (
                "RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=65534 TORCHELASTIC_USE_AGENT_STORE=True",
                "MASTER_PORT is \"65535\" instead of a port below 65535",
            ),
            (
                "SLURM_PROCID=0 SLURM_NTASKS=1",
                "SLURM_PROCID is set, but SLURM_STEP_NODELIST is not",
            ),
            (
                "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_NODELIST=[",
                "SLURM_STEP_NODELIST is \"[\" instead of a list of hosts, like node[3-5,9],login",
            ),
            (
                "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_NODELIST=a",
                "SLURM_PROCID is set, but SLURM_JOB_ID is not",
            ),
            (
                "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1",
                "OMPI_COMM_WORLD_RANK is set, but MASTER_ADDR is not",
            ),
            (
                "PMI_RANK=0 PMI_SIZE=1 MPI_LOCALNRANKS=0",
                "local rank 0 of 0 on this machine does not fit a world of 1",
            ),
        ] {
            assert_eq!(
                read(variables).unwrap_err().to_string(),
                want,
                "{variables}"
            );
        }
    }
}
