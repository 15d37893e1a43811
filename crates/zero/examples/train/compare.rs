//! The same training on one device, unsharded: the sharded run must come to the same weights.

use anyhow::{Context, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use polarshard_muon::{MuonWithAdamW, MuonWithAdamWConfig};
use polarshard_partition::{Rank, WorldSize};
use polarshard_zero::{ParamStore, Roles};

use crate::curve::Curve;
use crate::model::Gpt;
use crate::options::Options;
use crate::progress;
use crate::text::{Batch, Text};
use crate::train::Run;

/// What the unsharded run tells.
pub(crate) struct Unsharded {
    pub(crate) curve: Curve,
    pub(crate) furthest: Furthest,
}

/// The parameter that is furthest from the sharded run's.
#[derive(Debug, Clone, Default)]
pub(crate) struct Furthest {
    pub(crate) name: String,
    /// The norm of the difference over the parameter's.
    pub(crate) distance: f64,
}

/// Trains unsharded, on the batches of all ranks at once, and compares the weights with those of a sharded run; on the
/// same device.
pub(crate) fn train(options: &Options, text: &Text, run: &Run) -> Result<Unsharded> {
    let (world, sharded) = (run.plan.layout().world(), run.weights.as_slice());
    let (_, first) = sharded.first().context("the model has no weights")?;
    let device = first.device();
    let map = VarMap::new();
    let model = Gpt::new(options, &VarBuilder::from_varmap(&map, DType::F32, device))?;
    let variables = in_order(&map, sharded)?;
    start_alike(options, &variables, device)?;
    let config = options.config();
    let groups = MuonWithAdamWConfig {
        muon: config.muon,
        adamw: config.adamw,
    };
    let mut optimizer = MuonWithAdamW::from_named(variables.clone(), &config.rules, groups)?;

    let held_out = text.held_out(Rank(0), 1, device)?;
    // From 0 on: a run that is compared was not resumed.
    let steps = &run.steps;
    let bar = progress::bar(steps, true);
    let mut curve = Curve::default();
    for step in steps.clone() {
        curve.evaluate(&model, held_out.as_ref(), step, steps)?;
        optimizer.set_learning_rate(options.learning_rate(step));
        let batch = global_batch(options, text, world, step, device)?;
        let loss = model.loss(&batch.inputs, &batch.targets)?;
        let mut gradients = loss.backward()?;
        if let Some(most) = options.clip {
            clip(&mut gradients, &variables, most)?;
        }
        optimizer.step(&gradients)?;
        let loss = f64::from(loss.to_scalar::<f32>()?);
        curve.training.push(loss);
        progress::advance(&bar, loss);
    }
    curve.evaluate(&model, held_out.as_ref(), steps.end, steps)?;
    bar.finish_and_clear();
    Ok(Unsharded {
        curve,
        furthest: furthest(sharded, &variables)?,
    })
}

/// The map's variables in the order of the sharded run; its own changes from run to run.
fn in_order(map: &VarMap, sharded: &[(String, Tensor)]) -> Result<Vec<(String, Var)>> {
    let data = map
        .data()
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let variable = |(name, _): &(String, Tensor)| {
        let variable = data
            .get(name)
            .with_context(|| format!("the unsharded model has no {name}"))?;
        Ok((name.clone(), variable.clone()))
    };
    sharded.iter().map(variable).collect()
}

/// Gives variables the weights that the sharded run began with, which a store draws again from the seed.
fn start_alike(options: &Options, variables: &[(String, Var)], device: &Device) -> Result<()> {
    let store = ParamStore::new(options.seed, Roles::default());
    Gpt::new(options, &store.var_builder(DType::F32, device))?;
    for (name, variable) in variables {
        variable.set(&store.get(name)?.detach())?;
    }
    Ok(())
}

/// The micro-batches of all ranks. They are equally large, so the mean of their means is the mean over all.
fn global_batch(
    options: &Options,
    text: &Text,
    world: WorldSize,
    step: usize,
    device: &Device,
) -> Result<Batch> {
    let mut batches = Vec::new();
    for rank in world.ranks() {
        for micro in 0..options.accumulate.get() {
            batches.push(text.batch(step, micro, rank, device)?);
        }
    }
    Batch::join(&batches)
}

/// Scales gradients down to a global norm of `most`.
fn clip(gradients: &mut GradStore, variables: &[(String, Var)], most: f64) -> Result<()> {
    let mut sum = 0.0;
    for (_, variable) in variables {
        if let Some(gradient) = gradients.get(variable) {
            sum += norm(gradient)?.powi(2);
        }
    }
    if sum.sqrt() > most {
        for (_, variable) in variables {
            if let Some(gradient) = gradients.remove(variable) {
                gradients.insert(variable, (gradient.detach() * (most / sum.sqrt()))?);
            }
        }
    }
    Ok(())
}

fn furthest(sharded: &[(String, Tensor)], variables: &[(String, Var)]) -> Result<Furthest> {
    let mut furthest = Furthest::default();
    for ((name, sharded), (_, unsharded)) in sharded.iter().zip(variables) {
        let difference = (sharded - unsharded.as_tensor().detach())?;
        let distance = norm(&difference)? / norm(unsharded)?;
        if distance >= furthest.distance {
            furthest = Furthest {
                name: name.clone(),
                distance,
            };
        }
    }
    Ok(furthest)
}

fn norm(tensor: &Tensor) -> Result<f64> {
    Ok(tensor
        .detach()
        .to_dtype(DType::F64)?
        .sqr()?
        .sum_all()?
        .to_scalar::<f64>()?
        .sqrt())
}
