//! Clipping by the global norm of the raw mean gradient; the orthogonalized update is never clipped.

use anyhow::{Result, ensure};
use polarshard_muon::Decision;
use polarshard_partition::{Placement, Route};
use polarshard_testkit::compare::first_difference;
use polarshard_testkit::model::{Draw, Model};
use polarshard_testkit::reference::{Exact, Settings};
use polarshard_zero::Config;

use crate::support::{close, config, sharded, trained};

const WORLD: usize = 4;

/// An eps that is not small against the gradients, so that their magnitude shows in the weights.
fn settings(model: &Model) -> Config {
    let mut config = config(model);
    config.adamw.eps = 1.0;
    config
}

#[test]
fn the_norm_is_that_of_the_whole_mean_gradient() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(2)?;
    let steps = [model.gradients(Draw::Gaussian, 2, 0, 1, WORLD)?];
    let clipping =
        Exact::new(&trained(&model, &initial), Settings::of(&settings(&model)))?.step(&steps[0])?;
    for placement in Placement::ALL {
        for route in Route::ALL {
            let config = Config {
                placement,
                route,
                ..settings(&model)
            };
            for seen in sharded(WORLD, &model, &initial, &config, &steps)? {
                let (found, expected) = (seen.reports[0].gradient_norm, clipping.norm);
                ensure!(
                    (found / expected - 1.0).abs() < 1e-6,
                    "{placement} {route}: {found} instead of {expected}"
                );
                ensure!(seen.reports[0].clip_factor == 1.0, "nothing was to clip");
            }
        }
    }
    Ok(())
}

/// By a power of two, so that Muon, which sees directions only, keeps every bit.
#[test]
fn muon_keeps_its_update_and_adamw_sees_the_clipped_gradient() -> Result<()> {
    const FACTOR: f64 = 0.25;
    let model = Model::everything();
    let initial = model.initial(2)?;
    let names = trained(&model, &initial);
    let steps = [model.gradients(Draw::Integers, 2, 0, 1, WORLD)?];
    let free = sharded(WORLD, &model, &initial, &settings(&model), &steps)?;
    let clip = Some(FACTOR * free[0].reports[0].gradient_norm);
    let config = Config {
        clip,
        ..settings(&model)
    };
    let clipped = sharded(WORLD, &model, &initial, &config, &steps)?;
    ensure!(
        clipped[0].reports[0].clip_factor == FACTOR,
        "{:?}",
        clipped[0].reports[0]
    );
    ensure!(
        clipped[0].reports[0].gradient_norm == free[0].reports[0].gradient_norm,
        "the norm is the raw one"
    );

    let mut exact = Exact::new(&names, Settings::of(&config))?;
    exact.step(&steps[0])?;
    close(&names, &clipped[0].weights[0], &exact.weights, 1e-5)?;
    let shapes: Vec<_> = names
        .iter()
        .map(|(name, tensor)| (name.clone(), tensor.dims().to_vec()))
        .collect();
    for (index, routed) in config.rules.route(&shapes)?.entries().iter().enumerate() {
        let difference =
            first_difference(&clipped[0].weights[0][index], &free[0].weights[0][index])?;
        let changes = matches!(routed.decision, Decision::AdamW);
        let is_moved = names[index].1.elem_count() > 0 && !routed.name.starts_with("unused");
        ensure!(
            difference.is_some() == (changes && is_moved),
            "`{}`: {difference:?}",
            routed.name
        );
    }
    Ok(())
}

#[test]
fn a_gradient_within_the_norm_keeps_its_bits() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(2)?;
    let names = trained(&model, &initial);
    let steps = [model.gradients(Draw::Gaussian, 2, 0, 1, WORLD)?];
    let free = sharded(WORLD, &model, &initial, &settings(&model), &steps)?;
    let config = Config {
        clip: Some(1e6),
        ..settings(&model)
    };
    let clipped = sharded(WORLD, &model, &initial, &config, &steps)?;
    crate::support::same_bits(&names, &clipped[0].weights[0], &free[0].weights[0])
}
