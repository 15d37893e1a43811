//! A rank that orthogonalizes what it happens to have makes every split matrix wrong, on all ranks alike, so that
//! nothing shows it but a comparison; whole matrices stay right.

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use polarshard_muon::Method;
use polarshard_partition::{MatrixId, Placement, Plan, Policy, Route};
use polarshard_testkit::compare::{relative, values64};
use polarshard_testkit::harness::{Worker, run};
use polarshard_testkit::model::{Draw, Model};
use polarshard_testkit::partial::Partial;
use polarshard_testkit::reference::{Exact, Settings};
use polarshard_zero::Config;

use crate::support::{config, sharded, trained, world};

/// What is allowed against DeepSpeed's iteration in fp16; ours is far below.
const TOLERANCE: f64 = 1e-2;

#[test]
fn two_ranks() -> Result<()> {
    partly_reduced(2)
}

#[test]
fn four_ranks() -> Result<()> {
    partly_reduced(4)
}

fn partly_reduced(size: usize) -> Result<()> {
    let model = Model::everything();
    let mut config = Config {
        placement: Placement::Flat,
        route: Route::BucketAllReduce,
        policy: Policy::CopyToOwners,
        ..config(&model)
    };
    config.muon.newton_schulz.method = Method::Gram;
    config.muon.weight_decay = 0.0;
    let initial = model.initial(3)?;
    let names = trained(&model, &initial);
    let steps = [model.gradients(Draw::Gaussian, 3, 0, 1, size)?];
    let mut exact = Exact::new(&names, Settings::of(&config))?;
    exact.step(&steps[0])?;

    let partial = world(size, |comm| {
        let (comm, plan) = Partial::new(comm);
        let worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
        plan.get_or_init(|| worker.optimizer.plan().clone());
        run(worker, &steps)
    })?;
    let right = sharded(size, &model, &initial, &config, &steps)?;

    let plan = &right[0].plan;
    let (mut split, mut whole) = (0, 0);
    for (id, param, matrix) in plan.params().matrices() {
        let error = |weights: &[Tensor]| off(plan, id, &names, weights, &exact.weights);
        let (partial, right) = (error(&partial[0].weights[0])?, error(&right[0].weights[0])?);
        if !partial.is_finite() {
            // Nothing was to change, and nothing did.
            continue;
        }
        let name = format!("{} of `{}`", matrix.span, plan.params().get(param).name);
        ensure!(
            right < TOLERANCE / 10.0,
            "{name} is off by {right} without the fault"
        );
        if plan.layout().matrix_owners(plan.params(), id).len() > 1 {
            ensure!(
                partial > 10.0 * TOLERANCE,
                "{name} is split and off by {partial} only"
            );
            split += 1;
        } else if plan.layout().owners(param).len() == 1 {
            ensure!(
                partial < TOLERANCE / 10.0,
                "{name} is whole and off by {partial}"
            );
            whole += 1;
        }
    }
    ensure!(
        split > 0 && whole > 0,
        "{split} split and {whole} whole matrices"
    );
    Ok(())
}

/// The relative error of a matrix's change; NaN where it does not change.
fn off(
    plan: &Plan,
    id: MatrixId,
    names: &[(String, Tensor)],
    found: &[Tensor],
    expected: &[Vec<f64>],
) -> Result<f64> {
    let (param, matrix) = plan.params().matrix(id);
    let name = &plan.params().get(param).name;
    let at = names
        .iter()
        .position(|(other, _)| other == name)
        .context("a parameter without a name")?;
    let before = values64(&names[at].1)?;
    let change = |after: &[f64]| -> Vec<f64> {
        (matrix.span.start..matrix.span.end)
            .map(|element| after[element] - before[element])
            .collect()
    };
    let (found, expected) = (change(&values64(&found[at])?), change(&expected[at]));
    Ok(if expected.iter().all(|change| *change == 0.0) {
        f64::NAN
    } else {
        relative(&found, &expected)
    })
}
