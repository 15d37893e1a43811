//! The update of a rank's shard: momentum, whole matrices, their orthogonalization, and the weights.

use candle_core::{DType, Tensor};
use polarshard_muon::{AdamWConfig, MuonConfig, adamw_update, apply_update, momentum_update};
use polarshard_partition::{ExchangeKind, ParamId};

use super::decision::Verdict;
use super::exchange::Swap;
use super::fragments::Fragments;
use super::owned::OwnedSlice;
use super::shard::{Shard, SliceState};
use crate::channel::Channel;
use crate::config::is_usable;
use crate::error::Result;
use crate::flat;
use crate::gradients::Reduced;

/// What a gradient slice is multiplied with, one after the other.
#[derive(Debug, Clone, Copy)]
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
        let swap = self.swap(channel, ExchangeKind::Updates, DType::F32, &updates)?;
        // While slices of updates travel.
        self.adamw(reduced, &factors, verdict, adamw)?;
        if let Some(swap) = swap {
            swap.land(&mut updates)?;
        }
        let (results, orthogonalized) = self.orthogonalize(channel, &updates, verdict, muon)?;
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
        let mut updates = Fragments::new(self.device());
        for (slice, state) in self.owned.iter().zip(&self.state) {
            let SliceState::Momentum(momentum) = state else {
                continue;
            };
            if !skipped(verdict, slice) {
                let gradient = reduced.slice(slice)?;
                let gradient = mean(&gradient, factors(slice.param))?;
                let update = momentum_update(momentum, &gradient, muon.momentum, muon.nesterov)?;
                updates.put(slice.param, slice.span.start, update);
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
        let mut wholes = Fragments::new(self.device());
        for slice in self
            .owned
            .iter()
            .filter(|slice| self.full_momentum.contains_key(&slice.param))
        {
            wholes.put(slice.param, slice.span.start, reduced.slice(slice)?);
        }
        if let Some(swap) = self.swap(channel, ExchangeKind::Gradients, DType::F32, &wholes)? {
            swap.land(&mut wholes)?;
        }
        Ok(wholes)
    }

    /// Orthogonalizes the matrices that this rank computes, and brings results to their owners.
    fn orthogonalize(
        &self,
        channel: &mut Channel,
        updates: &Fragments,
        verdict: &Verdict,
        muon: &MuonConfig,
    ) -> Result<(Fragments, usize)> {
        let params = self.plan().params();
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
        let mut results = Fragments::new(self.device());
        for ((param, matrix), result) in jobs
            .iter()
            .zip(muon.newton_schulz.orthogonalize_all(&matrices)?)
        {
            results.put(*param, matrix.span.start, result.flatten_all()?);
        }
        let dtype = muon.newton_schulz.iterate.on(self.device());
        if let Some(swap) = self.swap(channel, ExchangeKind::Results, dtype, &results)? {
            swap.land(&mut results)?;
        }
        Ok((results, jobs.len()))
    }

    /// Starts a swap, if the plan has one of its kind.
    fn swap(
        &self,
        channel: &mut Channel,
        kind: ExchangeKind,
        dtype: DType,
        fragments: &Fragments,
    ) -> Result<Option<Swap>> {
        if !self.plan().exchange_kinds().contains(&kind) {
            return Ok(None);
        }
        let plan = self.plan().exchange(kind, channel.rank());
        Swap::start(channel, plan, dtype, self.device(), fragments).map(Some)
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
        for (slice, state) in self.owned.iter().zip(&self.state) {
            let SliceState::Moments { first, second } = state else {
                continue;
            };
            if skipped(verdict, slice) {
                continue;
            }
            let gradient = reduced.slice(slice)?;
            let gradient = mean(&gradient, factors(slice.param))?;
            let weights = flat::view(&self.masters[slice.block.index()], slice.in_shard())?;
            adamw_update(
                &weights,
                first,
                second,
                &gradient,
                self.adamw_steps[slice.param.index()],
                config,
            )?;
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
