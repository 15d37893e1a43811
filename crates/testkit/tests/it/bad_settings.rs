//! What is refused when an optimizer is made, by name and on all ranks.

use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, DeviceLocation, Tensor, Var};
use polarshard_comm::ranks::Outcome;
use polarshard_muon::{Coefficients, Method, Precision, Rule, Rules, UpdateScale};
use polarshard_partition::{Placement, Policy, Rank, Route, Stage, WorldSize};
use polarshard_testkit::harness::{Worker, on_ranks};
use polarshard_testkit::model::{Draw, Model};
use polarshard_zero::{Config, Error, Roles, ZeroOptimizer};

use crate::support::{config, count, same_bits, trained, unsharded, world};

fn variable() -> Result<Var> {
    Ok(Var::ones((2, 3), DType::F32, &Device::Cpu)?)
}

/// The error of making an optimizer on one rank.
fn refused(variables: &[(String, Var)], roles: &Roles, config: &Config) -> Result<Error> {
    let outcome = on_ranks(1, |comm| {
        ZeroOptimizer::from_named(variables.to_vec(), roles, Box::new(comm), config.clone())
            .map(drop)
    })?;
    match outcome.into_iter().next() {
        Some(Outcome::Failed(error)) => Ok(error),
        other => anyhow::bail!("not refused: {other:?}"),
    }
}

#[test]
fn a_list_of_nothing() -> Result<()> {
    ensure!(matches!(
        refused(&[], &Roles::default(), &Config::default())?,
        Error::NoParameters
    ));
    let frozen = Roles::default().frozen("*");
    let variables = vec![("w".to_owned(), variable()?)];
    ensure!(matches!(
        refused(&variables, &frozen, &Config::default())?,
        Error::NoParameters
    ));
    Ok(())
}

#[test]
fn names_and_variables_given_twice() -> Result<()> {
    let twice = vec![("w".to_owned(), variable()?), ("w".to_owned(), variable()?)];
    let error = refused(&twice, &Roles::default(), &Config::default())?;
    ensure!(
        matches!(&error, Error::DuplicateName { name } if name == "w"),
        "{error}"
    );
    let shared = variable()?;
    let tied = vec![
        ("embed".to_owned(), shared.clone()),
        ("head".to_owned(), shared),
    ];
    let error = refused(&tied, &Roles::default(), &Config::default())?;
    let text = error.to_string();
    ensure!(
        text.contains("`embed`") && text.contains("`head`"),
        "{text}"
    );
    Ok(())
}

#[test]
fn a_world_of_no_ranks() {
    assert!(WorldSize::new(0).is_err());
    assert!(on_ranks(0, |_| Ok::<_, Error>(())).is_err());
}

#[test]
fn unknown_words_get_the_list_of_known_ones() {
    fn text<T: FromStr>(word: &str) -> String
    where
        T::Err: std::fmt::Display,
    {
        T::from_str(word)
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    }
    let word = "quickly";
    let messages = [
        (text::<Placement>(word), "striped"),
        (text::<Route>(word), "bucket-all-reduce"),
        (text::<Policy>(word), "assign-owner"),
        (text::<Stage>(word), "1, 2"),
        (text::<Method>(word), "gram"),
        (text::<UpdateScale>(word), "spectral"),
    ];
    for (message, known) in messages {
        assert!(
            message.contains(word) && message.contains(known),
            "{message}"
        );
    }
}

#[test]
fn patterns_that_match_nothing() -> Result<()> {
    let variables = vec![("w".to_owned(), variable()?)];
    for roles in [
        Roles::default().frozen("layer.*"),
        Roles::default().optional("layer.*"),
        Roles::default().buffer("layer.*"),
    ] {
        let error = refused(&variables, &roles, &Config::default())?;
        ensure!(
            matches!(&error, Error::UnmatchedPattern { pattern, .. } if pattern == "layer.*"),
            "{error}"
        );
    }
    let rules = Config {
        rules: Rules::new().with("layer.*", Rule::AdamW),
        ..Config::default()
    };
    let error = refused(&variables, &Roles::default(), &rules)?;
    ensure!(
        matches!(&error, Error::Muon(_)) && error.to_string().contains("layer.*"),
        "{error}"
    );
    Ok(())
}

#[test]
fn offload_and_values_that_make_no_sense() -> Result<()> {
    let variables = vec![("w".to_owned(), variable()?)];
    let offload = Config {
        optimizer_device: Some(DeviceLocation::Cuda { gpu_id: 0 }),
        ..Config::default()
    };
    let error = refused(&variables, &Roles::default(), &offload)?;
    ensure!(
        matches!(error, Error::Offload { .. }) && error.to_string().contains("not supported"),
        "{error}"
    );
    let with = |change: fn(&mut Config)| {
        let mut config = Config::default();
        change(&mut config);
        config
    };
    let cases = [
        (with(|config| config.clip = Some(0.0)), "clip"),
        (with(|config| config.clip = Some(f64::NAN)), "clip"),
        (with(|config| config.loss_scale = -1.0), "loss_scale"),
        (
            with(|config| config.gradient_wire = Some(DType::F64)),
            "gradient_wire",
        ),
        (
            with(|config| config.broadcast_from = Some(1)),
            "broadcast_from",
        ),
        (with(|config| config.muon.momentum = 1.0), "muon.momentum"),
        (with(|config| config.muon.lr = 0.0), "muon.lr"),
        (with(|config| config.adamw.eps = 0.0), "adamw.eps"),
        (
            with(|config| config.muon.newton_schulz.iterate = Precision::F16),
            "F16",
        ),
    ];
    for (config, field) in cases {
        let error = refused(&variables, &Roles::default(), &config).context(field)?;
        ensure!(error.to_string().contains(field), "{field}: {error}");
    }
    Ok(())
}

#[test]
fn weights_that_cannot_be_trained() -> Result<()> {
    let integers = Var::ones((2, 3), DType::U32, &Device::Cpu)?;
    let error = refused(
        &[("tokens".to_owned(), integers)],
        &Roles::default(),
        &Config::default(),
    )?;
    ensure!(
        matches!(&error, Error::UnsupportedDtype { name, .. } if name == "tokens"),
        "{error}"
    );
    Ok(())
}

/// Every rank hears of it, and none waits for the others.
#[test]
fn ranks_that_are_built_differently() -> Result<()> {
    const WORLD: usize = 3;
    const ODD: Rank = Rank(1);
    let model = Model::everything();
    let initial = model.initial(1)?;
    type Change = fn(&mut Config);
    let changes: [(&str, Change); 14] = [
        ("layout", |config| config.placement = Placement::Whole),
        ("route", |config| config.route = Route::AllReduce),
        ("policy", |config| config.policy = Policy::ExchangeUpdate),
        ("update groups", |config| {
            config.rules = config.rules.clone().with("conv.weight", Rule::AdamW);
        }),
        ("stage", |config| config.stage = Stage::One),
        ("accumulation", |config| config.accumulate = count(2)),
        ("layout", |config| config.bucket_size = count(77)),
        ("gradient dtype", |config| {
            config.gradient_wire = Some(DType::BF16);
        }),
        ("hyper-parameters", |config| config.muon.lr = 0.051),
        ("hyper-parameters", |config| config.adamw.beta2 = 0.9),
        ("hyper-parameters", |config| config.clip = Some(1.0)),
        ("hyper-parameters", |config| config.loss_scale = 2.0),
        ("hyper-parameters", |config| {
            config.muon.newton_schulz.coefficients = Coefficients::You;
        }),
        ("hyper-parameters", |config| {
            config.muon.scale = UpdateScale::Spectral;
        }),
    ];
    for (part, change) in changes {
        let outcomes = on_ranks(WORLD, |comm| {
            let mut config = config(&model);
            if polarshard_comm::Communicator::rank(&comm) == ODD {
                change(&mut config);
            }
            Worker::new(comm, &initial, &model.roles, config).map(drop)
        })?;
        named_by_all(outcomes, ODD, part)?;
    }
    Ok(())
}

#[test]
fn ranks_with_different_parameters() -> Result<()> {
    const WORLD: usize = 3;
    const ODD: Rank = Rank(2);
    let model = Model::nearly_nothing();
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu);
    let usual = [
        ("w".to_owned(), ones(&[2, 6])?),
        ("b".to_owned(), ones(&[4])?),
    ];
    let others = [
        vec![usual[0].clone(), ("c".to_owned(), ones(&[4])?)],
        vec![("w".to_owned(), ones(&[3, 4])?), usual[1].clone()],
        vec![usual[0].clone()],
        vec![usual[1].clone(), usual[0].clone()],
    ];
    let run = |parameters: &[(String, Tensor)], roles: &Roles| {
        on_ranks(WORLD, |comm| {
            let odd = polarshard_comm::Communicator::rank(&comm) == ODD;
            let (parameters, roles) = if odd {
                (parameters, roles)
            } else {
                (&usual[..], &model.roles)
            };
            Worker::new(comm, parameters, roles, Config::default()).map(drop)
        })
    };
    for other in &others {
        named_by_all(run(other, &model.roles)?, ODD, "parameters")?;
    }
    named_by_all(
        run(&usual, &Roles::default().optional("b"))?,
        ODD,
        "parameters",
    )
}

fn named_by_all(outcomes: Vec<Outcome<(), Error>>, odd: Rank, part: &str) -> Result<()> {
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let Outcome::Failed(error) = outcome else {
            anyhow::bail!("{part}: rank {rank}: {outcome:?}")
        };
        let Error::Disagreement {
            rank: mine,
            other,
            what,
            ..
        } = &error
        else {
            anyhow::bail!("{part}: rank {rank}: {error:?}");
        };
        let expected = if Rank(rank) == odd { Rank(0) } else { odd };
        ensure!(
            (*mine, *other) == (Rank(rank), expected) && what.contains(part),
            "{part}: rank {rank}: {error}"
        );
    }
    Ok(())
}

#[test]
fn a_rank_that_is_refused_keeps_nobody_waiting() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(1)?;
    let outcomes = on_ranks(2, |comm| {
        let mut config = config(&model);
        if polarshard_comm::Communicator::rank(&comm) == Rank(1) {
            config.muon.momentum = 2.0;
        }
        Worker::new(comm, &initial, &model.roles, config).map(drop)
    })?;
    let [Outcome::Failed(waiting), Outcome::Failed(refused)] = &outcomes[..] else {
        anyhow::bail!("not refused: {outcomes:?}");
    };
    ensure!(refused.to_string().contains("muon.momentum"), "{refused}");
    ensure!(
        waiting.is_fatal() && waiting.to_string().contains("rank 1 returned early"),
        "{waiting}"
    );
    Ok(())
}

#[test]
fn different_initial_weights_are_an_error_and_a_broadcast_is_the_cure() -> Result<()> {
    const WORLD: usize = 3;
    let model = Model::everything();
    let of = |rank: usize| model.initial(100 + rank as u64);
    let outcomes = on_ranks(WORLD, |comm| {
        let rank = polarshard_comm::Communicator::rank(&comm).0;
        Worker::new(
            comm,
            &of(if rank == 1 { 1 } else { 0 })?,
            &model.roles,
            config(&model),
        )
        .map(drop)
    })?;
    let first = &trained(&model, &of(0)?)[0].0;
    for outcome in outcomes {
        let Outcome::Failed(Error::ReplicasDiffer {
            name, differing, ..
        }) = &outcome
        else {
            anyhow::bail!("not refused: {outcome:?}");
        };
        ensure!((name, &differing[..]) == (first, &[Rank(1)]), "{outcome:?}");
    }

    let root = 2;
    let config = Config {
        broadcast_from: Some(root),
        ..config(&model)
    };
    let names = trained(&model, &of(root)?);
    let steps = [model.gradients(Draw::Integers, 1, 0, 1, WORLD)?];
    let expected = unsharded(&names, &config, &steps)?;
    world(WORLD, |comm| -> Result<()> {
        let rank = polarshard_comm::Communicator::rank(&comm).0;
        let mut worker = Worker::new(comm, &of(rank)?, &model.roles, config.clone())?;
        let initial: Vec<_> = names.iter().map(|(_, tensor)| tensor.clone()).collect();
        same_bits(&names, &worker.weights()?, &initial).context("after the broadcast")?;
        worker.step(&steps[0])?;
        same_bits(&names, &worker.weights()?, &expected).context("after a step")?;
        worker.optimizer.verify_replicas()?;
        Ok(worker.optimizer.shutdown()?)
    })?;
    Ok(())
}
