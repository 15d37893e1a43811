//! The ten settings of DeepSpeed's numerical test for Muon with reduce-scatter, under its names: two ranks, three linear
//! layers of 256 × 256, one step from zero momentum, measured against the update of the full-batch gradient.

use std::num::NonZeroUsize;
use std::sync::LazyLock;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use polarshard_comm::{Communicator, Shared};
use polarshard_muon::{Coefficients, Method, Precision};
use polarshard_partition::{DigestWriter, Kept, Place, Plan, Rank, Ranks, Segment, Span, Stage};
use polarshard_testkit::compare::{relative, values64};
use polarshard_testkit::golden::route;
#[cfg(feature = "nccl")]
use polarshard_testkit::processes::World;
use polarshard_testkit::reference::newton_schulz;
use polarshard_zero::{Config, ParamStore, Roles, ZeroOptimizer};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::support::world;

const WORLD: usize = 2;
const HIDDEN: usize = 256;
const LAYERS: usize = 3;
const ROWS: usize = 8;
const LR: f64 = 0.02;
/// DeepSpeed allows 0.40, for gradients and iterations in half precision; all is fp32 here.
const TOLERANCE: f64 = 1e-4;

/// What one of DeepSpeed's settings asks for.
struct Setting {
    stage: Stage,
    method: Method,
    reduce_scatter: bool,
    accumulate: usize,
    overlap: bool,
    multi_rank: bool,
    contiguous: bool,
    bucket: usize,
}

/// The setting that the others are told apart from.
const COMMON: Setting = Setting {
    stage: Stage::Two,
    method: Method::Gram,
    reduce_scatter: true,
    accumulate: 1,
    overlap: false,
    multi_rank: true,
    contiguous: true,
    bucket: 500_000_000,
};

/// A test of each setting on ranks that are threads of the CPU, and one on ranks that are processes with GPUs.
macro_rules! settings {
    ($($name:ident: $setting:expr;)+) => {
        mod loopback {
            $(#[test]
            fn $name() -> anyhow::Result<()> {
                use super::*;
                world(WORLD, |comm| check(comm, &Device::Cpu, &$setting)).map(drop)
            })+
        }

        #[cfg(feature = "nccl")]
        mod nccl {
            $(#[test]
            #[ignore = "needs a GPU"]
            fn $name() -> anyhow::Result<()> {
                use super::*;
                World::of(concat!("deepspeed::nccl::", stringify!($name)), WORLD)
                    .run(|member| check(member.connect()?, &member.device, &$setting))
            })+
        }
    };
}

settings! {
    z1_gram_allreduce: Setting { stage: Stage::One, reduce_scatter: false, ..COMMON };
    z1_standard_allreduce: Setting {
        stage: Stage::One,
        method: Method::Standard,
        reduce_scatter: false,
        ..COMMON
    };
    z2_gram_allreduce: Setting { reduce_scatter: false, ..COMMON };
    z2_standard_allreduce: Setting { method: Method::Standard, reduce_scatter: false, ..COMMON };
    z1_reduce_scatter: Setting { stage: Stage::One, ..COMMON };
    z2_reduce_scatter: COMMON;
    z2_rs_gas2_overlap: Setting { accumulate: 2, overlap: true, ..COMMON };
    z2_rs_gas2_no_multi_rank: Setting { accumulate: 2, multi_rank: false, ..COMMON };
    z2_rs_extra_large_param: Setting { bucket: 32_768, ..COMMON };
    z2_rs_noncontiguous: Setting { contiguous: false, ..COMMON };
}

/// Which ranks copy a reduced slice into their buckets: its owner alone for an unsplit parameter, the set of all owners
/// for a split one; and where a rank keeps it.
#[test]
fn copy_targets_are_one_rank_or_a_set_of_ranks() -> Result<()> {
    let plans = world(WORLD, |comm| -> Result<Plan> {
        let optimizer = from_variables(comm, &Device::Cpu, config(&COMMON)?)?.0;
        let plan = optimizer.plan().clone();
        optimizer.shutdown()?;
        Ok(plan)
    })?;
    let plan = &plans[0];
    let size = HIDDEN * HIDDEN;
    let id = |layer: usize| plan.params().id(&weight(layer)).context("a weight");
    let first = id(1)?;

    let slices: Vec<_> = plan
        .layout()
        .slices(first)
        .iter()
        .map(|slice| (slice.rank, slice.span))
        .collect();
    let half = size / 2;
    assert_eq!(half, 32_768);
    assert_eq!(
        slices,
        [
            (Rank(0), Span::new(0, half)),
            (Rank(1), Span::new(half, size))
        ]
    );

    let bucket = plan.layout().bucket_of(first).context("a bucket")?;
    let both: Ranks = [Rank(0), Rank(1)].into_iter().collect();
    let segment = |start, end, owner, consumers: &Ranks| Segment {
        span: Span::new(start, end),
        owner: Rank(owner),
        consumers: consumers.clone(),
    };
    let expected = [
        segment(0, size, 0, &Ranks::one(Rank(0))),
        segment(size, size + half, 0, &both),
        segment(size + half, 2 * size, 1, &both),
        segment(2 * size, 3 * size, 1, &Ranks::one(Rank(1))),
    ];
    assert_eq!(plan.buckets()[bucket.index()].segments, expected);

    let block = plan.layout().bucket(bucket).block;
    let kept = |start, end, into| Kept {
        from: Span::new(start, end),
        into,
    };
    let whole = kept(
        size,
        2 * size,
        Place::Whole {
            param: first,
            at: 0,
        },
    );
    let shard = |at| Place::Shard { block, at };
    assert_eq!(plan.kept(bucket, Rank(0)), [kept(0, size, shard(0)), whole]);
    assert_eq!(
        plan.kept(bucket, Rank(1)),
        [whole, kept(2 * size, 3 * size, shard(half))]
    );
    Ok(())
}

/// Trains one step in both ways on this rank, and compares its updates with those from the whole batch.
fn check(comm: impl Communicator + 'static, device: &Device, setting: &Setting) -> Result<()> {
    let expected = if setting.accumulate == 1 {
        &*ONE_MICRO_BATCH
    } else {
        &*TWO_MICRO_BATCHES
    };
    let comm = Shared::new(comm);
    let config = config(setting)?;
    let handed_in = hand_in(comm.clone(), device, config.clone(), setting.accumulate)?;
    let stored = through_store(comm.clone(), device, config, setting.accumulate)?;
    for (way, after) in [("handed in", handed_in), ("through a store", stored)] {
        for (layer, (after, expected)) in after.iter().zip(expected).enumerate() {
            let before = values64(&initial(&weight(layer), &[HIDDEN, HIDDEN])?)?;
            let update: Vec<_> = before
                .iter()
                .zip(after)
                .map(|(before, after)| (before - after) / LR)
                .collect();
            let error = relative(&update, expected);
            ensure!(
                error < TOLERANCE,
                "{way}: layer {layer} is off by {error:.2e}"
            );
        }
    }
    let comm = comm.into_inner().context("an optimizer has not ended")?;
    Ok(Box::new(comm).shutdown()?)
}

fn config(setting: &Setting) -> Result<Config> {
    let mut config = Config {
        stage: setting.stage,
        route: route(
            setting.reduce_scatter,
            setting.multi_rank,
            setting.contiguous,
        ),
        accumulate: NonZeroUsize::new(setting.accumulate).context("no micro-batch")?,
        overlap: setting.overlap,
        bucket_size: NonZeroUsize::new(setting.bucket).context("no bucket")?,
        ..Config::deepspeed()
    };
    config.muon.newton_schulz.method = setting.method;
    config.muon.newton_schulz.iterate = Precision::F32;
    config.muon.lr = LR;
    Ok(config)
}

/// Trains one step on variables. Returns the weights' values.
fn hand_in(
    comm: impl Communicator + 'static,
    device: &Device,
    config: Config,
    accumulate: usize,
) -> Result<Vec<Vec<f64>>> {
    let rank = comm.rank().0;
    let (mut optimizer, model) = from_variables(comm, device, config)?;
    for micro_batch in 0..accumulate {
        optimizer.hand_in(&model.loss(block(micro_batch, rank))?.backward()?)?;
    }
    step(optimizer, &model)
}

/// Trains one step through a `ParamStore`. Returns the weights' values.
fn through_store(
    comm: impl Communicator + 'static,
    device: &Device,
    config: Config,
    accumulate: usize,
) -> Result<Vec<Vec<f64>>> {
    let rank = comm.rank().0;
    let store = ParamStore::new(0, Roles::default());
    let builder = store.var_builder(DType::F32, device);
    let model = SimpleModel::new(|name, shape| {
        let tensor = builder.get(shape, name)?;
        store.set(name, &initial(name, shape)?.to_device(device)?)?;
        Ok(tensor)
    })?;
    let mut optimizer = store.optimizer(Box::new(comm), config)?;
    for micro_batch in 0..accumulate {
        optimizer.backward(&model.loss(block(micro_batch, rank))?)?;
    }
    step(optimizer, &model)
}

fn step(mut optimizer: ZeroOptimizer, model: &SimpleModel) -> Result<Vec<Vec<f64>>> {
    let (layout, params) = (optimizer.plan().layout(), optimizer.plan().params());
    let split = params
        .matrices()
        .filter(|(id, _, _)| layout.matrix_owners(params, *id).len() > 1)
        .count();
    ensure!(split == 1, "{split} matrices are split");
    optimizer.step()?;
    optimizer.verify_replicas()?;
    optimizer.shutdown()?;
    model
        .weights
        .iter()
        .map(|weight| Ok(values64(&weight.to_device(&Device::Cpu)?)?))
        .collect()
}

fn from_variables(
    comm: impl Communicator + 'static,
    device: &Device,
    config: Config,
) -> Result<(ZeroOptimizer, SimpleModel)> {
    let mut named = Vec::new();
    let model = SimpleModel::new(|name, shape| {
        let variable = Var::from_tensor(&initial(name, shape)?.to_device(device)?)?;
        named.push((name.to_owned(), variable.clone()));
        Ok(variable.as_tensor().clone())
    })?;
    Ok((
        ZeroOptimizer::from_named(named, &Roles::default(), Box::new(comm), config)?,
        model,
    ))
}

/// Linear layers of which the first is used more than once.
struct SimpleModel {
    weights: Vec<Tensor>,
    biases: Vec<Tensor>,
}

impl SimpleModel {
    fn new(mut parameter: impl FnMut(&str, &[usize]) -> Result<Tensor>) -> Result<Self> {
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for layer in 0..LAYERS {
            weights.push(parameter(&weight(layer), &[HIDDEN, HIDDEN])?);
            biases.push(parameter(&format!("linears.{layer}.bias"), &[HIDDEN])?);
        }
        Ok(Self { weights, biases })
    }

    fn linear(&self, layer: usize, x: &Tensor) -> candle_core::Result<Tensor> {
        x.matmul(&self.weights[layer].t()?)?
            .broadcast_add(&self.biases[layer])
    }

    /// The mean cross-entropy of some blocks of rows.
    fn loss(&self, (inputs, classes): (Tensor, Tensor)) -> candle_core::Result<Tensor> {
        let device = self.weights[0].device();
        let (mut x, classes) = (inputs.to_device(device)?, classes.to_device(device)?);
        for layer in 0..LAYERS {
            x = (self.linear(layer / 2, &x)? + self.linear(layer, &x)?)?;
        }
        candle_nn::loss::cross_entropy(&x, &classes)
    }
}

fn weight(layer: usize) -> String {
    format!("linears.{layer}.weight")
}

/// Uniform in ±1/√256, as of a linear layer.
fn initial(name: &str, shape: &[usize]) -> Result<Tensor> {
    const MODEL_SEED: u64 = 1234;
    let seed = DigestWriter::new().u64(MODEL_SEED).str(name).finish();
    let mut rng = ChaCha8Rng::seed_from_u64(seed.0);
    let most = 1.0 / (HIDDEN as f32).sqrt();
    let values = (0..shape.iter().product())
        .map(|_| rng.random_range(-most..most))
        .collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// The rows of one micro-batch on one rank: block `micro_batch · world + rank` of the global batch.
fn block(micro_batch: usize, rank: usize) -> (Tensor, Tensor) {
    rows(micro_batch * WORLD + rank..micro_batch * WORLD + rank + 1)
}

fn rows(blocks: std::ops::Range<usize>) -> (Tensor, Tensor) {
    const DATA_SEED: u64 = 999;
    let rows = ROWS * blocks.len();
    let (mut inputs, mut classes) = (Vec::new(), Vec::new());
    for block in blocks {
        let mut rng = ChaCha8Rng::seed_from_u64(DATA_SEED + block as u64);
        inputs.extend((0..ROWS * HIDDEN).map(|_| rng.sample::<f32, _>(rand_distr::StandardNormal)));
        classes.extend((0..ROWS).map(|_| rng.random_range(0..HIDDEN as u32)));
    }
    let inputs =
        Tensor::from_vec(inputs, (rows, HIDDEN), &Device::Cpu).expect("rows × hidden elements");
    (
        inputs,
        Tensor::from_vec(classes, rows, &Device::Cpu).expect("a class a row"),
    )
}

/// The updates of the weights from the gradient of the whole batch on one device, and zero momentum.
static ONE_MICRO_BATCH: LazyLock<Vec<Vec<f64>>> =
    LazyLock::new(|| updates(1).expect("it needs no rank"));
static TWO_MICRO_BATCHES: LazyLock<Vec<Vec<f64>>> =
    LazyLock::new(|| updates(2).expect("it needs no rank"));

fn updates(accumulate: usize) -> Result<Vec<Vec<f64>>> {
    let mut variables = Vec::new();
    let model = SimpleModel::new(|name, shape| {
        variables.push(Var::from_tensor(&initial(name, shape)?)?);
        Ok(variables.last().context("just pushed")?.as_tensor().clone())
    })?;
    let gradients = model.loss(rows(0..accumulate * WORLD))?.backward()?;
    let coefficients = Coefficients::KellerJordan.steps(5);
    let update = |weight: &Tensor| -> Result<Vec<f64>> {
        let gradient = values64(gradients.get(weight).context("a gradient")?)?;
        // The momentum's factor 0.0975 has no influence, and the scale of a square is 1.
        Ok(newton_schulz(
            &gradient,
            HIDDEN,
            HIDDEN,
            &coefficients,
            Method::Standard,
        ))
    };
    model.weights.iter().map(update).collect()
}
