//! What an error in the middle of a bucket leaves behind.

use std::num::NonZeroUsize;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use polarshard_comm::Loopback;
use polarshard_partition::{Span, WorldSize};

use super::*;
use crate::config::Config;

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

/// Hands in gradients in plan order, until one is refused.
fn hand_in(intake: &mut Intake) -> Result<()> {
    let gradient = intake.weights[0].values().ones_like()?;
    let mut params = intake.plan.clone().params().plan_order();
    params.try_for_each(|param| intake.accept(param, &gradient))
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
