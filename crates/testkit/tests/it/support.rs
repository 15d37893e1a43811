//! What several tests need.

use std::fmt;
use std::num::NonZeroUsize;

use anyhow::{Context, Result, bail, ensure};
use candle_core::Tensor;
use polarshard_comm::Loopback;
use polarshard_comm::ranks::Outcome;
use polarshard_testkit::compare::{first_difference, relative, values64};
use polarshard_testkit::harness::{Seen, on_ranks, train};
use polarshard_testkit::model::{Model, StepGradients};
use polarshard_testkit::reference::{Settings, Single};
use polarshard_zero::{Config, Role};

/// What all ranks returned.
pub(crate) fn all_done<T, E: fmt::Debug>(outcomes: Vec<Outcome<T, E>>) -> Result<Vec<T>> {
    let value = |(rank, outcome)| match outcome {
        Outcome::Done(value) => Ok(value),
        Outcome::Failed(error) => bail!("rank {rank} failed: {error:?}"),
        Outcome::Panicked(message) => bail!("rank {rank} panicked: {message}"),
    };
    outcomes.into_iter().enumerate().map(value).collect()
}

/// Runs `rank` on all ranks of a world.
pub(crate) fn world<T: Send, E: fmt::Debug + Send>(
    size: usize,
    rank: impl Fn(Loopback) -> Result<T, E> + Sync,
) -> Result<Vec<T>> {
    all_done(on_ranks(size, rank)?)
}

/// A sharded run on a model, as each rank saw it.
pub(crate) fn sharded(
    size: usize,
    model: &Model,
    initial: &[(String, Tensor)],
    config: &Config,
    steps: &[StepGradients],
) -> Result<Vec<Seen>> {
    world(size, |comm| {
        train(comm, initial, &model.roles, config.clone(), steps)
    })
}

/// The settings of a test: those of the model's rules, and rates at which every step shows.
pub(crate) fn config(model: &Model) -> Config {
    let mut config = Config {
        rules: model.rules.clone(),
        ..Config::default()
    };
    (config.muon.lr, config.muon.weight_decay) = (0.05, 0.1);
    (config.adamw.lr, config.adamw.weight_decay) = (0.01, 0.05);
    config
}

/// The parameters that are trained.
pub(crate) fn trained(model: &Model, parameters: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    let is_trained = |name: &str| matches!(model.roles.of(name), Role::Required | Role::Optional);
    parameters
        .iter()
        .filter(|(name, _)| is_trained(name))
        .cloned()
        .collect()
}

/// Fails at the first element of which the bits differ.
pub(crate) fn same_bits(
    names: &[(String, Tensor)],
    found: &[Tensor],
    expected: &[Tensor],
) -> Result<()> {
    ensure!(
        found.len() == expected.len() && found.len() == names.len(),
        "not the same parameters"
    );
    for (((name, _), found), expected) in names.iter().zip(found).zip(expected) {
        if let Some((at, found, expected)) = first_difference(found, expected)? {
            bail!("`{name}` differs at element {at}: {found:e} instead of {expected:e}");
        }
    }
    Ok(())
}

/// Fails if a parameter's error, relative to its norm, is over `tolerance`.
pub(crate) fn close(
    names: &[(String, Tensor)],
    found: &[Tensor],
    expected: &[Vec<f64>],
    tolerance: f64,
) -> Result<()> {
    ensure!(
        found.len() == expected.len() && found.len() == names.len(),
        "not the same parameters"
    );
    for (((name, _), found), expected) in names.iter().zip(found).zip(expected) {
        let error = relative(&values64(found)?, expected);
        ensure!(
            error <= tolerance,
            "`{name}` is off by {error:.2e}, {tolerance:.0e} is allowed"
        );
    }
    Ok(())
}

/// The elements of several tensors as f64.
pub(crate) fn all_values64(tensors: &[Tensor]) -> Result<Vec<Vec<f64>>> {
    tensors
        .iter()
        .map(|tensor| values64(tensor).context("a weight"))
        .collect()
}

/// The place of a parameter among the trained ones.
pub(crate) fn index(model: &Model, name: &str) -> Result<usize> {
    let mut trained = model.trained();
    trained
        .position(|param| param.name == name)
        .with_context(|| format!("no parameter `{name}`"))
}

/// The weights of an unsharded run after these steps.
pub(crate) fn unsharded(
    parameters: &[(String, Tensor)],
    config: &Config,
    steps: &[StepGradients],
) -> Result<Vec<Tensor>> {
    let mut single = Single::new(parameters, Settings::of(config))?;
    for gradients in steps {
        single.step(gradients)?;
    }
    Ok(single.weights()?)
}

/// `n`, which is not zero.
pub(crate) fn count(n: usize) -> NonZeroUsize {
    NonZeroUsize::new(n).expect("it is not zero")
}
