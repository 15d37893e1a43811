//! Ranks that are processes: this executable, started once more for each, with a role in the
//! environment.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{self, Command, Stdio};
use std::thread;
use std::time::Duration;

use polarshard_comm::launch::{self, Exits, Family, Launch};
use polarshard_comm::tether::Tether;
use polarshard_comm::{Called, Introduction, Started};
use polarshard_partition::{Digest, Rank};

use crate::{LONG, size};

const ROLE: &str = "POLARSHARD_TEST_ROLE";

/// Begins each line that is meant for the parent: the test harness writes as well.
const SAYS: &str = "rank says: ";

/// What the processes run. By itself it does nothing.
#[test]
#[ignore = "a rank of the other tests"]
fn rank() {
    let Ok(role) = env::var(ROLE) else { return };
    let launch = Launch::from_env().unwrap().unwrap();
    let (role, argument) = role.split_once(':').unwrap();
    match role {
        "tether" => tether(&launch, argument),
        #[cfg(feature = "nccl")]
        role => crate::nccl::play(&launch, role, argument),
        #[cfg(not(feature = "nccl"))]
        role => panic!("no role {role}"),
    }
    // The harness has nothing to add.
    process::exit(0);
}

/// Tells the parent.
pub(crate) fn say(line: impl std::fmt::Display) {
    println!("\n{SAYS}{line}");
}

/// The processes of a world, and what they say.
pub(crate) struct Ranks {
    family: Family,
    lines: Vec<Box<dyn Iterator<Item = String> + Send>>,
}

impl Ranks {
    /// Starts them all in one role.
    pub(crate) fn spawn(world: usize, role: &str) -> Self {
        let executable = env::current_exe().unwrap();
        let mut family = launch::spawn(size(world), |_| {
            let mut command = Command::new(&executable);
            command
                .args([
                    "--exact",
                    "processes::rank",
                    "--include-ignored",
                    "--nocapture",
                ])
                .env(ROLE, role)
                .stdout(Stdio::piped());
            command
        })
        .unwrap();
        let listen = |child: &mut process::Child| {
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let said = |line: Result<String, _>| Some(line.ok()?.strip_prefix(SAYS)?.to_owned());
            Box::new(lines.filter_map(said)) as Box<dyn Iterator<Item = String> + Send>
        };
        let lines = family.children().iter_mut().map(listen).collect();
        Self { family, lines }
    }

    /// The next line of every rank.
    pub(crate) fn hear(&mut self) -> Vec<Option<String>> {
        self.lines.iter_mut().map(Iterator::next).collect()
    }

    /// Kills one, as the system does that runs out of memory.
    pub(crate) fn kill(&mut self, rank: usize) {
        self.family.children()[rank].kill().unwrap();
    }

    /// All that is still said, by rank, and how the processes ended; after the first that fails the
    /// others have this long.
    pub(crate) fn wait(self, grace: Duration) -> (Vec<Vec<String>>, Exits) {
        let Self { family, lines } = self;
        thread::scope(|scope| {
            let listen = |lines: Box<dyn Iterator<Item = String> + Send>| {
                scope.spawn(move || lines.collect::<Vec<String>>())
            };
            let threads: Vec<_> = lines.into_iter().map(listen).collect();
            let exits = family.wait(grace).unwrap();
            let said = threads.into_iter().map(|t| t.join().unwrap()).collect();
            (said, exits)
        })
    }
}

/// Joins with one thing changed on rank 3, and then waits for the others to shut down.
fn tether(launch: &Launch, change: &str) {
    let mut me = Introduction::new(launch, Digest(1));
    let mut deadline = LONG;
    if me.rank == Rank(3) {
        match change {
            "digest" => me.digest = Digest(2),
            "version" => me.version = "none".to_owned(),
            "world" => me.world = size(9),
            "rank" => me.rank = Rank(2),
            "absent" => return,
            _ => {}
        }
    }
    if change == "absent" {
        deadline = Duration::from_secs(4);
    }
    let tether = match Tether::join_as(me, launch.address(), launch.ports(), deadline) {
        Ok(tether) => tether,
        Err(error) => return say(error),
    };
    say("joined");
    let last = Started {
        rank: launch.rank(),
        sequence: 0,
        called: Called::Shutdown,
    };
    if change == "killed" && launch.rank() != Rank(0) {
        // Nobody shuts down before somebody is gone.
        while tether.failure(&last).is_none() {
            thread::yield_now();
        }
    }
    match tether.shutdown(&last, LONG) {
        Ok(()) => say("shut down"),
        Err(error) => say(error),
    }
}

#[test]
fn processes_find_each_other_and_part() {
    let (said, exits) = Ranks::spawn(4, "tether:nothing").wait(LONG);
    assert_eq!(said, vec![vec!["joined", "shut down"]; 4]);
    assert_eq!(exits.code(), 0);
}

#[test]
fn processes_that_do_not_fit_together_all_say_why() {
    for (change, aspect) in [
        ("digest", "configured differently"),
        ("version", "of different versions"),
        ("world", "of worlds of different sizes"),
        ("rank", "the same rank"),
    ] {
        let (said, exits) = Ranks::spawn(4, &format!("tether:{change}")).wait(LONG);
        let first = &said[0][0];
        assert!(
            first.starts_with(&format!("two ranks are {aspect}: ")),
            "{first}"
        );
        assert!(said.iter().all(|lines| lines == &said[0]), "{said:?}");
        assert_eq!(exits.code(), 0);
    }
}

#[test]
fn a_process_that_does_not_come_is_named() {
    let (said, _) = Ranks::spawn(4, "tether:absent").wait(LONG);
    for lines in &said[..3] {
        assert!(lines[0].contains("missing rank 3"), "{lines:?}");
    }
}

#[test]
fn a_process_that_is_killed_is_named_to_the_others() {
    for victim in [0, 2] {
        let mut ranks = Ranks::spawn(4, "tether:killed");
        assert_eq!(ranks.hear(), vec![Some("joined".to_owned()); 4]);
        ranks.kill(victim);
        let (said, exits) = ranks.wait(LONG);
        for (rank, lines) in said.iter().enumerate() {
            if rank == victim {
                assert!(!exits.statuses[rank].success());
                continue;
            }
            let want = format!("rank {rank}, call 0, shutdown: rank {victim} was lost");
            assert_eq!(lines, &[want]);
        }
    }
}
