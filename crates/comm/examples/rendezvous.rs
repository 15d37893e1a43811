//! Joins the ranks that a launcher started, says who is who, and parts. It needs no GPU.
//!
//! ```text
//! cargo build --example rendezvous
//! mpirun -np 4 target/debug/examples/rendezvous
//! torchrun --no-python --nproc-per-node 4 target/debug/examples/rendezvous
//! srun -n 4 target/debug/examples/rendezvous
//! ```

use std::error::Error;
use std::process::{self, ExitCode};
use std::time::Duration;

use polarshard_comm::launch::Launch;
use polarshard_comm::tether::Tether;
use polarshard_comm::{Called, Started};
use polarshard_partition::{Digest, Rank};

const DEADLINE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    match meet() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn meet() -> Result<(), Box<dyn Error>> {
    let launch = Launch::from_env()?
        .ok_or("no launcher started this process: use torchrun, srun or mpirun")?;
    let (rank, world) = (launch.rank(), launch.world());
    let [first, second] = launch.ports();
    println!(
        "rank {rank} of {world}: process {}, local rank {} of {}, looks for rank 0 at {}, port {first} or {second}",
        process::id(),
        launch.local_rank(),
        launch.local_world(),
        launch.address(),
    );

    let tether = Tether::join(&launch, Digest(0), DEADLINE)?;
    // Only if all are there does what rank 0 hands out arrive.
    let mine = (rank == Rank(0)).then(|| process::id().to_le_bytes().to_vec());
    let handed = tether.hand_out(mine, DEADLINE)?;
    let first = handed.try_into().map(u32::from_le_bytes);
    let first = first.map_err(|bytes| format!("rank 0 handed out {bytes:?}"))?;
    println!("rank {rank} has joined: rank 0 is process {first}");

    let last = Started {
        rank,
        sequence: 0,
        called: Called::Shutdown,
    };
    tether.shutdown(&last, DEADLINE)?;
    println!("rank {rank} has parted with all others");
    Ok(())
}
