//! Steps on gradients that are there: the optimizer alone.

use anyhow::{Context, Result, ensure};
use candle_core::backprop::GradStore;
use candle_core::{Device, Var};
use polarshard_comm::Communicator;
use polarshard_partition::{Candidate, Class, Costs, Stage, plan_best};
use polarshard_testkit::harness::grad_store;
use polarshard_zero::{Config, Outcome, Roles, ZeroOptimizer};

use crate::model::{Model, drawn};
use crate::replay::{self, link_speed};
use crate::split::{PHASES, Split, median};
use crate::timed::{Asked, At, Timed};
use crate::{COUNTED, WARM, config, say, used};

/// FLOPs a second that cuBLAS keeps up in half precision on an H200, for the plan's prediction.
const FLOPS: f64 = 660e12;

/// An optimizer and gradients for it.
pub(crate) struct Job {
    pub(crate) optimizer: ZeroOptimizer,
    gradients: GradStore,
}

impl Job {
    pub(crate) fn new(
        comm: &Timed,
        model: &Model,
        config: Config,
        device: &Device,
    ) -> Result<Self> {
        let variables = model.variables(device)?;
        let gradient = |(_, variable): &(String, Var)| {
            Ok((variable.clone(), drawn(1e-3, variable.dims(), device)?))
        };
        let drawn = variables.iter().map(gradient);
        let drawn = drawn.collect::<Result<Vec<_>>>()?;
        let gradients = grad_store(drawn.iter().map(|(v, g)| (v, g.clone())))?;
        let comm = Box::new(comm.clone());
        let optimizer = ZeroOptimizer::from_named(variables, &Roles::default(), comm, config)?;
        Ok(Self {
            optimizer,
            gradients,
        })
    }

    pub(crate) fn step(&mut self, comm: &Timed) -> Result<()> {
        self.hand_in()?;
        comm.clock.mark(At::HandedIn);
        self.finish()
    }

    pub(crate) fn hand_in(&mut self) -> Result<()> {
        Ok(self.optimizer.hand_in(&self.gradients)?)
    }

    pub(crate) fn finish(&mut self) -> Result<()> {
        let report = self.optimizer.step()?;
        ensure!(report.outcome == Outcome::Applied, "{report:?}");
        Ok(())
    }
}

/// Prints the time of a step in each stage, where it goes, and what was predicted.
pub(crate) fn measure(comm: &mut Timed, model: &Model, device: &Device) -> Result<()> {
    let link = link_speed(comm, device)?;
    print_head(comm, model, link);
    let before = used(device)?;
    for stage in Stage::ALL {
        let config = Config {
            stage,
            ..config(model)
        };
        let mut job = Job::new(comm, model, config, device)?;
        for _ in 0..WARM {
            job.step(comm)?;
        }
        let total = whole(comm, &mut job, device)?;
        let (split, asked) = split(comm, &mut job)?;
        // Memory that was used once stays with the process, so this is the peak, of the stage before, too; others may
        // share the device.
        let peak = used(device)?.saturating_sub(before);
        let rank = comm.rank();
        let predicted = job.optimizer.plan().predict(rank, &job.optimizer.terms());
        let mut alone = [0.0; 3];
        for (time, class) in alone.iter_mut().zip(CLASSES) {
            *time = replay::alone(comm, &asked, class, device)?;
        }
        let figures = Figures {
            stage,
            total,
            split,
            alone,
            planned: planned(&job, link)?,
            memory: [peak, usize::try_from(predicted.memory.total().0)?],
        };
        figures.print(comm);
        job.optimizer.shutdown()?;
    }
    Ok(())
}

/// Milliseconds of a step among others.
fn whole(comm: &mut Timed, job: &mut Job, device: &Device) -> Result<f64> {
    comm.mean(0.0)?;
    let mut events = vec![comm.clock.event()?];
    for _ in 0..COUNTED {
        job.step(comm)?;
        events.push(comm.clock.event()?);
    }
    device.synchronize()?;
    let times = events
        .windows(2)
        .map(|pair| Ok(f64::from(pair[0].elapsed_ms(&pair[1])?)));
    Ok(median(times.collect::<Result<_>>()?))
}

/// The same with marks, and the last step's requests.
fn split(comm: &Timed, job: &mut Job) -> Result<(Split, Vec<Asked>)> {
    let mut notes = Vec::with_capacity(COUNTED);
    for _ in 0..COUNTED {
        comm.clock.begin();
        job.step(comm)?;
        notes.push(comm.clock.end()?);
    }
    let splits = notes.iter().map(|notes| Split::of(&notes.marks));
    let splits = splits.collect::<Result<Vec<_>>>()?;
    let asked = notes.pop().map(|notes| notes.asked).unwrap_or_default();
    Ok((Split::median(&splits), asked))
}

/// What is measured of one stage.
struct Figures {
    stage: Stage,
    total: f64,
    split: Split,
    /// What the requests of these classes take alone.
    alone: [f64; 3],
    /// What the plan predicts for the whole step.
    planned: f64,
    /// Bytes, measured and predicted.
    memory: [usize; 2],
}

/// The classes whose requests work on the device.
const CLASSES: [Class; 3] = [Class::Gradient, Class::Exchange, Class::Weight];

fn print_head(comm: &Timed, model: &Model, link: f64) {
    let (name, world) = (model.name, comm.world());
    let marks = match model.floor_and_bar(world.get()) {
        Some((floor, bar)) => format!("floor {floor}, bar {bar}"),
        None => "no bar".to_owned(),
    };
    let link = if link == f64::MAX {
        "nothing is sent".to_owned()
    } else {
        format!("{:.0} GB/s sent by a rank", link * 1e-9)
    };
    say(
        comm,
        format_args!("\n{name}, world {world}: {marks}; {link}"),
    );
    let columns: Vec<_> = PHASES
        .iter()
        .map(|(_, name)| format!("{name:>8}"))
        .collect();
    let columns = columns.join(" ");
    say(
        comm,
        format_args!(
            "{:>10} {:>8} {columns} | {:>8} {:>8} {:>8} {:>6} | {:>8} {:>6} {:>6}",
            "", "ms/step", "reduce", "exchange", "gather", "hidden", "planned", "GiB", "plan"
        ),
    );
}

impl Figures {
    fn print(&self, comm: &Timed) {
        let columns = |times: &[f64]| {
            let columns: Vec<_> = times.iter().map(|time| format!("{time:>8.3}")).collect();
            columns.join(" ")
        };
        let all: f64 = self.alone.iter().sum();
        let waited: f64 = CLASSES.iter().map(|class| self.split.waited(*class)).sum();
        let hidden = match all {
            0.0 => "-".to_owned(),
            all => format!("{:.0}%", 100.0 * (1.0 - waited / all).max(0.0)),
        };
        let [used, planned] = self.memory.map(|bytes| bytes as f64 / f64::from(1 << 30));
        say(
            comm,
            format_args!(
                "{:>10} {:>8.3} {} | {} {hidden:>6} | {:>8.3} {used:>6.2} {planned:>6.2}",
                format!("stage {}", self.stage),
                self.total,
                columns(&self.split.device),
                columns(&self.alone),
                self.planned,
            ),
        );
        let host = self.split.host;
        let sum: f64 = host.iter().sum();
        say(
            comm,
            format_args!("{:>10} {sum:>8.3} {}", "host", columns(&host)),
        );
    }
}

/// Seconds of the combination in use, as `plan_best` compares it, in milliseconds.
fn planned(job: &Job, link: f64) -> Result<f64> {
    let plan = job.optimizer.plan();
    let costs = Costs {
        link_bytes_per_second: link,
        flops_per_second: FLOPS,
        call_seconds: 0.0,
        memory_limit: None,
    };
    let (params, world) = (plan.params(), plan.layout().world());
    let all = plan_best(
        params,
        world,
        plan.layout().bucket_size(),
        &job.optimizer.terms(),
        &costs,
    )?;
    let used = (plan.layout().placement(), plan.route(), plan.policy());
    let same =
        |candidate: &&Candidate| (candidate.placement, candidate.route, candidate.policy) == used;
    let found = all
        .iter()
        .find(same)
        .context("every combination is a candidate")?;
    Ok(found.seconds * 1e3)
}
