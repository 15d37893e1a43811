//! What goes wrong on ranks that are processes with GPUs.

use std::process::{self, Command};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, DeviceLocation};
use polarshard_comm::Communicator;
use polarshard_muon::Coefficients;
use polarshard_partition::{Rank, Stage};
use polarshard_testkit::devices::{moved, moved_gradients, on_devices};
use polarshard_testkit::harness::{DEADLINE, Worker};
use polarshard_testkit::model::{Draw, Model};
use polarshard_testkit::processes::{Member, World};
use polarshard_zero::{Config, Error};

use crate::support::{config, count};

/// An optimizer of a model with many buckets, in settings of which one may be changed.
fn worker(
    comm: impl Communicator + 'static,
    member: &Member,
    change: impl FnOnce(&mut Config),
) -> Result<polarshard_zero::Result<Worker>> {
    let model = on_devices(Model::everything());
    let mut config = Config {
        bucket_size: count(100),
        ..config(&model)
    };
    change(&mut config);
    let initial = moved(&model.initial(5)?, DType::F32, &member.device)?;
    Ok(Worker::new(comm, &initial, &model.roles, config))
}

/// Twenty worlds of four, four at a time; in each, one process is killed somewhere in a step.
#[test]
#[ignore = "needs a GPU"]
fn a_process_killed_in_a_step_is_named_and_the_others_end() -> Result<()> {
    for batch in 0..5_usize {
        let worlds: Vec<Result<()>> = thread::scope(|scope| {
            let world = |number| scope.spawn(move || killed(4 * batch + number));
            let threads: Vec<_> = (0..4).map(world).collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|world| world.unwrap_or_else(|_| bail!("panicked")))
                .collect()
        });
        worlds.into_iter().collect::<Result<()>>()?;
    }
    Ok(())
}

fn killed(number: usize) -> Result<()> {
    const SIZE: usize = 4;
    let victim = Rank(number % SIZE);
    let world = World {
        test: "nccl::a_process_killed_in_a_step_is_named_and_the_others_end",
        number,
        size: SIZE,
        lost: Some(victim),
    };
    world.run(|member| {
        let mut worker = worker(member.connect()?, member, |_| {})??;
        let gradients = on_devices(Model::everything()).gradients(Draw::Integers, 5, 0, 1, SIZE)?;
        let gradients = moved_gradients(&gradients, DType::F32, &member.device)?;
        for step in 0.. {
            if step == 2 && member.launch.rank() == victim {
                thread::spawn(move || die_after(Duration::from_millis(37 * number as u64 % 101)));
            }
            let begun = Instant::now();
            if let Err(error) = worker.step(&gradients) {
                let took = begun.elapsed();
                println!("world {number}, step {step}, after {took:.1?}: {error}");
                let text = error.to_string();
                ensure!(text.ends_with(&format!("{victim} was lost")), "{text}");
                ensure!(error.is_fatal() && took < DEADLINE, "{took:?}");
                let again = worker
                    .step(&gradients)
                    .err()
                    .context("a step after the end")?;
                ensure!(matches!(again, Error::Poisoned { .. }), "{again}");
                break;
            }
        }
        Ok(())
    })
}

fn die_after(time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        thread::yield_now();
    }
    let me = process::id().to_string();
    let _ = Command::new("kill").args(["-KILL", &me]).status();
    // Where there is no such program, by another signal.
    process::abort();
}

#[test]
#[ignore = "needs a GPU"]
fn ranks_that_are_configured_differently_do_not_begin() -> Result<()> {
    World::of(
        "nccl::ranks_that_are_configured_differently_do_not_begin",
        2,
    )
    .run(|member| {
        let comm = member.connect()?;
        type Change = fn(&mut Config);
        let changes: [(&str, Change); 4] = [
            ("muon.lr", |config| config.muon.lr = 0.07),
            ("stage", |config| config.stage = Stage::One),
            ("bucket_size", |config| config.bucket_size = count(50)),
            ("muon.newton_schulz.coefficients", |config| {
                config.muon.newton_schulz.coefficients = Coefficients::PolarExpress;
            }),
        ];
        for (what, change) in changes {
            let odd = comm.rank() == Rank(1);
            let made = worker(comm.clone(), member, |config| {
                if odd {
                    change(config);
                }
            })?;
            let error = made.err().with_context(|| format!("{what} differs"))?;
            println!("{}: {error}", comm.rank());
            ensure!(
                matches!(error, Error::Disagreement { .. }),
                "{what}: {error}"
            );
        }
        // They differ on purpose, and the world is as it was.
        let mut worker = worker(comm.clone(), member, |_| {})??;
        worker.optimizer.verify_replicas()?;
        worker.optimizer.shutdown()?;
        let comm = comm.into_inner().context("an optimizer has not ended")?;
        Ok(Box::new(comm).shutdown()?)
    })
}

#[test]
#[ignore = "needs a GPU"]
fn offload_is_refused() -> Result<()> {
    World::of("nccl::offload_is_refused", 2).run(|member| {
        let made = worker(member.connect()?, member, |config| {
            config.optimizer_device = Some(DeviceLocation::Cpu);
        })?;
        let error = made.err().context("the optimizer is offloaded")?;
        ensure!(matches!(error, Error::Offload { .. }), "{error}");
        Ok(())
    })
}
