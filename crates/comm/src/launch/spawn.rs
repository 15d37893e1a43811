//! A launcher for the ranks of one machine.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use polarshard_partition::{Rank, WorldSize};

use crate::SetupError;

/// How often children are looked after.
const POLL: Duration = Duration::from_millis(10);

/// Starts a process a rank on this machine, with the variables that torchrun sets. Each process
/// finds out who it is with [`Launch::from_env`](super::Launch::from_env).
///
/// `command` gives the program of each rank; often this executable, with other arguments:
///
/// ```no_run
/// use std::{env, process, time::Duration};
/// use polarshard_comm::launch;
/// use polarshard_partition::WorldSize;
///
/// let executable = env::current_exe()?;
/// let family = launch::spawn(WorldSize::new(4)?, |_| process::Command::new(&executable))?;
/// let exits = family.wait(Duration::from_secs(10))?;
/// process::exit(exits.code());
/// # #[allow(unreachable_code)]
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`SetupError::Child`] if a process cannot be started; those before it are killed.
pub fn spawn(
    world: WorldSize,
    mut command: impl FnMut(Rank) -> Command,
) -> Result<Family, SetupError> {
    let failed = |rank| move |source| child_failed(rank, source);
    let port = free_port().map_err(failed(Rank(0)))?;
    let mut family = Family {
        children: Vec::with_capacity(world.get()),
    };
    for rank in world.ranks() {
        let child = command(rank)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("LOCAL_WORLD_SIZE", world.to_string())
            .env("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string())
            .env("MASTER_PORT", port.to_string())
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .env_remove("TORCHELASTIC_RESTART_COUNT")
            // Nobody else of another family that got the same port may join this one.
            .env(
                "TORCHELASTIC_RUN_ID",
                format!("{}.{port}", std::process::id()),
            )
            .spawn()
            .map_err(failed(rank))?;
        family.children.push(child);
    }
    Ok(family)
}

/// The processes that [`spawn`] started. Dropping it kills those that still run.
#[derive(Debug)]
pub struct Family {
    children: Vec<Child>,
}

impl Family {
    /// The processes in rank order, to read their output or to signal one.
    pub fn children(&mut self) -> &mut [Child] {
        &mut self.children
    }

    /// Waits for all processes. When one fails, the others may go on for `grace`, in which they can
    /// say what they saw; then they are killed.
    ///
    /// # Errors
    /// [`SetupError::Child`] if the system cannot tell how a process ended.
    pub fn wait(mut self, grace: Duration) -> Result<Exits, SetupError> {
        let mut statuses: Vec<Option<ExitStatus>> = vec![None; self.children.len()];
        let mut first_failed: Option<(Rank, Instant)> = None;
        while statuses.iter().any(Option::is_none) {
            for (i, child) in self.children.iter_mut().enumerate() {
                if statuses[i].is_some() {
                    continue;
                }
                let ended = child.try_wait().map_err(|e| child_failed(Rank(i), e))?;
                if ended.is_some_and(|status| !status.success()) {
                    first_failed.get_or_insert_with(|| (Rank(i), Instant::now()));
                }
                statuses[i] = ended;
            }
            if first_failed.is_some_and(|(_, when)| when.elapsed() >= grace) {
                self.kill();
            }
            thread::sleep(POLL);
        }
        Ok(Exits {
            statuses: statuses.into_iter().flatten().collect(),
            first_failed: first_failed.map(|(rank, _)| rank),
        })
    }

    /// Kills what still runs.
    fn kill(&mut self) {
        for child in &mut self.children {
            // A process that has ended already is no failure.
            let _ = child.kill();
        }
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        self.kill();
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}

/// How the processes ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exits {
    /// In rank order.
    pub statuses: Vec<ExitStatus>,
    /// Which one failed before the others, if one did.
    pub first_failed: Option<Rank>,
}

impl Exits {
    /// The exit code of the first process that failed, as a shell gives it: 128 + n after signal n;
    /// 0 if none failed.
    pub fn code(&self) -> i32 {
        self.first_failed
            .map_or(0, |rank| shell_code(self.statuses[rank.0]))
    }
}

#[cfg(unix)]
fn shell_code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    let by_signal = || status.signal().map(|signal| 128 + signal);
    status.code().or_else(by_signal).unwrap_or(1)
}

#[cfg(not(unix))]
fn shell_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or(1)
}

fn free_port() -> io::Result<u16> {
    loop {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        // There must be a next one.
        if port < u16::MAX {
            return Ok(port);
        }
    }
}

fn child_failed(rank: Rank, source: io::Error) -> SetupError {
    SetupError::Child {
        rank,
        source: Arc::new(source),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn family(script: &str) -> Family {
        let world = WorldSize::new(3).expect("three ranks");
        let shell = |_| {
            let mut shell = Command::new("sh");
            shell.args(["-c", script]);
            shell
        };
        spawn(world, shell).expect("a shell")
    }

    #[test]
    fn children_know_who_they_are() {
        let script =
            "test $WORLD_SIZE = 3 -a $LOCAL_RANK = $RANK -a $MASTER_PORT -gt 0 && exit $RANK";
        let exits = family(script).wait(Duration::MAX).unwrap();
        let codes: Vec<_> = exits.statuses.iter().map(ExitStatus::code).collect();
        assert_eq!(codes, [Some(0), Some(1), Some(2)]);
        assert!([1, 2].contains(&exits.code()));
    }

    #[test]
    fn when_one_fails_the_others_are_killed() {
        // `exec`: the shell would leave its child behind.
        let script = "test $RANK = 1 && exit 7; exec sleep 600";
        let exits = family(script).wait(Duration::from_millis(50)).unwrap();
        assert_eq!((exits.first_failed, exits.code()), (Some(Rank(1)), 7));
        assert!(exits.statuses.iter().all(|status| !status.success()));
        assert_eq!(shell_code(exits.statuses[0]), 128 + 9);
    }

    #[test]
    fn all_well_is_zero() {
        let exits = family("exit 0").wait(Duration::ZERO).unwrap();
        assert_eq!((exits.first_failed, exits.code()), (None, 0));
    }
}
