//! One rank's training, on its own micro-batches.

use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use polarshard_comm::{CallLog, Communicator, Recording, Shared};
use polarshard_partition::{Plan, Rank};
use polarshard_zero::{Error, Outcome, ParamStore, Roles, ZeroOptimizer};

use crate::account::{Account, gather};
use crate::curve::Curve;
use crate::model::Gpt;
use crate::options::Options;
use crate::progress;
use crate::table;
use crate::tallies::Tallies;
use crate::text::Text;

/// What rank 0 has after training.
pub(crate) struct Run {
    /// What each rank tells.
    pub(crate) accounts: Vec<Account>,
    pub(crate) plan: Plan,
    pub(crate) steps: Range<usize>,
    /// The weights after the last step, in registration order.
    pub(crate) weights: Vec<(String, Tensor)>,
}

/// Trains as one rank, and ends the world; rank 0 gets the run.
pub(crate) fn train(
    comm: Box<dyn Communicator>,
    device: &Device,
    options: &Options,
    text: &Text,
) -> Result<Option<Run>> {
    let rank = comm.rank();
    // The ranks have something to say to each other after the optimizer has ended.
    let mut comm = Shared::new(comm);
    let recording = Recording::new(comm.clone());
    let log = recording.log();
    let store = ParamStore::new(options.seed, Roles::default());
    let model = Gpt::new(options, &store.var_builder(DType::F32, device))?;
    let mut optimizer = store.optimizer(Box::new(recording), options.config())?;
    if rank == Rank(0) {
        println!("{}", table::model(optimizer.plan()));
    }

    if let Some(folder) = &options.resume {
        optimizer.load(folder)?;
    }
    let steps = steps_left(&optimizer, options)?;
    if rank == Rank(0) && options.resume.is_some() {
        println!("goes on after step {}", steps.start);
    }
    let account = all_steps(&model, &mut optimizer, &log, options, &steps, text)?;
    let plan = optimizer.plan().clone();
    optimizer.shutdown()?;
    let accounts = gather(&mut comm, &account)?;
    let comm = comm.into_inner();
    comm.context("the optimizer still holds its communicator")?
        .shutdown()?;
    if rank != Rank(0) {
        return Ok(None);
    }
    Ok(Some(Run {
        accounts,
        plan,
        steps,
        weights: weights(&store)?,
    }))
}

/// From those done in the checkpoint, if one was loaded.
fn steps_left(optimizer: &ZeroOptimizer, options: &Options) -> Result<Range<usize>> {
    let (start, end) = (usize::try_from(optimizer.steps())?, options.end());
    ensure!(
        start < end,
        "--resume: {start} steps are done in the checkpoint, and training ends after {end}: give more --steps, or a later \
         --stop"
    );
    Ok(start..end)
}

fn all_steps(
    model: &Gpt,
    optimizer: &mut ZeroOptimizer,
    log: &CallLog,
    options: &Options,
    steps: &Range<usize>,
    text: &Text,
) -> Result<Account> {
    let (rank, world) = (optimizer.rank(), optimizer.world());
    // What ranks said to agree on the optimizer, and to load it, belongs to no step.
    log.take();
    let held_out = text.held_out(rank, world.get(), model.device())?;
    let bar = progress::bar(steps, rank == Rank(0));
    let mut curve = Curve {
        start: steps.start,
        ..Curve::default()
    };
    let mut recorded = Tallies::default();
    let (mut unreduced_peak, mut orthogonalized) = (0, 0);
    for step in steps.clone() {
        curve.evaluate(model, held_out.as_ref(), step, steps)?;
        optimizer.set_learning_rate(options.learning_rate(step))?;
        let mut sum = 0.0;
        for micro in 0..options.accumulate.get() {
            let batch = text.batch(step, micro, rank, model.device())?;
            let loss = model.loss(&batch.inputs, &batch.targets)?;
            optimizer.backward(&loss)?;
            sum += f64::from(loss.to_scalar::<f32>()?);
        }
        let (report, done) = (optimizer.step()?, step + 1);
        if let Outcome::Skipped { non_finite } = report.outcome {
            bail!("step {done} was skipped: {non_finite} elements of its gradients are not finite");
        }
        recorded.add(world, &log.take(), 1);
        unreduced_peak = unreduced_peak.max(report.unreduced_peak);
        orthogonalized = report.orthogonalized;
        let loss = sum / options.accumulate.get() as f64;
        curve.training.push(loss);
        if options.verifies_after(done) {
            optimizer
                .verify_replicas()
                .with_context(|| format!("after step {done}"))?;
        }
        if let Some(folder) = options.saves_after(done) {
            optimizer.save(folder)?;
        }
        // Neither is a part of the step.
        log.take();
        progress::advance(&bar, loss);
    }
    curve.evaluate(model, held_out.as_ref(), steps.end, steps)?;
    bar.finish_and_clear();

    let foreseen = optimizer.plan().predict(rank, &optimizer.terms()).calls;
    let mut predicted = Tallies::default();
    predicted.add(world, &foreseen, steps.len() as u64);
    let identical = match optimizer.verify_replicas() {
        Ok(()) => true,
        Err(Error::ReplicasDiffer { .. }) => false,
        Err(error) => return Err(error.into()),
    };
    Ok(Account {
        curve,
        memory: optimizer.memory(),
        unreduced_peak,
        orthogonalized,
        recorded,
        predicted,
        identical,
    })
}

fn weights(store: &ParamStore) -> Result<Vec<(String, Tensor)>> {
    let names = store.names().into_iter();
    names
        .map(|(name, _)| Ok((name.clone(), store.get(&name)?.detach().copy()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;
    use polarshard_partition::WorldSize;

    use super::*;
    use crate::threads;

    /// A small model's run on so many ranks.
    fn run(world: usize, more: &[&str]) -> Result<Run> {
        let small = "train --layers 1 --width 16 --heads 2 --context 8 --batch 1 --accumulate 1 --bucket-size 2000";
        let options = Options::try_parse_from(small.split(' ').chain(more.iter().copied()))?;
        threads::train(WorldSize::new(world)?, &options, &Text::read(&options)?)
    }

    #[test]
    fn a_run_in_two_parts_ends_as_one_in_one() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let text = folder.path().join("text");
        fs::write(&text, "Of what is cut, nobody holds the whole. ".repeat(20))?;
        let (text, saved) = (text.to_string_lossy(), folder.path().join("saved"));
        let saved = saved.to_string_lossy();
        let of_six = ["--text", &*text, "--steps", "6"];

        let whole = run(2, &of_six)?;
        assert_eq!(whole.steps, 0..6);
        let first = [&of_six[..], &["--stop", "4", "--save", &*saved]].concat();
        assert_eq!(run(2, &first)?.steps, 0..4);
        let resumed = [&of_six[..], &["--resume", &*saved]].concat();
        let second = run(2, &resumed)?;
        assert_eq!(second.steps, 4..6);
        for ((name, whole), (_, second)) in whole.weights.iter().zip(&second.weights) {
            let values = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
            assert_eq!(values(whole)?, values(second)?, "{name}");
        }
        let losses = |run: &Run| run.accounts[1].curve.training.clone();
        assert_eq!(losses(&whole)[4..], losses(&second));
        let recorded = |run: &Run| run.accounts[0].recorded == run.accounts[0].predicted;
        assert!(recorded(&whole) && recorded(&second));

        let on_three = run(3, &resumed)?;
        assert!(on_three.steps == (4..6) && recorded(&on_three));
        let done = run(2, &[&first[..], &["--resume", &*saved]].concat());
        let error = format!("{:#}", done.err().context("nothing is left to do")?);
        assert!(
            error.contains("4 steps are done in the checkpoint, and training ends after 4"),
            "{error}"
        );
        Ok(())
    }

    #[test]
    fn checkpoints_are_saved_now_and_then_and_at_the_end() -> Result<()> {
        let due = |more: &str| {
            let words = "train --steps 7 --save there"
                .split(' ')
                .chain(more.split(' '));
            let options = Options::try_parse_from(words)?;
            let due = (1..=7).filter(|done| options.saves_after(*done).is_some());
            Ok::<_, clap::Error>(due.collect::<Vec<_>>())
        };
        assert_eq!(due("--save-every 3")?, [3, 6, 7]);
        assert_eq!(due("--save-every 0")?, [7]);
        assert_eq!(due("--stop 5")?, [5]);
        Ok(())
    }
}
