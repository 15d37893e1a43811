//! Models on a `ParamStore` that do what does not work: each is an error that names the thing, after which the optimizer
//! is as before and all ranks go on.

use anyhow::{Context, Result, ensure};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use polarshard_comm::Communicator;
use polarshard_comm::ranks::Outcome;
use polarshard_partition::{Rank, Stage};
use polarshard_testkit::compare::values;
use polarshard_testkit::harness::on_ranks;
use polarshard_zero::{Config, Error, ParamStore, Roles, ZeroOptimizer};

use crate::support::{count, world};

const WORLD: usize = 3;
const ODD: Rank = Rank(1);

/// Two linear layers and a norm between them.
struct Net {
    first: Linear,
    gain: Tensor,
    bias: Tensor,
    second: Linear,
}

impl Net {
    fn new(builder: &VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self {
            first: linear(6, 5, builder.pp("first"))?,
            gain: builder.get_with_hints(5, "norm.gain", candle_nn::Init::Const(1.0))?,
            bias: builder.get_with_hints(5, "norm.bias", candle_nn::Init::Const(0.0))?,
            second: linear(5, 4, builder.pp("second"))?,
        })
    }

    fn loss(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let hidden =
            candle_nn::ops::layer_norm_slow(&self.first.forward(x)?, &self.gain, &self.bias, 1e-5)?;
        self.second.forward(&hidden)?.sqr()?.mean_all()
    }
}

struct Rig {
    store: ParamStore,
    net: Net,
    optimizer: ZeroOptimizer,
    rank: Rank,
}

impl Rig {
    fn new(comm: impl Communicator + 'static, roles: Roles, config: &Config) -> Result<Self> {
        let store = ParamStore::new(11, roles);
        let net = Net::new(&store.var_builder(DType::F32, &Device::Cpu))?;
        let rank = comm.rank();
        let optimizer = store.optimizer(Box::new(comm), config.clone())?;
        Ok(Self {
            store,
            net,
            optimizer,
            rank,
        })
    }

    /// The rows of this rank in a step.
    fn rows(&self, step: usize) -> Result<Tensor> {
        let from = (step * WORLD + self.rank.0) as f32;
        let values: Vec<f32> = (0..18u8)
            .map(|at| (f32::from(at) * 0.7 + from).sin())
            .collect();
        Ok(Tensor::from_vec(values, (3, 6), &Device::Cpu)?)
    }

    fn weights(&self) -> Result<Vec<Vec<f32>>> {
        self.store
            .names()
            .iter()
            .map(|(name, _)| Ok(values(&self.store.get(name)?)?))
            .collect()
    }

    fn step(&mut self, step: usize) -> Result<()> {
        let loss = self.net.loss(&self.rows(step)?)?;
        self.optimizer.backward(&loss)?;
        self.optimizer.step()?;
        Ok(())
    }
}

fn config(stage: Stage) -> Config {
    Config {
        stage,
        bucket_size: count(20),
        ..Config::default()
    }
}

/// The weights of a run without incident on these steps' rows.
fn expected(stage: Stage, steps: &[usize]) -> Result<Vec<Vec<f32>>> {
    let mut ranks = world(WORLD, |comm| -> Result<_> {
        let mut rig = Rig::new(comm, Roles::default(), &config(stage))?;
        for step in steps {
            rig.step(*step)?;
        }
        let weights = rig.weights()?;
        rig.optimizer.shutdown()?;
        Ok(weights)
    })?;
    Ok(ranks.swap_remove(0))
}

/// After one step, one rank's backward pass goes wrong with these words; all ranks drop the step, have changed nothing,
/// and get the next step right.
fn dropped_on_all(wrong: impl Fn(&mut Rig) -> Result<Error> + Sync, words: &[&str]) -> Result<()> {
    for stage in Stage::ALL {
        let expected = expected(stage, &[0, 2])?;
        world(WORLD, |comm| -> Result<()> {
            let mut rig = Rig::new(comm, Roles::default(), &config(stage))?;
            rig.step(0)?;
            let before = (rig.weights()?, rig.optimizer.memory());
            if rig.rank == ODD {
                let error = wrong(&mut rig)?;
                let text = format!("{:#}", anyhow::Error::new(error.clone()));
                ensure!(
                    !error.is_fatal() && words.iter().all(|word| text.contains(word)),
                    "{text}"
                );
            } else {
                let loss = rig.net.loss(&rig.rows(1)?)?;
                rig.optimizer.backward(&loss)?;
            }
            let error = rig.optimizer.step().err().context("the step was taken")?;
            ensure!(
                matches!(&error, Error::Dropped { step: 2, failed, .. } if *failed == [ODD]),
                "{error}"
            );
            ensure!(
                (rig.weights()?, rig.optimizer.memory()) == before,
                "not as before"
            );
            rig.step(2)?;
            ensure!(
                rig.weights()? == expected,
                "the next step is not that of a run without incident"
            );
            rig.optimizer.verify_replicas()?;
            Ok(rig.optimizer.shutdown()?)
        })?;
    }
    Ok(())
}

/// Passes its input on, and fails or panics on the way back.
struct Broken {
    panics: bool,
}

impl CustomOp1 for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        if self.panics {
            panic!("no way back");
        }
        candle_core::bail!("no way back")
    }
}

/// Part of the gradients has been handed in when it happens.
fn broken_between_the_layers(rig: &mut Rig, panics: bool) -> Result<Error> {
    let hidden = rig
        .net
        .first
        .forward(&rig.rows(1)?)?
        .apply_op1(Broken { panics })?;
    let loss = rig.net.second.forward(&hidden)?.sqr()?.mean_all()?;
    rig.optimizer
        .backward(&loss)
        .err()
        .context("the backward pass succeeded")
}

#[test]
fn a_panic_in_the_backward_pass() -> Result<()> {
    dropped_on_all(
        |rig| broken_between_the_layers(rig, true),
        &["rank 1", "panicked", "no way back"],
    )
}

#[test]
fn an_error_in_the_backward_pass() -> Result<()> {
    dropped_on_all(
        |rig| broken_between_the_layers(rig, false),
        &["rank 1", "backward pass failed", "no way back"],
    )
}

/// candle's fused norm passes no gradient on, to its input or to its own parameters.
#[test]
fn a_fused_operation_that_cuts_gradients() -> Result<()> {
    let wrong = |rig: &mut Rig| {
        let hidden = rig.net.first.forward(&rig.rows(1)?)?;
        let hidden = candle_nn::ops::layer_norm(&hidden, &rig.net.gain, &rig.net.bias, 1e-5)?;
        let loss = rig.net.second.forward(&hidden)?.sqr()?.mean_all()?;
        rig.optimizer
            .backward(&loss)
            .err()
            .context("nobody missed the gradients")
    };
    let words = [
        "`first.weight`",
        "`first.bias`",
        "`norm.gain`",
        "`norm.bias`",
        "layer_norm_slow",
    ];
    dropped_on_all(wrong, &words)
}

#[test]
fn a_loss_without_any_weight() -> Result<()> {
    let wrong = |rig: &mut Rig| {
        let loss = rig.rows(1)?.sqr()?.mean_all()?;
        rig.optimizer
            .backward(&loss)
            .err()
            .context("nobody missed the gradients")
    };
    dropped_on_all(wrong, &["`first.weight`", "`second.weight`"])
}

/// candle would differentiate the sum of its elements, where a mean is meant.
#[test]
fn a_loss_of_several_elements() -> Result<()> {
    let wrong = |rig: &mut Rig| {
        let hidden = rig.net.first.forward(&rig.rows(1)?)?;
        let loss = rig.net.second.forward(&hidden)?.sqr()?;
        let result = rig.optimizer.backward(&loss);
        result.err().context("the loss was differentiated")
    };
    dropped_on_all(wrong, &["rank 1", "[3, 4]", "one element"])
}

/// The others hear of it in the middle of their backward pass.
#[test]
fn a_rank_that_leaves() -> Result<()> {
    for stage in Stage::ALL {
        world(WORLD, |comm| -> Result<()> {
            let mut rig = Rig::new(comm, Roles::default(), &config(stage))?;
            rig.step(0)?;
            if rig.rank == ODD {
                return Ok(());
            }
            let loss = rig.net.loss(&rig.rows(1)?)?;
            let error = rig
                .optimizer
                .backward(&loss)
                .err()
                .context("a rank is gone")?;
            ensure!(
                error.is_fatal() && error.to_string().contains("rank 1 returned early"),
                "{error}"
            );
            let again = rig
                .optimizer
                .backward(&loss)
                .err()
                .context("the optimizer has ended")?;
            ensure!(matches!(again, Error::Poisoned { .. }), "{again:?}");
            Ok(())
        })?;
    }
    Ok(())
}

/// It was made from the weight once, and does not see what a step writes.
#[test]
fn a_copy_of_a_weight_that_the_model_keeps() -> Result<()> {
    for stage in Stage::ALL {
        world(WORLD, |comm| -> Result<()> {
            let mut rig = Rig::new(comm, Roles::default(), &config(stage))?;
            let kept = rig.net.second.weight().t()?.contiguous()?;
            let loss = |rig: &Rig, step| -> Result<Tensor> {
                if rig.rank != ODD {
                    return Ok(rig.net.loss(&rig.rows(step)?)?);
                }
                let hidden = rig.net.first.forward(&rig.rows(step)?)?;
                let hidden =
                    candle_nn::ops::layer_norm_slow(&hidden, &rig.net.gain, &rig.net.bias, 1e-5)?;
                let bias = rig.net.second.bias().context("a bias")?;
                Ok(hidden
                    .matmul(&kept)?
                    .broadcast_add(bias)?
                    .sqr()?
                    .mean_all()?)
            };
            let first = loss(&rig, 0)?;
            rig.optimizer.backward(&first)?;
            rig.optimizer.step()?;
            let before = rig.weights()?;
            let second = loss(&rig, 1)?;
            let result = rig.optimizer.backward(&second);
            if rig.rank == ODD {
                let error = result.err().context("the copy was not found")?;
                ensure!(
                    matches!(&error, Error::Stale { shape } if *shape == [5, 4]),
                    "{error}"
                );
            } else {
                result?;
            }
            let error = rig.optimizer.step().err().context("the step was taken")?;
            ensure!(
                matches!(&error, Error::Dropped { failed, .. } if *failed == [ODD]),
                "{error}"
            );
            ensure!(rig.weights()? == before, "not as before");
            rig.step(2)?;
            rig.optimizer.verify_replicas()?;
            Ok(rig.optimizer.shutdown()?)
        })?;
    }
    Ok(())
}

/// The first loss after a checkpoint was loaded cannot tell, the one after the next step can.
#[test]
fn a_copy_of_a_weight_after_a_checkpoint_was_loaded() -> Result<()> {
    let folder = tempfile::tempdir()?;
    world(WORLD, |comm| -> Result<()> {
        let mut rig = Rig::new(comm, Roles::default(), &config(Stage::Two))?;
        rig.step(0)?;
        rig.optimizer.save(folder.path())?;
        Ok(rig.optimizer.shutdown()?)
    })?;
    world(WORLD, |comm| -> Result<()> {
        let mut rig = Rig::new(comm, Roles::default(), &config(Stage::Two))?;
        let kept = rig.net.second.weight().affine(1.0, 0.0)?;
        rig.optimizer.load(folder.path())?;
        let loss = |rig: &Rig| -> Result<Tensor> {
            let unused = (rig.net.second.weight().sum_all()? * 0.0)?;
            Ok(((rig.net.loss(&rig.rows(1)?)? + kept.sum_all()?)? + unused)?)
        };
        rig.optimizer.backward(&loss(&rig)?)?;
        rig.optimizer.step()?;
        let error = rig
            .optimizer
            .backward(&loss(&rig)?)
            .err()
            .context("the copy was not found")?;
        ensure!(
            matches!(&error, Error::Stale { shape } if *shape == [4, 5]),
            "{error}"
        );
        rig.optimizer
            .step()
            .err()
            .context("the step was taken")
            .map(drop)
    })?;
    Ok(())
}

/// It is refused where it happens; the optimizer does not even notice.
#[test]
fn a_backward_pass_without_the_optimizer() -> Result<()> {
    let expected = expected(Stage::Two, &[0, 1])?;
    world(WORLD, |comm| -> Result<()> {
        let store = ParamStore::new(11, Roles::default());
        let net = Net::new(&store.var_builder(DType::F32, &Device::Cpu))?;
        let early = net.loss(&Tensor::ones((3, 6), DType::F32, &Device::Cpu)?)?;
        let error = early
            .backward()
            .err()
            .context("there is no optimizer yet")?
            .to_string();
        ensure!(error.contains("optimizer.backward(&loss)"), "{error}");
        let rank = comm.rank();
        let optimizer = store.optimizer(Box::new(comm), config(Stage::Two))?;
        let mut rig = Rig {
            store,
            net,
            optimizer,
            rank,
        };
        rig.step(0)?;
        if rank == ODD {
            let error = rig
                .net
                .loss(&rig.rows(1)?)?
                .backward()
                .err()
                .context("it went through")?
                .to_string();
            ensure!(
                error.contains("optimizer.backward(&loss)") && error.contains("second."),
                "{error}"
            );
        }
        rig.step(1)?;
        ensure!(rig.weights()? == expected, "not the run without incident");
        let error = rig
            .optimizer
            .hand_in(&Tensor::ones((), DType::F32, &Device::Cpu)?.backward()?);
        ensure!(matches!(error, Err(Error::HandInWithStore)), "{error:?}");
        Ok(rig.optimizer.shutdown()?)
    })?;
    Ok(())
}

#[test]
fn weights_asked_for_after_the_optimizer() -> Result<()> {
    world(1, |comm| -> Result<()> {
        let rig = Rig::new(comm, Roles::default(), &config(Stage::Two))?;
        let builder = rig.store.var_builder(DType::F32, &Device::Cpu);
        let text = |result: candle_core::Result<Tensor>| {
            result
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default()
        };
        let known = builder.get((5, 6), "first.weight")?;
        ensure!(
            values(&known)? == values(&rig.store.get("first.weight")?)?,
            "a known name gives its tensor"
        );
        let reshaped = text(builder.get((6, 5), "first.weight"));
        ensure!(
            reshaped.contains("`first.weight`")
                && reshaped.contains("[5, 6]")
                && reshaped.contains("[6, 5]"),
            "{reshaped}"
        );
        let cast = text(builder.get_with_hints_dtype(
            (5, 6),
            "first.weight",
            Default::default(),
            DType::BF16,
        ));
        ensure!(
            cast.contains("`first.weight`") && cast.contains("BF16"),
            "{cast}"
        );
        let new = text(builder.get((5, 6), "third.weight"));
        ensure!(
            new.contains("`third.weight`")
                && new.contains("build the model and set its weights first"),
            "{new}"
        );
        let error = rig
            .store
            .set("first.weight", &known.zeros_like()?)
            .err()
            .context("it was set")?;
        ensure!(
            matches!(&error, Error::Sealed { name } if name == "first.weight"),
            "{error}"
        );
        Ok(())
    })?;
    Ok(())
}

#[test]
fn a_store_has_one_optimizer() -> Result<()> {
    let store = ParamStore::new(11, Roles::default());
    let outcomes = on_ranks(1, |comm| {
        store.optimizer(Box::new(comm), Config::default()).map(drop)
    })?;
    ensure!(
        matches!(&outcomes[..], [Outcome::Failed(Error::NoParameters)]),
        "{outcomes:?}"
    );
    Net::new(&store.var_builder(DType::F32, &Device::Cpu))?;
    let first = on_ranks(1, |comm| {
        store.optimizer(Box::new(comm), Config::default()).map(drop)
    })?;
    ensure!(first[0].is_done(), "{first:?}");
    let second = on_ranks(1, |comm| {
        store.optimizer(Box::new(comm), Config::default()).map(drop)
    })?;
    ensure!(
        matches!(&second[..], [Outcome::Failed(Error::HasOptimizer)]),
        "{second:?}"
    );
    Ok(())
}

/// Each rank has a store of its own. One that comes with a clone of another's is told, and keeps nobody waiting.
#[test]
fn a_store_is_of_one_rank() -> Result<()> {
    let store = ParamStore::new(11, Roles::default());
    Net::new(&store.var_builder(DType::F32, &Device::Cpu))?;
    let outcomes = on_ranks(2, |comm| {
        store.optimizer(Box::new(comm), Config::default()).map(drop)
    })?;
    let sealed = |outcome: &Outcome<_, _>| matches!(outcome, Outcome::Failed(Error::HasOptimizer));
    let left = |outcome: &Outcome<_, _>| match outcome {
        Outcome::Failed(error @ Error::Comm(_)) => !error.to_string().contains("not done within"),
        _ => false,
    };
    ensure!(
        outcomes.iter().any(sealed) && outcomes.iter().any(left),
        "{outcomes:?}"
    );
    // Nothing was made of it, so that it can be used alone.
    let alone = on_ranks(1, |comm| {
        store.optimizer(Box::new(comm), Config::default()).map(drop)
    })?;
    ensure!(alone[0].is_done(), "{alone:?}");
    Ok(())
}

#[test]
fn a_role_for_nothing() -> Result<()> {
    let store = ParamStore::new(11, Roles::default().frozen("third.*"));
    Net::new(&store.var_builder(DType::F32, &Device::Cpu))?;
    let outcomes = on_ranks(1, |comm| {
        store.optimizer(Box::new(comm), Config::default()).map(drop)
    })?;
    let [Outcome::Failed(error)] = &outcomes[..] else {
        anyhow::bail!("{outcomes:?}")
    };
    ensure!(
        matches!(error, Error::UnmatchedPattern { pattern, .. } if pattern == "third.*"),
        "{error}"
    );
    Ok(())
}
