//! What is held of gradients, and what an error in the middle of a bucket leaves behind.

use std::num::NonZeroUsize;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use polarshard_comm::{Loopback, ranks};
use polarshard_partition::{Placement, Route, Span, WorldSize};

use super::*;
use crate::config::Config;
use crate::setup::terms;
use crate::step::OwnedSlice;

/// Of two vectors so long, each a bucket with an element of padding, on one rank.
fn intake(len: usize) -> Result<Intake> {
    let comm = Loopback::world(WorldSize::new(1)?, Duration::from_secs(10)).swap_remove(0);
    let vector = |name: &str| {
        let values = Tensor::ones(len, DType::F32, &Device::Cpu)?;
        Weight::new(name.to_owned(), &values, false)
    };
    let weights = Arc::new(vec![vector("a")?, vector("b")?]);
    let config = Config {
        bucket_size: NonZeroUsize::MIN,
        ..Config::default()
    };
    let mut channel = Channel::new(Box::new(comm));
    let setup = Setup::new(&mut channel, &weights, config)?;
    Intake::new(channel, &setup, weights)
}

/// Hands in gradients of ones in plan order, until one is refused.
fn hand_in(intake: &mut Intake) -> Result<()> {
    let mut params = intake.plan.params().plan_order();
    params.try_for_each(|param| {
        let weight = &intake.weights[param.index()];
        let gradient = weight.values().ones_like()?.reshape(&*weight.shape)?;
        intake.accept(param, &gradient)
    })
}

/// Some contiguous and some not, all of one bucket a flat space, with a refusal among them: what was lent and not yet
/// written is forgotten with the micro-batch.
#[test]
fn lent_gradients_end_as_those_that_are_handed_over() -> Result<()> {
    let summed = |lend: bool, refuse: bool| -> Result<Vec<Vec<f32>>> {
        let comm = Loopback::world(WorldSize::new(1)?, Duration::from_secs(10)).swap_remove(0);
        let weights = Arc::new(mixed()?);
        let mut channel = Channel::new(Box::new(comm));
        let setup = Setup::new(&mut channel, &weights, Config::default())?;
        let mut intake = Intake::new(channel, &setup, Arc::clone(&weights))?;
        let params: Vec<_> = setup.plan.params().plan_order().collect();
        let micro_batches: &[bool] = if refuse { &[true, false] } else { &[false] };
        for &refused in micro_batches {
            intake.begin(1.0)?;
            for (turn, param) in params.iter().enumerate() {
                let weight = &weights[param.index()];
                let elems = weight.elems() as f32;
                let values = Tensor::arange(0.0, elems, &Device::Cpu)?.to_dtype(weight.dtype)?;
                let gradient = match weight.shape[..] {
                    [rows, cols] if turn % 2 == 0 => values.reshape((cols, rows))?.t()?,
                    _ => values.reshape(&*weight.shape)?,
                };
                if refused && turn == params.len() / 2 {
                    let twice = intake.accept(params[0], &gradient);
                    assert!(twice.is_err());
                }
                if lend {
                    intake.accept_lent(*param, &gradient)?;
                } else {
                    intake.accept(*param, &gradient)?;
                }
            }
            let ended = intake.end();
            assert_eq!(ended.is_err(), refused, "{ended:?}");
            if refused {
                intake.clear();
            }
        }
        assert!(intake.arriving.is_empty());
        let sums = setup.plan.layout().rank_slices(Rank(0)).map(|slice| {
            let sum = intake.reduced.slice(&OwnedSlice {
                param: slice.param,
                matrix: None,
                span: slice.span,
                block: slice.block,
                at: slice.at,
            })?;
            Ok(sum.to_dtype(DType::F32)?.to_vec1()?)
        });
        sums.collect()
    };
    let expected = summed(false, false)?;
    for (lend, refuse) in [(false, true), (true, false), (true, true)] {
        assert_eq!(
            summed(lend, refuse)?,
            expected,
            "lent {lend}, refused {refuse}"
        );
    }
    Ok(())
}

/// The micro-batch ends with `refused`, all its buckets are reduced, and nothing is left behind.
fn ends(intake: &mut Intake, refused: &Error, issued_before: u64) -> Result<()> {
    let ended = intake.end().expect_err("a gradient was refused");
    assert_eq!(ended.to_string(), refused.to_string());
    assert!(!ended.is_fatal(), "{ended:?}");
    let buckets = intake.lanes.len() as u64;
    assert_eq!(intake.channel.issued() - issued_before, buckets);
    intake.clear();
    assert_eq!(intake.held.peak(), 0, "bytes held after the micro-batch");
    // Each bucket is filled while the one before it is reduced.
    assert_eq!(intake.buffers.free_bytes(), 2 * 4 * size_of::<f32>());
    intake.begin(1.0)?;
    hand_in(intake)?;
    intake.end()
}

#[test]
fn padding_that_cannot_be_zeroed_costs_the_micro_batch_alone() -> Result<()> {
    for bucket in 0..2 {
        let mut intake = intake(3)?;
        let before = intake.channel.issued();
        intake.begin(1.0)?;
        let beyond = vec![Span::new(3, 4), Span::new(4, 5)];
        let padding = std::mem::replace(&mut intake.lanes[bucket].padding, beyond);
        let refused = hand_in(&mut intake).expect_err("the span is beyond the buffer");
        intake.lanes[bucket].padding = padding;
        ends(&mut intake, &refused, before)?;
    }
    Ok(())
}

#[test]
fn a_sum_that_cannot_be_kept_costs_the_micro_batch_alone() -> Result<()> {
    let (mut intake, mut longer) = (intake(3)?, intake(9)?);
    let before = intake.channel.issued();
    intake.begin(1.0)?;
    std::mem::swap(&mut intake.reduced, &mut longer.reduced);
    let refused = hand_in(&mut intake).expect_err("the buffer is too short for it");
    std::mem::swap(&mut intake.reduced, &mut longer.reduced);
    ends(&mut intake, &refused, before)
}

/// Matrices and vectors of two dtypes, some of which share a bucket of 40 elements.
fn mixed() -> Result<Vec<Weight>> {
    let shapes: [(&[usize], _); 9] = [
        (&[7, 5], DType::BF16),
        (&[5], DType::F32),
        (&[3, 5], DType::BF16),
        (&[30], DType::F32),
        (&[3, 3], DType::BF16),
        (&[9], DType::BF16),
        (&[6, 6], DType::F32),
        (&[7], DType::F32),
        (&[4, 4], DType::BF16),
    ];
    let weight = |(index, (shape, dtype)): (usize, (&[usize], _))| {
        let values = Tensor::zeros(shape, dtype, &Device::Cpu)?;
        Weight::new(index.to_string(), &values, false)
    };
    shapes.into_iter().enumerate().map(weight).collect()
}

#[test]
fn what_is_held_of_gradients_was_predicted() -> Result<()> {
    for placement in Placement::ALL {
        for (route, stage, overlap, accumulate) in [
            (Route::ReduceScatter, Stage::Two, true, 2),
            (Route::ReduceScatter, Stage::Two, true, 1),
            (Route::ReduceScatter, Stage::One, false, 2),
            (Route::BucketAllReduce, Stage::Two, false, 2),
            (Route::AllReduce, Stage::One, true, 2),
        ] {
            let config = Config {
                placement,
                route,
                stage,
                overlap,
                accumulate: NonZeroUsize::new(accumulate).expect("not zero"),
                bucket_size: NonZeroUsize::new(40).expect("forty"),
                ..Config::default()
            };
            let world = Loopback::world(WorldSize::new(2)?, Duration::from_secs(10));
            let held = ranks::run(world, |comm| {
                let weights = Arc::new(mixed()?);
                let mut channel = Channel::new(Box::new(comm));
                let setup = Setup::new(&mut channel, &weights, config.clone())?;
                let (plan, rank, world) = (&setup.plan, channel.rank(), channel.world());
                let terms = terms(plan.params(), world, &setup.config, &setup.device);
                let predicted = plan.predict(rank, &terms).memory;
                let mut intake = Intake::new(channel, &setup, weights)?;
                for _ in 0..accumulate {
                    intake.begin(1.0)?;
                    hand_in(&mut intake)?;
                    intake.end()?;
                }
                let locals = intake.locals.iter().flatten().map(Tensor::elem_count);
                let locals = locals.sum::<usize>() * size_of::<f32>();
                let held = [intake.buffers.free_bytes(), locals, intake.reduced.bytes()];
                let held = held.map(|bytes| bytes as u64);
                let predicted = [
                    predicted.buckets.0,
                    predicted.unreduced_gradients.0,
                    predicted.reduced_gradients.0,
                ];
                Ok::<_, Error>((held, predicted))
            });
            for outcome in held {
                let (held, predicted) = outcome.unwrap();
                assert_eq!(
                    held, predicted,
                    "{placement} {route} {stage} overlap {overlap}"
                );
            }
        }
    }
    Ok(())
}
