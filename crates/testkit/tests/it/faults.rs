//! Collectives that fail: every rank gets a typed error in time, and its optimizer has ended with it.

use std::sync::{Mutex, mpsc};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use polarshard_comm::ranks::{self, Outcome};
use polarshard_comm::{Fault, Faulty, Loopback};
use polarshard_partition::{Rank, Stage, WorldSize};
use polarshard_testkit::harness::Worker;
use polarshard_testkit::model::{Draw, Model, StepGradients};
use polarshard_zero::{Config, Error};

use crate::support::{all_done, config, count, same_bits, trained, unsharded};

const WORLD: usize = 3;
const ODD: Rank = Rank(1);
/// Longer than a step takes on a busy machine, and short enough to be waited for.
const DEADLINE: Duration = Duration::from_secs(10);

struct Fixture {
    model: Model,
    initial: Vec<(String, candle_core::Tensor)>,
    steps: Vec<StepGradients>,
}

fn fixture() -> Result<Fixture> {
    let model = Model::everything();
    let initial = model.initial(13)?;
    let step = |step| Ok(model.gradients(Draw::Integers, 13, step, 2, WORLD)?);
    let steps = (0..2).map(step).collect::<Result<_>>()?;
    Ok(Fixture {
        model,
        initial,
        steps,
    })
}

fn settings(model: &Model, stage: Stage, overlap: bool) -> Config {
    Config {
        stage,
        overlap,
        accumulate: count(2),
        bucket_size: count(100),
        ..config(model)
    }
}

fn comms() -> Result<Vec<Loopback>> {
    Ok(Loopback::world(WorldSize::new(WORLD)?, DEADLINE))
}

/// Requests of a run: those of making the optimizer, and all up to the end of the second step.
fn requests(fixture: &Fixture, config: &Config) -> Result<(u64, u64)> {
    let counts = all_done(ranks::run(comms()?, |comm| -> Result<_> {
        // A fault that never comes counts nothing; the record holds operations. Buckets, the control sum, both exchanges
        // and the windows are one request each.
        let mut worker = Worker::new(comm, &fixture.initial, &fixture.model.roles, config.clone())?;
        let plan = worker.optimizer.plan().clone();
        let times = if config.stage == Stage::Two { 2 } else { 1 };
        let windows: usize = plan
            .layout()
            .block_ids()
            .map(|block| plan.windows(block).len())
            .sum();
        let a_step = times * plan.buckets().len() + 1 + plan.exchange_kinds().len() + windows;
        for step in &fixture.steps {
            worker.step(step)?;
        }
        worker.optimizer.shutdown()?;
        Ok(a_step as u64)
    }))?;
    const MAKING: u64 = 2;
    Ok((MAKING, MAKING + 2 * counts[0]))
}

/// Runs both steps with a fault at one request of one rank.
fn with_fault(
    fixture: &Fixture,
    config: &Config,
    nth: u64,
    fault: Fault,
) -> Result<Vec<Outcome<Worker, Error>>> {
    Ok(ranks::run(comms()?, |comm| {
        let nth = if polarshard_comm::Communicator::rank(&comm) == ODD {
            nth
        } else {
            u64::MAX
        };
        let mut worker = Worker::new(
            Faulty::new(comm, nth, fault),
            &fixture.initial,
            &fixture.model.roles,
            config.clone(),
        )?;
        for step in &fixture.steps {
            if let Err(error) = worker.step(step) {
                assert!(
                    error.is_fatal(),
                    "{error:?} can be survived, and was not to be"
                );
                let again = worker.step(step).expect_err("the optimizer has ended");
                assert!(matches!(again, Error::Poisoned { .. }), "{again:?}");
                return Err(error);
            }
        }
        Ok(worker)
    }))
}

#[test]
fn a_rank_that_leaves_between_steps() -> Result<()> {
    let fixture = fixture()?;
    for stage in Stage::ALL {
        for overlap in [false, true] {
            let config = settings(&fixture.model, stage, overlap);
            let outcomes = ranks::run(comms()?, |comm| -> Result<Option<Error>, Error> {
                let mut worker =
                    Worker::new(comm, &fixture.initial, &fixture.model.roles, config.clone())?;
                worker.step(&fixture.steps[0])?;
                if worker.optimizer.rank() == ODD {
                    return Ok(None);
                }
                let error = worker.step(&fixture.steps[1]).expect_err("a rank is gone");
                let again = worker
                    .step(&fixture.steps[1])
                    .expect_err("the optimizer has ended");
                assert!(matches!(again, Error::Poisoned { .. }), "{again:?}");
                Ok(Some(error))
            });
            for error in all_done(outcomes)?.into_iter().flatten() {
                ensure!(
                    error.is_fatal() && error.to_string().contains("rank 1 returned early"),
                    "{error}"
                );
            }
        }
    }
    Ok(())
}

/// At every request of two steps in turn.
#[test]
fn a_rank_that_leaves_or_panics_at_any_request() -> Result<()> {
    let fixture = fixture()?;
    for (stage, overlap) in [(Stage::One, true), (Stage::Two, false)] {
        let config = settings(&fixture.model, stage, overlap);
        let (making, end) = requests(&fixture, &config)?;
        for nth in making..end {
            for fault in [Fault::Leave, Fault::Panic] {
                for (rank, outcome) in with_fault(&fixture, &config, nth, fault)?
                    .into_iter()
                    .enumerate()
                {
                    let at = || format!("stage {stage}, request {nth}, {fault:?}, rank {rank}");
                    match outcome {
                        Outcome::Failed(error) => {
                            let text = error.to_string();
                            ensure!(text.contains("rank 1"), "{}: {text}", at());
                        }
                        Outcome::Panicked(text) if Rank(rank) == ODD => {
                            ensure!(text.contains("panicked on purpose"), "{}: {text}", at());
                        }
                        other => anyhow::bail!("{}: {other:?}", at()),
                    }
                }
            }
        }
    }
    Ok(())
}

/// It is then out of step with the others, so that nobody can go on.
#[test]
fn a_request_that_is_not_started() -> Result<()> {
    let fixture = fixture()?;
    let config = settings(&fixture.model, Stage::Two, true);
    let (making, end) = requests(&fixture, &config)?;
    for nth in (making..end).step_by(3) {
        for (rank, outcome) in with_fault(&fixture, &config, nth, Fault::Fail)?
            .into_iter()
            .enumerate()
        {
            ensure!(
                matches!(&outcome, Outcome::Failed(_)),
                "request {nth}, rank {rank}: {outcome:?}"
            );
        }
    }
    Ok(())
}

/// A collective that takes long changes no bit: its buffer is left alone.
#[test]
fn collectives_that_are_late() -> Result<()> {
    let fixture = fixture()?;
    let names = trained(&fixture.model, &fixture.initial);
    for stage in Stage::ALL {
        let config = settings(&fixture.model, stage, true);
        let expected = unsharded(&names, &config, &fixture.steps)?;
        let (making, end) = requests(&fixture, &config)?;
        for nth in (making..end).step_by(5) {
            for fault in [
                Fault::Delay(Duration::from_millis(5)),
                Fault::HoldBack { polls: 3 },
            ] {
                for worker in all_done(with_fault(&fixture, &config, nth, fault)?)? {
                    same_bits(&names, &worker.weights()?, &expected)
                        .with_context(|| format!("request {nth}"))?;
                }
            }
        }
    }
    Ok(())
}

/// A checkpoint may take longer than any deadline, but not to begin.
#[test]
fn a_rank_that_does_not_come_to_a_checkpoint() -> Result<()> {
    const SHORT: Duration = Duration::from_secs(1);
    let fixture = fixture()?;
    let config = settings(&fixture.model, Stage::Two, false);
    let place = tempfile::tempdir()?;
    let folder = place.path().join("checkpoint");
    for saves in [true, false] {
        let (came, told) = mpsc::channel();
        let told = Mutex::new(told);
        let comms = Loopback::world(WorldSize::new(WORLD)?, SHORT);
        let errors = all_done(ranks::run(comms, |comm| -> Result<Option<Error>> {
            let came = came.clone();
            let mut worker =
                Worker::new(comm, &fixture.initial, &fixture.model.roles, config.clone())?;
            if worker.optimizer.rank() == ODD {
                // Until the others have ended, or wait for good.
                let told = told.lock().expect("one rank waits");
                for _ in 1..WORLD {
                    told.recv_timeout(20 * SHORT).context("the others wait")?;
                }
                return Ok(None);
            }
            let ended = if saves {
                worker.optimizer.save(&folder)
            } else {
                worker.optimizer.load(&folder)
            };
            came.send(())?;
            Ok(Some(ended.err().context("nobody was missing")?))
        }))?;
        for error in errors.into_iter().flatten() {
            let text = format!("{error:#}");
            ensure!(error.is_fatal() && text.contains("rank 1"), "{text}");
        }
    }
    Ok(())
}
