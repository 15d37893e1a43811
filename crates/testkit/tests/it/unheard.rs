//! Steps that a rank takes without hearing how their gathers end, as on a device: who finds out.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use polarshard_comm::ranks::{self, Outcome as Ended};
use polarshard_comm::{
    Communicator, Completion, Error as CommError, Loopback, Pause, Pending, Request,
};
use polarshard_partition::{Class, Rank, WorldSize};
use polarshard_testkit::harness::Worker;
use polarshard_testkit::model::{Draw, Model, StepGradients};
use polarshard_zero::{Error, Outcome};

use crate::support::config;

const WORLD: usize = 3;
const ODD: Rank = Rank(1);

/// Gathers of weights are handed over and waited for without a word of how they end. One rank panics before its first.
#[derive(Debug)]
struct Unheard {
    inner: Loopback,
    panics: bool,
}

impl Communicator for Unheard {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world(&self) -> WorldSize {
        self.inner.world()
    }

    fn deadline(&self) -> Duration {
        self.inner.deadline()
    }

    fn start(&mut self, request: Request) -> Result<Pending, CommError> {
        if request.class() != Class::Weight {
            return self.inner.start(request);
        }
        assert!(!self.panics, "panicked on purpose");
        let buffer = request.buffer().clone();
        let started = self.inner.start(request);
        Ok(Pending::new(buffer, Gathering(started.ok())))
    }

    fn pause(&self) -> Pause {
        self.inner.pause()
    }

    fn shutdown(self: Box<Self>) -> Result<(), CommError> {
        Box::new(self.inner).shutdown()
    }
}

#[derive(Debug)]
struct Gathering(Option<Pending>);

impl Completion for Gathering {
    fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(Pending::is_done)
    }

    fn wait(self: Box<Self>) -> Result<(), CommError> {
        self.0.map(Pending::wait);
        Ok(())
    }

    fn finish(self: Box<Self>, _: Duration) -> Result<(), CommError> {
        self.wait()
    }
}

/// A call after the step.
type Next = fn(Worker, &StepGradients, &Path) -> Result<(), Error>;

#[test]
fn the_calls_that_wait_for_all_ranks_find_out_that_one_died_in_the_step_before() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(13)?;
    let gradients = model.gradients(Draw::Integers, 13, 0, 1, WORLD)?;
    let folder = tempfile::tempdir()?;
    let nexts: [(&str, Next); 5] = [
        ("step", |mut worker, gradients, _| {
            worker.step(gradients).map(drop)
        }),
        ("verify", |mut worker, _, _| {
            worker.optimizer.verify_replicas()
        }),
        ("save", |mut worker, _, folder| {
            worker.optimizer.save(folder)
        }),
        ("load", |mut worker, _, folder| {
            worker.optimizer.load(folder)
        }),
        ("shutdown", |worker, _, _| worker.optimizer.shutdown()),
    ];
    for (name, next) in nexts {
        let world = Loopback::world(WorldSize::new(WORLD)?, Duration::from_secs(10));
        let outcomes = ranks::run(world, |inner| {
            let panics = inner.rank() == ODD;
            let comm = Unheard { inner, panics };
            let mut worker = Worker::new(comm, &initial, &model.roles, config(&model))?;
            let report = worker.step(&gradients)?;
            let found = next(worker, &gradients, folder.path());
            Ok::<_, Error>((report.outcome, found))
        });
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            match outcome {
                Ended::Panicked(_) if Rank(rank) == ODD => {}
                Ended::Done((Outcome::Applied, Err(error))) => {
                    let text = error.to_string();
                    ensure!(error.is_fatal(), "{name}, rank {rank}: {text}");
                    ensure!(text.contains("rank 1"), "{name}, rank {rank}: {text}");
                }
                other => anyhow::bail!("{name}, rank {rank}: {other:?}"),
            }
        }
    }
    Ok(())
}
