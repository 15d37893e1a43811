//! Models on a `ParamStore`: against one device with a `VarMap`, with and without overlap, and what they hold.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, IndexOp, Tensor, Var};
use candle_nn::{
    Conv2d, Conv2dConfig, Embedding, Init, Linear, Module, Optimizer, VarBuilder, VarMap, conv2d,
    embedding, linear,
};
use polarshard_comm::{Communicator, Loopback};
use polarshard_muon::{MuonWithAdamW, MuonWithAdamWConfig, Rules};
use polarshard_partition::{Placement, Policy, Route, Stage};
use polarshard_testkit::compare::{relative, values, values64};
use polarshard_zero::{Config, ParamStore, Roles, StepReport, ZeroOptimizer};

use crate::support::{count, world};

const WORLD: usize = 4;
const STEPS: usize = 8;
const ROWS: usize = 2;
const TOKENS: usize = 16;
const VOCABULARY: usize = 12;
const WIDTH: usize = 8;

/// An embedding tied to the logits, a linear layer, a convolution over a square of tokens, and a norm by hand.
struct Net {
    embedding: Embedding,
    linear: Linear,
    convolution: Conv2d,
    gain: Tensor,
}

impl Net {
    fn new(builder: &VarBuilder<'_>) -> candle_core::Result<Self> {
        let padded = Conv2dConfig {
            padding: 1,
            ..Conv2dConfig::default()
        };
        Ok(Self {
            embedding: embedding(VOCABULARY, WIDTH, builder.pp("embedding"))?,
            linear: linear(WIDTH, WIDTH, builder.pp("linear"))?,
            convolution: conv2d(WIDTH, WIDTH, 3, padded, builder.pp("convolution"))?,
            gain: builder.get_with_hints(WIDTH, "norm.gain", Init::Const(1.0))?,
        })
    }

    /// The mean cross-entropy of each next token.
    fn loss(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        const SIDE: usize = 4;
        let rows = tokens.dim(0)?;
        let x = self.embedding.forward(&tokens.i((.., ..TOKENS))?)?;
        let x = (&x + self.linear.forward(&x)?.gelu()?)?;
        let square = x.transpose(1, 2)?.reshape((rows, WIDTH, SIDE, SIDE))?;
        let mixed = self
            .convolution
            .forward(&square)?
            .reshape((rows, WIDTH, TOKENS))?
            .transpose(1, 2)?;
        let x = (x + mixed)?;
        let norm = (x.sqr()?.mean_keepdim(2)? + 1e-6)?.sqrt()?;
        let x = x.broadcast_div(&norm)?.broadcast_mul(&self.gain)?;
        let logits = x
            .reshape((rows * TOKENS, WIDTH))?
            .matmul(&self.embedding.embeddings().t()?)?;
        candle_nn::loss::cross_entropy(&logits, &tokens.i((.., 1..))?.flatten_all()?)
    }
}

/// A batch's rows of tokens; each row counts up from somewhere in steps of its own.
fn tokens(step: usize, micro_batch: usize, rank: usize) -> Result<Tensor> {
    let row =
        |row: usize| (0..=TOKENS).map(move |at| ((row + at * (1 + row % 3)) % VOCABULARY) as u32);
    let first = ((step * 2 + micro_batch) * WORLD + rank) * ROWS;
    let values: Vec<u32> = (first..first + ROWS).flat_map(row).collect();
    Ok(Tensor::from_vec(values, (ROWS, TOKENS + 1), &Device::Cpu)?)
}

fn rates() -> MuonWithAdamWConfig {
    let mut rates = MuonWithAdamWConfig::default();
    rates.adamw.lr = 0.01;
    rates
}

fn config(accumulate: usize) -> Config {
    let MuonWithAdamWConfig { muon, adamw } = rates();
    Config {
        muon,
        adamw,
        accumulate: count(accumulate),
        bucket_size: count(100),
        ..Config::default()
    }
}

/// Initial and final weights by name, and the loss of the first micro-batch of each step.
struct Trained {
    names: Vec<String>,
    initial: Vec<Vec<f32>>,
    weights: Vec<Tensor>,
    losses: Vec<f32>,
}

fn through_store(comm: Loopback, config: Config) -> Result<Trained> {
    let (rank, accumulate) = (comm.rank().0, config.accumulate.get());
    let store = ParamStore::new(5, Roles::default());
    let net = Net::new(&store.var_builder(DType::F32, &Device::Cpu))?;
    let names: Vec<_> = store.names().into_iter().map(|(name, _)| name).collect();
    let tensors = names
        .iter()
        .map(|name| Ok(store.get(name)?))
        .collect::<Result<Vec<_>>>()?;
    let initial = tensors
        .iter()
        .map(|tensor| Ok(values(tensor)?))
        .collect::<Result<_>>()?;
    let mut optimizer = store.optimizer(Box::new(comm), config)?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        for micro_batch in 0..accumulate {
            let loss = net.loss(&tokens(step, micro_batch, rank)?)?;
            if micro_batch == 0 {
                losses.push(loss.to_scalar()?);
            }
            optimizer.backward(&loss)?;
        }
        optimizer.step()?;
    }
    optimizer.verify_replicas()?;
    optimizer.shutdown()?;
    Ok(Trained {
        names,
        initial,
        weights: tensors,
        losses,
    })
}

/// The same training on one device: all ranks' rows in one batch.
fn unsharded(start: &Trained, accumulate: usize) -> Result<Vec<Vec<f64>>> {
    let variables = VarMap::new();
    let net = Net::new(&VarBuilder::from_varmap(
        &variables,
        DType::F32,
        &Device::Cpu,
    ))?;
    let named = {
        let data = variables
            .data()
            .lock()
            .map_err(|_| anyhow::anyhow!("poisoned"))?;
        let named = start
            .names
            .iter()
            .zip(&start.initial)
            .map(|(name, initial)| {
                let variable = data
                    .get(name)
                    .with_context(|| format!("no variable `{name}`"))?
                    .clone();
                variable.set(&Tensor::from_slice(
                    initial,
                    variable.shape(),
                    &Device::Cpu,
                )?)?;
                Ok((name.clone(), variable))
            });
        named.collect::<Result<Vec<(String, Var)>>>()?
    };
    let mut optimizer = MuonWithAdamW::from_named(named.clone(), &Rules::default(), rates())?;
    for step in 0..STEPS {
        let places =
            (0..accumulate).flat_map(|micro_batch| (0..WORLD).map(move |rank| (micro_batch, rank)));
        let rows = places
            .map(|(micro_batch, rank)| tokens(step, micro_batch, rank))
            .collect::<Result<Vec<_>>>()?;
        optimizer.backward_step(&net.loss(&Tensor::cat(&rows, 0)?)?)?;
    }
    named
        .iter()
        .map(|(_, variable)| Ok(values64(variable)?))
        .collect()
}

#[test]
fn a_sharded_run_is_that_of_one_device() -> Result<()> {
    for accumulate in [1, 2] {
        for (placement, route, policy) in [
            (
                Placement::Striped,
                Route::ReduceScatter,
                Policy::AssignOwner,
            ),
            (
                Placement::Flat,
                Route::BucketAllReduce,
                Policy::CopyToOwners,
            ),
            (
                Placement::Whole,
                Route::ReduceToOwner,
                Policy::ExchangeUpdate,
            ),
        ] {
            let config = Config {
                placement,
                route,
                policy,
                ..config(accumulate)
            };
            let ranks = world(WORLD, |comm| through_store(comm, config.clone()))?;
            let sharded = &ranks[0];
            for ((name, found), (initial, expected)) in sharded
                .names
                .iter()
                .zip(&sharded.weights)
                .zip(sharded.initial.iter().zip(unsharded(sharded, accumulate)?))
            {
                let change = |after: &[f64]| -> Vec<f64> {
                    after
                        .iter()
                        .zip(initial)
                        .map(|(after, before)| after - f64::from(*before))
                        .collect()
                };
                let error = relative(&change(&values64(found)?), &change(&expected));
                ensure!(
                    error < 1e-2,
                    "{placement} {accumulate}: `{name}` has gone {error:.1e} astray"
                );
            }
            let (first, last) = (sharded.losses[0], sharded.losses[STEPS - 1]);
            ensure!(last < 0.9 * first, "the loss went from {first} to {last}");
        }
    }
    Ok(())
}

#[test]
fn overlap_changes_no_bit() -> Result<()> {
    for stage in Stage::ALL {
        let run = |overlap| -> Result<Vec<Vec<f32>>> {
            let config = Config {
                stage,
                overlap,
                ..config(2)
            };
            let ranks = world(WORLD, |comm| through_store(comm, config.clone()))?;
            ranks[0]
                .weights
                .iter()
                .map(|weight| Ok(values(weight)?))
                .collect()
        };
        ensure!(run(true)? == run(false)?, "stage {stage}");
    }
    Ok(())
}

/// Layers of one width.
fn layers(depth: usize) -> Vec<(String, Vec<usize>)> {
    let layer = |layer| {
        [
            (format!("{layer}.weight"), vec![WIDTH, WIDTH]),
            (format!("{layer}.bias"), vec![WIDTH]),
        ]
    };
    (0..depth).flat_map(layer).collect()
}

/// Buckets of one matrix or two vectors, so that a model of four layers fills as large ones as one of sixteen.
fn deep_config(stage: Stage) -> Config {
    Config {
        stage,
        bucket_size: count(2 * WIDTH),
        ..Config::default()
    }
}

/// What a rank holds of unreduced gradients when they are handed in, in plan order.
fn handed_in(depth: usize, stage: Stage) -> Result<(StepReport, usize)> {
    let mut ranks = world(2, |comm| -> Result<_> {
        let named = layers(depth)
            .into_iter()
            .map(|(name, shape)| Ok((name, Var::ones(shape, DType::F32, &Device::Cpu)?)))
            .collect::<Result<Vec<_>>>()?;
        let mut optimizer = ZeroOptimizer::from_named(
            named.clone(),
            &Roles::default(),
            Box::new(comm),
            deep_config(stage),
        )?;
        let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        for (_, variable) in &named {
            loss = (loss + variable.sqr()?.sum_all()?)?;
        }
        optimizer.hand_in(&loss.backward()?)?;
        let report = optimizer.step()?;
        let buckets = optimizer
            .plan()
            .predict(optimizer.rank(), &optimizer.terms())
            .memory
            .buckets;
        optimizer.shutdown()?;
        Ok((report, usize::try_from(buckets.0)?))
    })?;
    Ok(ranks.swap_remove(0))
}

#[test]
fn gradients_in_plan_order_are_held_a_bucket_at_a_time() -> Result<()> {
    let largest = WIDTH * WIDTH * size_of::<f32>();
    for stage in Stage::ALL {
        // From three layers on a bucket of each kind is open while one is in flight.
        let held = [4, 16].map(|depth| -> Result<_> {
            let (report, buckets) = handed_in(depth, stage)?;
            let peak = report.unreduced_peak;
            ensure!(
                peak <= buckets + largest,
                "{peak} bytes, buckets of {buckets}"
            );
            ensure!(
                peak >= 2 * largest,
                "{peak} bytes: a bucket was not counted"
            );
            ensure!(
                report.unreduced_excess == 0,
                "{} bytes over the bound",
                report.unreduced_excess
            );
            Ok((peak, buckets))
        });
        let [few, many] = held;
        let (few, many) = (few?, many?);
        ensure!(few == many, "{few:?} bytes of 4 layers, {many:?} of 16");
    }
    Ok(())
}

/// candle hands the gradients of a chain in from its end: no more is held of a deeper one.
#[test]
fn what_a_backward_pass_holds_does_not_grow_with_depth() -> Result<()> {
    let peak = |depth: usize, stage| -> Result<usize> {
        let mut ranks = world(2, |comm| -> Result<usize> {
            let store = ParamStore::new(5, Roles::default());
            let builder = store.var_builder(DType::F32, &Device::Cpu);
            let layers: Vec<_> = (0..depth)
                .map(|layer| linear(WIDTH, WIDTH, builder.pp(layer)))
                .collect::<candle_core::Result<_>>()?;
            let mut optimizer = store.optimizer(Box::new(comm), deep_config(stage))?;
            let mut x = Tensor::ones((3, WIDTH), DType::F32, &Device::Cpu)?;
            for layer in &layers {
                x = layer.forward(&x)?.tanh()?;
            }
            optimizer.backward(&x.sqr()?.mean_all()?)?;
            let report = optimizer.step()?;
            optimizer.shutdown()?;
            Ok(report.unreduced_peak)
        })?;
        Ok(ranks.swap_remove(0))
    };
    for stage in Stage::ALL {
        let (few, many) = (peak(4, stage)?, peak(16, stage)?);
        ensure!(
            few == many,
            "stage {stage}: {few} bytes of 4 layers, {many} of 16"
        );
    }
    Ok(())
}

#[test]
fn values_of_any_dtype_are_set() -> Result<()> {
    let store = ParamStore::new(1, Roles::default().frozen("counts"));
    let builder = store.var_builder(DType::BF16, &Device::Cpu);
    let weight = builder.get((2, 3), "w")?;
    for dtype in [DType::F64, DType::I64, DType::U8, DType::F16, DType::BF16] {
        let given = Tensor::new(&[[1f32, 2.0, 3.0], [4.0, 5.0, 6.0]], &Device::Cpu)?;
        store.set("w", &given.to_dtype(dtype)?)?;
        ensure!(
            values(&weight)? == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            "{dtype:?}"
        );
        // Strided, and a view of the weight itself.
        store.set(
            "w",
            &given
                .t()?
                .contiguous()?
                .t()?
                .affine(2.0, 0.0)?
                .to_dtype(dtype)?,
        )?;
        ensure!(
            values(&weight)? == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0],
            "{dtype:?}"
        );
        store.set("w", &store.get("w")?)?;
        ensure!(
            values(&weight)? == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0],
            "{dtype:?}"
        );
    }
    let counts = builder.get(2, "counts")?;
    store.set("counts", &Tensor::new(&[7u32, 9], &Device::Cpu)?)?;
    ensure!(values(&counts)? == [7.0, 9.0]);
    let nothing = builder.get((0, 3), "nothing")?;
    store.set("nothing", &Tensor::zeros((0, 3), DType::F64, &Device::Cpu)?)?;
    ensure!(nothing.elem_count() == 0);
    Ok(())
}
