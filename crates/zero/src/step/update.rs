//! The update of a rank's shard: momentum, whole matrices, their orthogonalization, and the weights.

use candle_core::{DType, Tensor};
use polarshard_muon::{AdamWConfig, MuonConfig, adamw_update, apply_update, momentum_update};
use polarshard_partition::{ExchangeKind, ParamId};

use super::decision::Verdict;
use super::exchange::exchange;
use super::fragments::Fragments;
use super::owned::OwnedSlice;
use super::shard::Shard;
use crate::channel::Channel;
use crate::config::is_usable;
use crate::error::Result;
use crate::flat;
use crate::gradients::Reduced;

/// What a gradient slice is multiplied with, one after the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Factors {
    /// To the mean over ranks, micro-batches and loss scale.
    pub(crate) mean: f64,
    /// To the clipped mean.
    pub(crate) clip: f64,
}

impl Factors {
    /// Whether both can be multiplied with in f32.
    pub(crate) fn are_usable(&self) -> bool {
        is_usable(self.mean) && is_usable(self.clip)
    }
}

impl Shard {
    /// Updates the masters from the reduced gradients. Returns how many matrices this rank orthogonalized.
    pub(crate) fn update(
        &mut self,
        channel: &mut Channel,
        reduced: &Reduced,
        factors: impl Fn(ParamId) -> Factors,
        verdict: &Verdict,
        muon: &MuonConfig,
        adamw: &AdamWConfig,
    ) -> Result<usize> {
        let mut updates = self.momentum(channel, reduced, &factors, verdict, muon)?;
        let (results, orthogonalized) = self.orthogonalize(channel, &mut updates, verdict, muon)?;
        for slice in &self.owned {
            let Some(matrix) = slice.matrix else { continue };
            if skipped(verdict, slice) {
                continue;
            }
            let (_, matrix) = self.plan().params().matrix(matrix);
            let weights = flat::view(&self.masters[slice.block.index()], slice.in_shard())?;
            let result = results.read(slice.param, slice.span)?;
            let scale = muon.scale.factor(matrix.rows, matrix.cols);
            apply_update(&weights, &result, scale, muon.lr, muon.weight_decay)?;
        }
        self.adamw(reduced, &factors, verdict, adamw)?;
        Ok(orthogonalized)
    }

    /// Momentum on the slices of this rank, or on whole parameters: the updates before orthogonalization.
    fn momentum(
        &mut self,
        channel: &mut Channel,
        reduced: &Reduced,
        factors: &impl Fn(ParamId) -> Factors,
        verdict: &Verdict,
        muon: &MuonConfig,
    ) -> Result<Fragments> {
        let wholes = self.whole_gradients(channel, reduced)?;
        let mut updates = Fragments::new(DType::F32, self.device());
        let (stretches, momentum) = &self.muon;
        let treatment = |slice: &OwnedSlice| {
            let sum = reduced.place(slice);
            (!skipped(verdict, slice)).then(|| (factors(slice.param), sum))
        };
        for ((factors, _), run) in stretches.iter().flat_map(|all| all.runs(treatment)) {
            let gradient = mean(&reduced.run(&run)?, factors)?;
            let momentum = flat::view(momentum, run.in_state)?;
            let update = momentum_update(&momentum, &gradient, muon.momentum, muon.nesterov)?;
            for (slice, part) in run.slices.iter().zip(run.parts(&update)?) {
                updates.put(slice.param, slice.span.start, part);
            }
        }
        for (param, momentum) in &self.full_momentum {
            for id in self.plan().params().matrices_of(*param) {
                let span = self.plan().params().matrix(id).1.span;
                if verdict.zero[id.index()] || verdict.absent[param.index()] {
                    continue;
                }
                let gradient = match reduced.whole(*param) {
                    Some(whole) => flat::view(whole, span)?,
                    None => wholes.read(*param, span)?,
                };
                let gradient = mean(&gradient, factors(*param))?;
                let momentum = flat::view(momentum, span)?;
                updates.put(
                    *param,
                    span.start,
                    momentum_update(&momentum, &gradient, muon.momentum, muon.nesterov)?,
                );
            }
        }
        Ok(updates)
    }

    /// Under `CopyToOwners` with a route that left slices only, the owners of a split parameter swap them here.
    fn whole_gradients(&self, channel: &mut Channel, reduced: &Reduced) -> Result<Fragments> {
        let mut wholes = Fragments::new(DType::F32, self.device());
        if self.exchanges.contains_key(&ExchangeKind::Gradients) {
            for slice in self
                .owned
                .iter()
                .filter(|slice| self.full_momentum.contains_key(&slice.param))
            {
                let gradient = reduced.slice(slice)?;
                wholes.put(slice.param, slice.span.start, gradient);
            }
            self.swap(channel, ExchangeKind::Gradients, &mut wholes)?;
        }
        Ok(wholes)
    }

    /// Gathers the matrices that this rank computes, orthogonalizes them, and brings results to their owners.
    fn orthogonalize(
        &self,
        channel: &mut Channel,
        updates: &mut Fragments,
        verdict: &Verdict,
        muon: &MuonConfig,
    ) -> Result<(Fragments, usize)> {
        let params = self.plan().params();
        self.swap(channel, ExchangeKind::Updates, updates)?;
        let jobs: Vec<_> = (self.plan().jobs(channel.rank()).iter())
            .map(|id| (*id, params.matrix(*id)))
            .filter(|(id, (param, _))| !verdict.zero[id.index()] && !verdict.absent[param.index()])
            .map(|(_, job)| job)
            .collect();
        let matrices = jobs
            .iter()
            .map(|(param, matrix)| {
                Ok(updates
                    .read(*param, matrix.span)?
                    .reshape((matrix.rows, matrix.cols))?)
            })
            .collect::<Result<Vec<_>>>()?;
        let iteration = &muon.newton_schulz;
        let orthogonal = iteration.orthogonalize_all_as_iterated(&matrices)?;
        let mut results = Fragments::new(iteration.iterate.on(self.device()), self.device());
        for ((param, matrix), result) in jobs.iter().zip(orthogonal) {
            results.put(*param, matrix.span.start, result.flatten_all()?);
        }
        self.swap(channel, ExchangeKind::Results, &mut results)?;
        Ok((results, jobs.len()))
    }

    /// Does an exchange, if it is one of the plan's.
    fn swap(
        &self,
        channel: &mut Channel,
        kind: ExchangeKind,
        fragments: &mut Fragments,
    ) -> Result<()> {
        match self.exchanges.get(&kind) {
            Some(plan) => exchange(channel, plan, fragments),
            None => Ok(()),
        }
    }

    fn adamw(
        &mut self,
        reduced: &Reduced,
        factors: &impl Fn(ParamId) -> Factors,
        verdict: &Verdict,
        config: &AdamWConfig,
    ) -> Result<()> {
        for (param, absent) in verdict.absent.iter().enumerate() {
            self.adamw_steps[param] += u64::from(!absent);
        }
        let (stretches, [first, second]) = &self.adamw;
        let treatment = |slice: &OwnedSlice| {
            let (sum, step) = (reduced.place(slice), self.adamw_steps[slice.param.index()]);
            (!skipped(verdict, slice)).then(|| (factors(slice.param), step, sum))
        };
        for ((factors, step, _), run) in stretches.iter().flat_map(|all| all.runs(treatment)) {
            let gradient = mean(&reduced.run(&run)?, factors)?;
            let weights = flat::view(&self.masters[run.block.index()], run.in_shard)?;
            let (first, second) = (
                flat::view(first, run.in_state)?,
                flat::view(second, run.in_state)?,
            );
            adamw_update(&weights, &first, &second, &gradient, step, config)?;
        }
        Ok(())
    }
}

/// Whether nothing of a slice changes: no gradient came, or its whole matrix has a zero gradient.
fn skipped(verdict: &Verdict, slice: &OwnedSlice) -> bool {
    verdict.absent[slice.param.index()]
        || slice
            .matrix
            .is_some_and(|matrix| verdict.zero[matrix.index()])
}

fn mean(gradient: &Tensor, factors: Factors) -> Result<Tensor> {
    Ok(flat::scaled(
        &flat::scaled(gradient, factors.mean)?,
        factors.clip,
    )?)
}
