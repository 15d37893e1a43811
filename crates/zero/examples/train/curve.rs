//! Losses, as a run goes on.

use std::ops::Range;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::model::Gpt;
use crate::text::Batch;

/// Held-out points between the first and the last.
const POINTS: usize = 10;

/// The losses of a run, in nats a byte.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Curve {
    /// The steps done before.
    #[serde(default)]
    pub(crate) start: usize,
    /// Of each step's batches.
    pub(crate) training: Vec<f64>,
    /// Of the held-out text, now and then.
    pub(crate) held_out: Vec<HeldOut>,
}

/// The loss of held-out sequences.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct HeldOut {
    /// Steps done.
    pub(crate) step: usize,
    /// The mean over the sequences.
    pub(crate) loss: f64,
    sequences: usize,
}

impl Curve {
    /// The curve of all ranks, which trained side by side.
    pub(crate) fn mean(ranks: &[&Self]) -> Self {
        let steps = ranks
            .iter()
            .map(|curve| curve.training.len())
            .min()
            .unwrap_or(0);
        let points = ranks
            .iter()
            .map(|curve| curve.held_out.len())
            .min()
            .unwrap_or(0);
        let step = |step| {
            ranks
                .iter()
                .map(|curve: &&Self| curve.training[step])
                .sum::<f64>()
                / ranks.len() as f64
        };
        let point = |point| HeldOut::mean(ranks.iter().map(|curve| curve.held_out[point]));
        Self {
            start: ranks.first().map_or(0, |curve| curve.start),
            training: (0..steps).map(step).collect(),
            held_out: (0..points).map(point).collect(),
        }
    }

    /// Adds the held-out loss when `step` steps are done, if it is due: at the start, now and then, and at the end.
    pub(crate) fn evaluate(
        &mut self,
        model: &Gpt,
        batch: Option<&Batch>,
        step: usize,
        steps: &Range<usize>,
    ) -> Result<()> {
        let since = step - steps.start;
        if step == steps.end || since.is_multiple_of(steps.len().div_ceil(POINTS)) {
            self.held_out.push(HeldOut::of(model, batch, step)?);
        }
        Ok(())
    }

    /// The first and the last held-out loss.
    pub(crate) fn ends(&self) -> Option<(f64, f64)> {
        Some((self.held_out.first()?.loss, self.held_out.last()?.loss))
    }
}

impl HeldOut {
    /// The loss of a rank's held-out sequences, after `step` steps.
    fn of(model: &Gpt, batch: Option<&Batch>, step: usize) -> Result<Self> {
        let Some(batch) = batch else {
            return Ok(Self {
                step,
                loss: 0.0,
                sequences: 0,
            });
        };
        let loss = model
            .loss(&batch.inputs, &batch.targets)?
            .to_scalar::<f32>()?;
        ensure!(
            loss.is_finite(),
            "the held-out loss after step {step} is {loss}"
        );
        Ok(Self {
            step,
            loss: f64::from(loss),
            sequences: batch.len(),
        })
    }

    fn mean(points: impl Iterator<Item = Self>) -> Self {
        points.fold(
            Self {
                step: 0,
                loss: 0.0,
                sequences: 0,
            },
            |all, point| {
                let sequences = all.sequences + point.sequences;
                let sum = all.loss * all.sequences as f64 + point.loss * point.sequences as f64;
                Self {
                    step: point.step,
                    loss: sum / sequences.max(1) as f64,
                    sequences,
                }
            },
        )
    }
}
