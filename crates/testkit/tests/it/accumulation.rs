//! Several micro-batches a step.

use anyhow::{Context, Result};
use polarshard_partition::{Class, Stage};
use polarshard_testkit::model::{Draw, Model, StepGradients};
use polarshard_zero::Config;

use crate::support::{config, count, index, same_bits, sharded, trained, unsharded};

const WORLD: usize = 3;

fn with(model: &Model, stage: Stage, accumulate: usize, overlap: bool) -> Config {
    Config {
        stage,
        overlap,
        accumulate: count(accumulate),
        bucket_size: count(60),
        ..config(model)
    }
}

#[test]
fn two_micro_batches_are_one_with_their_mean() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(1)?;
    let names = trained(&model, &initial);
    let two = (0..2)
        .map(|step| Ok(model.gradients(Draw::Integers, 1, step, 2, WORLD)?))
        .collect::<Result<Vec<_>>>()?;
    let mut one = two.clone();
    for step in &mut one {
        let second = step.pop().context("a second micro-batch")?;
        for (first, second) in step[0].iter_mut().zip(second) {
            for (first, second) in first.gradients.iter_mut().zip(second.gradients) {
                if let (Some(first), Some(second)) = (first, second) {
                    *first = ((&*first + second)? * 0.5)?;
                }
            }
        }
    }
    let expected = sharded(
        WORLD,
        &model,
        &initial,
        &with(&model, Stage::Two, 1, true),
        &one,
    )?;
    for stage in Stage::ALL {
        let found = sharded(WORLD, &model, &initial, &with(&model, stage, 2, true), &two)?;
        same_bits(&names, &found[0].weights[1], &expected[0].weights[1])?;
    }
    Ok(())
}

#[test]
fn stage_1_reduces_once_a_step_and_stage_2_every_micro_batch() -> Result<()> {
    let model = Model::everything();
    let steps = [model.gradients(Draw::Integers, 1, 0, 3, WORLD)?];
    for (stage, times) in [(Stage::One, 1), (Stage::Two, 3)] {
        let seen = sharded(
            WORLD,
            &model,
            &model.initial(1)?,
            &with(&model, stage, 3, false),
            &steps,
        )?;
        let ops: usize = seen[0]
            .plan
            .buckets()
            .iter()
            .map(|bucket| bucket.ops.len())
            .sum();
        let found = seen[0].calls[0]
            .iter()
            .filter(|call| call.class == Class::Gradient)
            .count();
        assert_eq!(found, times * ops, "stage {stage}");
    }
    Ok(())
}

#[test]
fn overlap_changes_no_bit() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(1)?;
    let names = trained(&model, &initial);
    let steps = (0..3)
        .map(|step| Ok(model.gradients(Draw::Gaussian, 1, step, 3, WORLD)?))
        .collect::<Result<Vec<_>>>()?;
    for stage in Stage::ALL {
        let run = |overlap| {
            sharded(
                WORLD,
                &model,
                &initial,
                &with(&model, stage, 3, overlap),
                &steps,
            )
        };
        let (on, off) = (run(true)?, run(false)?);
        same_bits(&names, &on[0].weights[2], &off[0].weights[2])?;
    }
    Ok(())
}

/// It is zero in the others: the mean is over all of them.
#[test]
fn a_gradient_in_one_micro_batch_is_enough() -> Result<()> {
    let model = Model::everything();
    let initial = model.initial(1)?;
    let names = trained(&model, &initial);
    let mut step: StepGradients = model.gradients(Draw::Integers, 1, 0, 3, WORLD)?;
    for name in ["blocks.0.up.weight", "blocks.0.norm.weight"] {
        for micro_batch in step[..2].iter_mut().flatten() {
            micro_batch.gradients[index(&model, name)?] = None;
        }
    }
    for stage in Stage::ALL {
        let config = with(&model, stage, 3, true);
        let found = sharded(
            WORLD,
            &model,
            &initial,
            &config,
            std::slice::from_ref(&step),
        )?;
        let expected = unsharded(&names, &config, std::slice::from_ref(&step))?;
        same_bits(&names, &found[0].weights[0], &expected)?;
    }
    Ok(())
}
