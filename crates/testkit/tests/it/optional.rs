//! Parameters without gradients, and gradients that are zero.

use anyhow::{Result, ensure};
use candle_core::Tensor;
use polarshard_partition::{Placement, Policy, Stage};
use polarshard_testkit::compare::values;
use polarshard_testkit::model::{Draw, Model, StepGradients};
use polarshard_zero::Config;

use crate::support::{config, count, index, same_bits, sharded, trained, unsharded};

const WORLD: usize = 4;

struct Fixture {
    model: Model,
    initial: Vec<(String, Tensor)>,
    names: Vec<(String, Tensor)>,
    steps: Vec<StepGradients>,
}

fn fixture() -> Result<Fixture> {
    let model = Model::everything();
    let initial = model.initial(6)?;
    let names = trained(&model, &initial);
    let steps = (0..3)
        .map(|step| Ok(model.gradients(Draw::Integers, 6, step, 1, WORLD)?))
        .collect::<Result<_>>()?;
    Ok(Fixture {
        model,
        initial,
        names,
        steps,
    })
}

impl Fixture {
    /// The weights after each step, the same bits as of the unsharded run under every placement and policy.
    fn run(&self) -> Result<Vec<Vec<Tensor>>> {
        let mut after = Vec::new();
        for (index, placement) in Placement::ALL.into_iter().enumerate() {
            for policy in Policy::ALL {
                let stage = Stage::ALL[index % 2];
                let config = Config {
                    placement,
                    policy,
                    stage,
                    bucket_size: count(60),
                    ..config(&self.model)
                };
                let seen = sharded(WORLD, &self.model, &self.initial, &config, &self.steps)?;
                let expected = unsharded(&self.names, &config, &self.steps)?;
                same_bits(
                    &self.names,
                    &seen[0].weights[self.steps.len() - 1],
                    &expected,
                )?;
                after.clone_from(&seen[0].weights);
            }
        }
        Ok(after)
    }

    /// Replaces a parameter's gradients in a step, by rank.
    fn replace(
        &mut self,
        step: usize,
        name: &str,
        change: impl Fn(usize, &Tensor) -> Result<Option<Tensor>>,
    ) -> Result<()> {
        let at = index(&self.model, name)?;
        for (rank, micro_batch) in self.steps[step][0].iter_mut().enumerate() {
            let shape = self.names[at].1.dims();
            let before = match &micro_batch.gradients[at] {
                Some(gradient) => gradient.clone(),
                None => Tensor::ones(shape, candle_core::DType::F32, &candle_core::Device::Cpu)?,
            };
            micro_batch.gradients[at] = change(rank, &before)?;
        }
        Ok(())
    }

    fn values(&self, weights: &[Tensor], name: &str) -> Result<Vec<f32>> {
        Ok(values(&weights[index(&self.model, name)?])?)
    }

    fn initial(&self, name: &str) -> Result<Vec<f32>> {
        Ok(values(&self.names[index(&self.model, name)?].1)?)
    }
}

/// Neither decay nor moments: when a gradient comes at last, it is the first.
#[test]
fn absent_everywhere_nothing_changes() -> Result<()> {
    let mut fixture = fixture()?;
    for name in ["unused.weight", "unused.bias"] {
        fixture.replace(2, name, |_, ones| Ok(Some(ones.clone())))?;
    }
    let after = fixture.run()?;
    for name in ["unused.weight", "unused.bias"] {
        let initial = fixture.initial(name)?;
        ensure!(
            fixture.values(&after[1], name)? == initial,
            "`{name}` changed without a gradient"
        );
        ensure!(
            fixture.values(&after[2], name)? != initial,
            "`{name}` did not change with one"
        );
    }
    // The first AdamW step is lr in the gradient's direction, however late it comes.
    let (before, after) = (
        fixture.initial("unused.bias")?,
        fixture.values(&after[2], "unused.bias")?,
    );
    let Config { adamw, .. } = config(&fixture.model);
    for (before, after) in before.iter().zip(after) {
        let expected = f64::from(*before) * (1.0 - adamw.lr * adamw.weight_decay) - adamw.lr;
        ensure!(
            (f64::from(after) - expected).abs() < 1e-6,
            "{after} instead of {expected}"
        );
    }
    Ok(())
}

/// The mean is over all ranks even so: a gradient on one rank alone counts a quarter.
#[test]
fn absent_on_some_ranks_it_is_zero_there() -> Result<()> {
    let mut fixture = fixture()?;
    for name in ["sometimes.weight", "sometimes.bias"] {
        fixture.replace(0, name, |rank, gradient| {
            Ok((rank == 2).then(|| gradient.clone()))
        })?;
    }
    let optional = fixture.run()?;
    for name in ["sometimes.weight", "sometimes.bias"] {
        fixture.replace(0, name, |rank, gradient| {
            Ok(Some(if rank == 2 {
                gradient.clone()
            } else {
                gradient.zeros_like()?
            }))
        })?;
    }
    let zeros = fixture.run()?;
    same_bits(&fixture.names, &optional[2], &zeros[2])
}

/// What is orthogonalized has no scale: momentum alone would be blown up to a full step.
#[test]
fn a_zero_gradient_stops_muon_and_not_adamw() -> Result<()> {
    let mut fixture = fixture()?;
    for name in ["blocks.1.wide.weight", "blocks.0.norm.weight"] {
        fixture.replace(1, name, |_, gradient| Ok(Some(gradient.zeros_like()?)))?;
    }
    let after = fixture.run()?;
    let changed = |name| {
        Ok::<_, anyhow::Error>(fixture.values(&after[1], name)? != fixture.values(&after[0], name)?)
    };
    ensure!(
        !changed("blocks.1.wide.weight")?,
        "Muon made a step of its momentum alone"
    );
    ensure!(changed("blocks.0.norm.weight")?, "AdamW made no step");
    Ok(())
}

#[test]
fn gradients_that_cancel_are_zero() -> Result<()> {
    let mut fixture = fixture()?;
    fixture.replace(1, "blocks.1.wide.weight", |rank, gradient| {
        let sign = if rank % 2 == 0 { 1.0 } else { -1.0 };
        Ok(Some(gradient.ones_like()?.affine(sign, 0.0)?))
    })?;
    let after = fixture.run()?;
    let name = "blocks.1.wide.weight";
    ensure!(
        fixture.values(&after[1], name)? == fixture.values(&after[0], name)?,
        "a zero mean made a step"
    );
    Ok(())
}

/// One element on one rank is enough for all owners, whose slices of it are zero.
#[test]
fn a_gradient_that_is_zero_on_most_owners_is_none_of_these() -> Result<()> {
    let mut fixture = fixture()?;
    fixture.replace(1, "blocks.1.wide.weight", |rank, gradient| {
        let mut values = vec![0f32; gradient.elem_count()];
        values[7] = if rank == 3 { 1.0 } else { 0.0 };
        Ok(Some(Tensor::from_vec(
            values,
            gradient.shape(),
            gradient.device(),
        )?))
    })?;
    let after = fixture.run()?;
    let name = "blocks.1.wide.weight";
    let (before, now) = (
        fixture.values(&after[0], name)?,
        fixture.values(&after[1], name)?,
    );
    let moved = before.iter().zip(&now).filter(|(a, b)| a != b).count();
    ensure!(moved == before.len(), "{moved} elements moved");
    Ok(())
}

#[test]
fn each_matrix_of_a_stack_is_zero_by_itself() -> Result<()> {
    let mut fixture = fixture()?;
    fixture.replace(1, "blocks.1.experts", |_, gradient| {
        let (first, last) = (gradient.narrow(0, 0, 1)?, gradient.narrow(0, 2, 1)?);
        Ok(Some(Tensor::cat(
            &[&first, &first.zeros_like()?, &last],
            0,
        )?))
    })?;
    let after = fixture.run()?;
    let (before, now) = (
        fixture.values(&after[0], "blocks.1.experts")?,
        fixture.values(&after[1], "blocks.1.experts")?,
    );
    let changed: Vec<_> = before
        .chunks(30)
        .zip(now.chunks(30))
        .map(|(before, now)| before != now)
        .collect();
    ensure!(changed == [true, false, true], "{changed:?}");
    Ok(())
}
