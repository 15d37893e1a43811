//! Ranks that are processes, each with a GPU.

use std::env;
use std::ffi::OsString;
use std::process::{self, Command, ExitCode};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use polarshard_comm::launch::{self, Launch};
use polarshard_comm::ranks;
use polarshard_partition::WorldSize;

use crate::gpu;
use crate::options::Options;
use crate::text::Text;
use crate::train::{self, Run};

/// How long the other processes may go on when one has failed: they hear of it at once.
const GRACE: Duration = Duration::from_secs(20);
/// Tells a rank which process started it.
const PARENT: &str = "POLARSHARD_TRAIN_PARENT";
/// How often a rank looks after that process.
const LOOK: Duration = Duration::from_millis(500);

/// Starts a process a rank on this machine, with this one's options, and waits for all of them.
pub(crate) fn spawn(world: WorldSize) -> Result<ExitCode> {
    let executable = env::current_exe().context("cannot find this program to start it again")?;
    let arguments = for_ranks(env::args_os().skip(1));
    let family = launch::spawn(world, |_| {
        let mut command = Command::new(&executable);
        command
            .args(&arguments)
            .env(PARENT, process::id().to_string());
        command
    })?;
    let exits = family.wait(GRACE)?;
    let Some(first) = exits.first_failed else {
        return Ok(ExitCode::SUCCESS);
    };
    eprintln!(
        "the process of rank {first} was the first to fail: {}",
        exits.statuses[first.0]
    );
    Ok(u8::try_from(exits.code()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Trains as the rank that the launcher gave this process.
pub(crate) fn train(launch: &Launch, options: &Options, text: &Text) -> Result<Option<Run>> {
    let who = || {
        let arguments: Vec<_> = env::args().skip(1).collect();
        format!(
            "rank {}, started with `{}`, failed",
            launch.rank(),
            arguments.join(" ")
        )
    };
    if let Ok(parent) = env::var(PARENT) {
        end_with(parent);
    }
    let digest = options.digest(text);
    let (comm, device) = gpu::join(launch, digest).with_context(who)?;
    // On a thread of its own, for the size of its stack.
    let outcomes = ranks::run(vec![comm], |comm| {
        train::train(comm, &device, options, text)
    });
    match outcomes.into_iter().next() {
        Some(ranks::Outcome::Done(run)) => Ok(run),
        Some(ranks::Outcome::Failed(error)) => Err(error).with_context(who),
        Some(ranks::Outcome::Panicked(message)) => {
            Err(anyhow!("panicked: {message}")).with_context(who)
        }
        None => unreachable!("one rank has one outcome"),
    }
}

/// Ends this process when the one that started it has ended, whatever by: ranks that nobody waits for would keep
/// their GPUs.
#[cfg(unix)]
fn end_with(parent: String) {
    thread::spawn(move || {
        while std::os::unix::process::parent_id().to_string() == parent {
            thread::sleep(LOOK);
        }
        eprintln!("process {parent}, which started this rank, has ended");
        process::exit(1);
    });
}

#[cfg(not(unix))]
fn end_with(_: String) {}

/// The arguments without `--spawn N` and `--spawn=N`.
fn for_ranks(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    const SPAWN: &str = "--spawn";
    let mut kept = Vec::new();
    let mut is_count = false;
    for argument in arguments {
        let is_spawn = argument == SPAWN;
        let has_count = argument.to_string_lossy().starts_with("--spawn=");
        if !is_count && !is_spawn && !has_count {
            kept.push(argument);
        }
        is_count = is_spawn && !is_count;
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_not_told_to_spawn() {
        let given = "--device cuda --spawn 2 --lr=0.1 --spawn=3 --steps 7";
        let kept = for_ranks(given.split(' ').map(OsString::from));
        assert_eq!(kept.join(" ".as_ref()), "--device cuda --lr=0.1 --steps 7");
    }

    /// The rank of the next test, whose shell ends at once.
    #[cfg(unix)]
    #[test]
    fn a_rank_that_would_stay() {
        let Ok(parent) = env::var(PARENT) else {
            return;
        };
        end_with(parent);
        thread::sleep(Duration::from_secs(30));
        eprintln!("nothing ended it");
    }

    #[cfg(unix)]
    #[test]
    fn a_rank_ends_with_the_process_that_started_it() {
        let executable = env::current_exe().unwrap();
        let script = format!(
            "{PARENT}=$$ \"$0\" --exact --nocapture {}a_rank_that_would_stay &",
            concat!(module_path!(), "::").split_once("::").unwrap().1
        );
        // Until nobody has its end of the pipe any more, the rank included.
        let mut shell = Command::new("sh");
        let output = shell
            .arg("-c")
            .arg(script)
            .arg(executable)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            said.contains("which started this rank, has ended"),
            "{said}"
        );
    }
}
