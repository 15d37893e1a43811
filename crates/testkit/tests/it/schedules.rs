//! Learning rates that change between steps.

use anyhow::Result;
use polarshard_testkit::harness::Worker;
use polarshard_testkit::model::{Draw, Model};
use polarshard_testkit::reference::{Settings, Single};

use crate::support::{config, same_bits, trained, world};

const WORLD: usize = 2;
/// A warm-up from nothing, to the rate as configured and on.
const RATES: [f64; 5] = [0.0, 0.01, 0.05, 0.08, 0.003];

#[test]
fn one_schedule_serves_both_groups() -> Result<()> {
    let model = Model::everything();
    let config = config(&model);
    let ratio = config.adamw.lr / config.muon.lr;
    let initial = model.initial(4)?;
    let names = trained(&model, &initial);
    let steps = (0..RATES.len())
        .map(|step| Ok(model.gradients(Draw::Integers, 4, step, 1, WORLD)?))
        .collect::<Result<Vec<_>>>()?;
    let found = world(WORLD, |comm| -> Result<_> {
        let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
        let mut rates = Vec::new();
        for (lr, step) in RATES.into_iter().zip(&steps) {
            worker.optimizer.set_learning_rate(lr)?;
            worker.step(step)?;
            let (muon, adamw) = worker.optimizer.hyper_parameters();
            rates.push((muon.lr, adamw.lr));
        }
        let weights = worker.weights()?;
        worker.optimizer.shutdown()?;
        Ok((rates, weights))
    })?;

    let mut single = Single::new(&names, Settings::of(&config))?;
    for ((lr, step), (muon, adamw)) in RATES.into_iter().zip(&steps).zip(&found[0].0) {
        assert_eq!(*muon, lr);
        assert!(
            (adamw - muon * ratio).abs() <= 1e-15 * adamw,
            "{adamw} to {muon}"
        );
        (single.settings.muon.lr, single.settings.adamw.lr) = (*muon, *adamw);
        single.step(step)?;
    }
    same_bits(&names, &found[0].1, &single.weights()?)
}

#[test]
fn rates_that_make_no_sense_are_refused() -> Result<()> {
    let model = Model::nearly_nothing();
    let initial = model.initial(4)?;
    world(1, |comm| -> Result<()> {
        let mut worker = Worker::new(comm, &initial, &model.roles, config(&model))?;
        // The last one decays the weights to the other side of zero.
        for lr in [-1.0, f64::NAN, f64::INFINITY, 100.0] {
            let error = worker
                .optimizer
                .set_learning_rate(lr)
                .expect_err("the rate makes no sense");
            assert!(error.to_string().contains("muon.lr"), "{error}");
        }
        let (mut muon, adamw) = (
            worker.optimizer.hyper_parameters().0.clone(),
            worker.optimizer.hyper_parameters().1,
        );
        let adamw = *adamw;
        muon.lr = 0.0;
        let error = worker
            .optimizer
            .set_hyper_parameters(muon, adamw)
            .expect_err("there is no ratio to zero");
        assert!(error.to_string().contains("muon.lr"), "{error}");
        assert_eq!(worker.optimizer.learning_rate(), 0.05);
        Ok(())
    })?;
    Ok(())
}
