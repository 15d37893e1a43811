//! Training on a CUDA device against the same training on the CPU: ranks of Loopback that share device 0 and its one
//! stream. Each test prints what it measured before it judges.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, VarBuilder, embedding, linear};
use polarshard_comm::Loopback;
use polarshard_muon::{Precision, Rules};
use polarshard_partition::{Placement, Policy, Route, Stage};
use polarshard_testkit::compare::{first_difference, relative, values64};
use polarshard_testkit::devices::{moved, moved_gradients, on_devices};
use polarshard_testkit::harness::{Seen, Worker};
use polarshard_testkit::model::{Draw, Model};
use polarshard_zero::{Config, ParamStore, Roles};

use crate::support::{config, count, sharded, trained, world};

const STEPS: usize = 3;

fn model() -> Model {
    on_devices(Model::everything())
}

fn device() -> Result<Device> {
    Ok(Device::new_cuda_with_stream(0)?)
}

/// What each rank saw of a few steps on a device.
fn run(size: usize, dtype: DType, config: &Config, device: &Device) -> Result<Vec<Seen>> {
    let model = model();
    let initial = moved(&model.initial(3)?, dtype, device)?;
    let accumulate = config.accumulate.get();
    let steps = (0..STEPS)
        .map(|step| {
            let step = model.gradients(Draw::Integers, 4, step, accumulate, size)?;
            Ok(moved_gradients(&step, dtype, device)?)
        })
        .collect::<Result<Vec<_>>>()?;
    sharded(size, &model, &initial, config, &steps)
}

/// Every placement, route, policy and stage, with and without what scales gradients.
fn settings() -> Vec<(&'static str, usize, DType, Config)> {
    let with = |change: &dyn Fn(&mut Config)| {
        let mut config = Config {
            bucket_size: count(200),
            ..config(&model())
        };
        config.muon.newton_schulz.iterate = Precision::F32;
        change(&mut config);
        config
    };
    vec![
        ("defaults, alone", 1, DType::F32, with(&|_| {})),
        (
            "stage 1, accumulated, alone",
            1,
            DType::F32,
            with(&|config| {
                (config.stage, config.accumulate) = (Stage::One, count(2));
            }),
        ),
        ("defaults", 2, DType::F32, with(&|_| {})),
        (
            "flat, copies to owners",
            2,
            DType::F32,
            with(&|config| {
                (config.placement, config.policy) = (Placement::Flat, Policy::CopyToOwners);
            }),
        ),
        (
            "whole, exchanged, accumulated",
            2,
            DType::F32,
            with(&|config| {
                (config.placement, config.policy) = (Placement::Whole, Policy::ExchangeUpdate);
                config.accumulate = count(2);
            }),
        ),
        (
            "to owners, stage 1",
            3,
            DType::F32,
            with(&|config| {
                (config.route, config.stage) = (Route::ReduceToOwner, Stage::One);
            }),
        ),
        (
            "all-reduced buckets",
            2,
            DType::F32,
            with(&|config| {
                (config.placement, config.route) = (Placement::Flat, Route::BucketAllReduce);
            }),
        ),
        (
            "clipped and scaled",
            2,
            DType::F32,
            with(&|config| {
                (config.clip, config.loss_scale) = (Some(0.5), 1024.0);
            }),
        ),
        ("bf16 weights", 2, DType::BF16, with(&|_| {})),
        (
            "bf16 weights, stage 1, accumulated",
            2,
            DType::BF16,
            with(&|config| {
                (config.stage, config.accumulate) = (Stage::One, count(2));
            }),
        ),
        ("f16 weights", 2, DType::F16, with(&|_| {})),
    ]
}

#[test]
#[ignore = "needs a GPU"]
fn steps_are_those_of_the_cpu() -> Result<()> {
    let device = device()?;
    let names = trained(&model(), &model().initial(3)?);
    let mut failures = Vec::new();
    println!("\n{STEPS} steps, CUDA against CPU, iterated in f32");
    for (case, size, dtype, config) in settings() {
        let expected = run(size, dtype, &config, &Device::Cpu)?;
        let found = run(size, dtype, &config, &device)?;
        let again = run(size, dtype, &config, &device)?;
        let (mut largest, mut norms, mut unstable) = (0f64, 0f64, 0);
        for ((found, expected), again) in found.iter().zip(&expected).zip(&again) {
            for (found, expected) in found.reports.iter().zip(&expected.reports) {
                let (found, expected) = (found.gradient_norm, expected.gradient_norm);
                norms = norms.max((found - expected).abs() / expected);
            }
            for step in 0..STEPS {
                let (found, again) = (&found.weights[step], &again.weights[step]);
                for index in 0..names.len() {
                    let on_cpu = found[index].to_device(&Device::Cpu)?;
                    let expected = values64(&expected.weights[step][index])?;
                    largest = largest.max(relative(&values64(&on_cpu)?, &expected));
                    let again = again[index].to_device(&Device::Cpu)?;
                    unstable += usize::from(first_difference(&on_cpu, &again)?.is_some());
                }
            }
        }
        // A half-precision weight may be rounded to its neighbour.
        let bound = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
        let ok = largest < bound && norms < 1e-12 && unstable == 0;
        println!(
            "  {} {case:<36} weights {largest:.1e}, norms {norms:.1e}, unstable {unstable}",
            if ok { " " } else { "!" }
        );
        if !ok {
            failures.push(case);
        }
    }
    ensure!(failures.is_empty(), "not as on the CPU: {failures:?}");
    Ok(())
}

/// The half-precision iterations, which the results travel in.
#[test]
#[ignore = "needs a GPU"]
fn half_precision_iterations_end_near_those_in_f32() -> Result<()> {
    let device = device()?;
    let mut failures = Vec::new();
    println!("\n{STEPS} steps on two ranks, against f32");
    let mut config = config(&model());
    config.muon.newton_schulz.iterate = Precision::F32;
    let expected = run(2, DType::F32, &config, &device)?;
    for (precision, bound) in [
        (Precision::Auto, 0.02),
        (Precision::F16, 0.02),
        (Precision::BF16, 0.1),
    ] {
        config.muon.newton_schulz.iterate = precision;
        let found = run(2, DType::F32, &config, &device)?;
        let mut largest = 0f64;
        for (found, expected) in found[0].weights[STEPS - 1]
            .iter()
            .zip(&expected[0].weights[STEPS - 1])
        {
            let (found, expected) = (
                found.to_device(&Device::Cpu)?,
                expected.to_device(&Device::Cpu)?,
            );
            largest = largest.max(relative(&values64(&found)?, &values64(&expected)?));
        }
        println!("    {precision:<6} weights {largest:.1e}");
        if largest >= bound {
            failures.push(precision);
        }
    }
    ensure!(failures.is_empty(), "far from f32: {failures:?}");
    Ok(())
}

/// An overflow on the device: the step is skipped, and nothing changes.
#[test]
#[ignore = "needs a GPU"]
fn an_infinite_gradient_skips_the_step() -> Result<()> {
    let device = device()?;
    let model = model();
    let initial = moved(&model.initial(3)?, DType::F32, &device)?;
    let config = config(&model);
    let mut step = model.gradients(Draw::Integers, 4, 0, 1, 1)?;
    let bad = step[0][0].gradients.iter_mut().flatten().next_back();
    if let Some(bad) = bad {
        *bad = (bad.ones_like()? / 0.0)?;
    }
    let step = moved_gradients(&step, DType::F32, &device)?;
    world(1, |comm| {
        let mut worker = Worker::new(comm, &initial, &model.roles, config.clone())?;
        let before = worker.weights()?;
        let report = worker.step(&step)?;
        ensure!(report.step == 0, "the step was taken: {report:?}");
        for (before, after) in before.iter().zip(worker.weights()?) {
            let after = after.to_device(&Device::Cpu)?;
            let difference = first_difference(&after, &before.to_device(&Device::Cpu)?)?;
            ensure!(difference.is_none(), "a weight changed: {difference:?}");
        }
        Ok(())
    })?;
    Ok(())
}

/// An embedding and two layers on a store.
struct Net {
    embed: Tensor,
    up: Linear,
    down: Linear,
}

impl Net {
    fn new(builder: &VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            embed: embedding(20, 24, builder.pp("embed"))?.embeddings().clone(),
            up: linear(24, 64, builder.pp("up"))?,
            down: linear(64, 24, builder.pp("down"))?,
        })
    }

    /// Cross-entropy of tokens that follow others, tied to the embedding.
    fn loss(&self, step: u32, device: &Device) -> Result<Tensor> {
        let tokens: Vec<u32> = (0..40).map(|i| (i * i + 3 * step) % 20).collect();
        let next: Vec<u32> = tokens.iter().map(|token| (token * 7 + 1) % 20).collect();
        let (tokens, next) = (Tensor::new(tokens, device)?, Tensor::new(next, device)?);
        let x = self.embed.index_select(&tokens, 0)?;
        let x = (&x + self.down.forward(&self.up.forward(&x)?.relu()?)?)?;
        let logits = x.matmul(&self.embed.t()?)?;
        Ok(candle_nn::loss::cross_entropy(&logits, &next)?)
    }
}

/// Losses of ten steps; after the fifth, the optimizer is saved and another one loads it.
fn through_store(comm: Loopback, device: &Device, folder: &std::path::Path) -> Result<Vec<f64>> {
    let mut config = Config {
        bucket_size: count(500),
        rules: Rules::default(),
        ..Config::default()
    };
    config.muon.newton_schulz.iterate = Precision::F32;
    let mut losses = Vec::new();
    let store = ParamStore::new(5, Roles::default());
    let net = Net::new(&store.var_builder(DType::F32, device))?;
    let mut optimizer = store.optimizer(Box::new(comm), config)?;
    let mut train = |optimizer: &mut polarshard_zero::ZeroOptimizer,
                     steps: std::ops::Range<u32>| {
        for step in steps {
            let loss = net.loss(step, device)?;
            losses.push(f64::from(loss.to_device(&Device::Cpu)?.to_scalar::<f32>()?));
            optimizer.backward(&loss)?;
            optimizer.step()?;
        }
        anyhow::Ok(())
    };
    train(&mut optimizer, 0..5)?;
    optimizer.save(folder)?;
    train(&mut optimizer, 5..10)?;
    optimizer.load(folder)?;
    train(&mut optimizer, 5..10)?;
    optimizer.verify_replicas()?;
    Ok(losses)
}

#[test]
#[ignore = "needs a GPU"]
fn a_store_trains_saves_and_resumes_as_on_the_cpu() -> Result<()> {
    let device = device()?;
    let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
    let on = |device: &Device, folder: &tempfile::TempDir| -> Result<Vec<f64>> {
        let losses = world(2, |comm| through_store(comm, device, folder.path()))?;
        Ok(losses.concat())
    };
    let expected = on(&Device::Cpu, &folders[0])?;
    let found = on(&device, &folders[1])?;
    println!(
        "\nlosses on the CPU {:.5?}\nlosses on CUDA    {:.5?}",
        &expected[..10],
        &found[..10]
    );
    for losses in found.chunks(15) {
        ensure!(
            losses[5..10] == losses[10..15],
            "resuming differs: {losses:?}"
        );
    }
    let largest = found
        .iter()
        .zip(&expected)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f64::max);
    ensure!(largest < 1e-3, "losses are {largest:e} apart");
    Ok(())
}
