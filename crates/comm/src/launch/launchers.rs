//! The variables that each launcher sets.

use polarshard_partition::{DigestWriter, Rank, WorldSize};

use super::{A_PORT, A_WORLD, Launch, MOST_RANKS, hosts, ports, variable};
use crate::SetupError;

/// What the first launcher that is found says.
pub(super) fn read(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<Launch>, SetupError> {
    type Reader = fn(&Environment<'_>) -> Result<Launch, SetupError>;
    const LAUNCHERS: [(&str, Reader); 4] = [
        ("RANK", torchrun),
        ("SLURM_PROCID", srun),
        ("OMPI_COMM_WORLD_RANK", open_mpi),
        ("PMI_RANK", pmi),
    ];
    let environment = Environment(lookup);
    let is_there = |(rank, _): &(&str, Reader)| environment.get(rank).is_some();
    let found = LAUNCHERS.into_iter().find(is_there);
    found.map(|(_, read)| read(&environment)).transpose()
}

fn torchrun(environment: &Environment<'_>) -> Result<Launch, SetupError> {
    let launch = environment.launch("RANK", "WORLD_SIZE")?;
    let launch = environment.on_machine(launch, "LOCAL_RANK", "LOCAL_WORLD_SIZE")?;
    let mut launch = environment.at_master(launch, "RANK")?;
    let is_taken = environment
        .get("TORCHELASTIC_USE_AGENT_STORE")
        .is_some_and(|value| value.eq_ignore_ascii_case("true"));
    if is_taken {
        launch.ports = ports("MASTER_PORT", launch.ports[1])?;
    }
    launch.job = environment.job(&["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]);
    Ok(launch)
}

fn srun(environment: &Environment<'_>) -> Result<Launch, SetupError> {
    let size = environment.first_of(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]);
    let mut launch = environment.launch("SLURM_PROCID", size)?;
    let local_rank = environment.number_or("SLURM_LOCALID", launch.rank.0)?;
    let local_world = match environment.get("SLURM_STEP_TASKS_PER_NODE") {
        Some(list) => {
            let node = environment.number_or("SLURM_NODEID", 0)?;
            hosts::tasks_on(&list, node).ok_or_else(|| {
                variable(
                    "SLURM_STEP_TASKS_PER_NODE",
                    list,
                    "counts for all nodes, like 4(x2),3",
                )
            })?
        }
        None => environment.number_or("SLURM_NTASKS_PER_NODE", launch.world.get())?,
    };
    launch = launch.with_local(local_rank, local_world)?;

    launch.address = match environment.get("MASTER_ADDR") {
        Some(address) => address,
        None => {
            let nodes = environment.first_of(&["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]);
            let list = environment.need(nodes, "SLURM_PROCID")?;
            hosts::first(&list)
                .ok_or_else(|| variable(nodes, list, "a list of hosts, like node[3-5,9],login"))?
        }
    };
    launch.ports = match environment.master_ports()? {
        Some(ports) => ports,
        None => {
            environment.need("SLURM_JOB_ID", "SLURM_PROCID")?;
            let job: u64 = environment.number("SLURM_JOB_ID", "SLURM_PROCID")?;
            ephemeral(job)
        }
    };
    launch.job = environment.job(&["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"]);
    Ok(launch)
}

fn open_mpi(environment: &Environment<'_>) -> Result<Launch, SetupError> {
    const RANK: &str = "OMPI_COMM_WORLD_RANK";
    const LOCAL: [&str; 2] = ["OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"];
    let launch = environment.launch(RANK, "OMPI_COMM_WORLD_SIZE")?;
    let mut launch = environment.on_machine(launch, LOCAL[0], LOCAL[1])?;
    let is_alone = launch.local_world == launch.world.get();

    // Both name the run; the first one also names the host of mpirun.
    const SERVER: &str = "OMPI_MCA_orte_hnp_uri";
    launch.job = environment.job(&[SERVER, "PMIX_NAMESPACE"]);
    launch.address = match (environment.get("MASTER_ADDR"), environment.get(SERVER)) {
        (Some(address), _) => address,
        (None, Some(uri)) => hosts::of_uri(&uri).ok_or_else(|| {
            variable(
                SERVER,
                uri,
                "an address of mpirun, like 1234.0;tcp://10.0.0.1:5000",
            )
        })?,
        (None, None) if is_alone => "127.0.0.1".to_owned(),
        (None, None) => return Err(unset(RANK, "MASTER_ADDR")),
    };
    launch.ports = match environment.master_ports()? {
        Some(ports) => ports,
        None if launch.job.is_empty() => return Err(unset(RANK, "MASTER_PORT")),
        None => ephemeral(DigestWriter::new().str(&launch.job).finish().0),
    };
    Ok(launch)
}

fn pmi(environment: &Environment<'_>) -> Result<Launch, SetupError> {
    let launch = environment.launch("PMI_RANK", "PMI_SIZE")?;
    let launch = environment.on_machine(launch, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")?;
    environment.at_master(launch, "PMI_RANK")
}

/// Variables by name.
struct Environment<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Environment<'_> {
    /// An empty variable is none: shells and job scripts unset that way.
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn need(&self, name: &str, given: &str) -> Result<String, SetupError> {
        self.get(name).ok_or_else(|| unset(given, name))
    }

    fn number<T: std::str::FromStr>(&self, name: &str, given: &str) -> Result<T, SetupError> {
        let value = self.need(name, given)?;
        value
            .trim()
            .parse()
            .map_err(|_| variable(name, value, "a number"))
    }

    fn number_or(&self, name: &str, default: usize) -> Result<usize, SetupError> {
        match self.get(name) {
            Some(_) => self.number(name, name),
            None => Ok(default),
        }
    }

    /// The first of the variables that is set, else the first.
    fn first_of<'n>(&self, names: &[&'n str; 2]) -> &'n str {
        let is_set = |name: &&&str| self.get(name).is_some();
        names.iter().find(is_set).unwrap_or(&names[0])
    }

    /// Rank and world; the rest is the caller's.
    fn launch(&self, rank: &str, size: &str) -> Result<Launch, SetupError> {
        let at = self.number(rank, rank)?;
        let count = self.number(size, rank)?;
        let world = WorldSize::new(count).ok();
        let world = world.filter(|world| world.get() <= MOST_RANKS);
        let world = world.ok_or_else(|| variable(size, count.to_string(), A_WORLD))?;
        Launch::new(Rank(at), world, "127.0.0.1", 1)
    }

    /// With its place on its machine: where nothing is said, all ranks are on one, or as many as are said to be
    /// follow each other.
    fn on_machine(&self, launch: Launch, rank: &str, size: &str) -> Result<Launch, SetupError> {
        let local_world = self.number_or(size, launch.world.get())?;
        let by_rank = launch.rank.0 % local_world.max(1);
        let local_rank = self.number_or(rank, by_rank)?;
        launch.with_local(local_rank, local_world)
    }

    /// With rank 0 where it must be said to be, since `given` is set.
    fn at_master(&self, launch: Launch, given: &str) -> Result<Launch, SetupError> {
        Ok(Launch {
            address: self.need("MASTER_ADDR", given)?,
            ports: self
                .master_ports()?
                .ok_or_else(|| unset(given, "MASTER_PORT"))?,
            ..launch
        })
    }

    fn master_ports(&self) -> Result<Option<[u16; 2]>, SetupError> {
        const PORT: &str = "MASTER_PORT";
        self.get(PORT)
            .map(|value| {
                let port = value.trim().parse();
                ports(PORT, port.map_err(|_| variable(PORT, value, A_PORT))?)
            })
            .transpose()
    }

    /// The values of those variables that are set, which together name a run.
    fn job(&self, names: &[&str]) -> String {
        let values: Vec<String> = names.iter().filter_map(|name| self.get(name)).collect();
        values.join(".")
    }
}

/// Ports of a run, high up where few others are. (jax takes 61440 + job % 4096; two fewer leave room
/// for the second port.)
fn ephemeral(job: u64) -> [u16; 2] {
    const FIRST: u16 = 61440;
    let port = FIRST + (job % 4094) as u16;
    [port, port + 1]
}

fn unset(given: &str, missing: &str) -> SetupError {
    SetupError::Unset {
        given: given.to_owned(),
        missing: missing.to_owned(),
    }
}
