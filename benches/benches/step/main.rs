//! Whole steps of ZeRO and Muon on CUDA devices, one process a rank.
//!
//! `cargo bench -p polarshard-benches --features nccl --bench step [-- WORLDS [MODELS]]`, as in `-- 1,2 124M,1.3B`. The
//! default is every world of 1, 2, 4 and 8 ranks and every model, but the smallest alone where ranks share a GPU: with
//! fewer GPUs than ranks, `NCCL_MULTI_RANK_GPU_ENABLE=1` must be set, and times say nothing.
//!
//! Every figure is of rank 0, in milliseconds, and the median of 20 after 20 that are not counted.

mod backward;
mod claims;
mod hand_in;
mod model;
mod replay;
mod split;
mod timed;

use std::env;
use std::process::{self, Command};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use candle_core::Device;
use polarshard_comm::launch::{self, Launch};
use polarshard_comm::{Communicator, Nccl, nccl};
use polarshard_partition::{Digest, WorldSize};
use polarshard_zero::Config;

use self::model::{MODELS, Model};
use self::timed::Timed;

/// Steps that are not counted, and steps that are.
const WARM: usize = 20;
const COUNTED: usize = 20;

/// Far longer than anything takes.
const DEADLINE: Duration = Duration::from_secs(60);

/// Says to a process which model its rank is to train.
const MODEL: &str = "POLARSHARD_BENCH_MODEL";

fn main() -> Result<()> {
    match (env::var(MODEL), Launch::from_env()?) {
        (Ok(name), Some(launch)) => rank(&launch, find(&name)?),
        _ => all(),
    }
}

/// Starts the ranks of every world and model.
fn all() -> Result<()> {
    // cargo adds `--bench`.
    let mut given = env::args().skip(1).filter(|arg| !arg.starts_with("--"));
    let worlds = given.next().unwrap_or_else(|| "1,2,4,8".to_owned());
    let asked = given.next();
    let gpus = nccl::device_count()?;
    for world in worlds.split(',') {
        let world = WorldSize::new(world.parse().context("a world is a number")?)?;
        let is_shared = world.get() > gpus;
        let default = if is_shared { "124M" } else { "124M,350M,1.3B" };
        if is_shared {
            println!("\n{world} ranks share {gpus} GPUs: their times say nothing");
        }
        for name in asked.as_deref().unwrap_or(default).split(',') {
            let model = find(name)?;
            let executable = env::current_exe()?;
            let family = launch::spawn(world, |_| {
                let mut command = Command::new(&executable);
                command.env(MODEL, model.name);
                command
            })?;
            let code = family.wait(Duration::from_secs(10))?.code();
            if code != 0 {
                process::exit(code);
            }
        }
    }
    Ok(())
}

fn find(name: &str) -> Result<&'static Model> {
    let found = MODELS.iter().find(|model| model.name == name);
    found.with_context(|| format!("no model {name}"))
}

/// What one process does.
fn rank(launch: &Launch, model: &Model) -> Result<()> {
    let device = nccl::device_of(launch)?;
    let comm = Nccl::connect(launch, &device, Digest(0), DEADLINE)?;
    let mut comm = Timed::new(comm, &device)?;
    hand_in::measure(&mut comm, model, &device)?;
    backward::measure(&mut comm, model, &device)?;
    if model.name == MODELS[0].name {
        // They do not depend on the size.
        claims::measure(&mut comm, model, &device)?;
        backward::slow(&mut comm, model, &device)?;
    }
    comm.end()
}

/// The settings that are measured: the defaults, at rates at which nothing diverges on one batch.
fn config(model: &Model) -> Config {
    let mut config = Config {
        bucket_size: model.bucket_size,
        ..Config::default()
    };
    (config.muon.lr, config.adamw.lr) = (1e-4, 1e-6);
    // Drawn on each device, and compared nowhere.
    config.broadcast_from = Some(polarshard_partition::Rank(0));
    config
}

/// Prints on rank 0.
fn say(comm: &Timed, line: impl std::fmt::Display) {
    if comm.rank().0 == 0 {
        println!("{line}");
    }
}

/// Bytes of the device in use, by everybody.
fn used(device: &Device) -> Result<usize> {
    let stream = device.as_cuda_device()?.cuda_stream();
    device.synchronize()?;
    let (free, total) = stream.context().mem_get_info()?;
    ensure!(free <= total, "{free} bytes of {total} are free");
    Ok(total - free)
}
