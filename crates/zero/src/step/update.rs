//! The update of a rank's shard: momentum, whole matrices, their orthogonalization, and the masters.

use candle_core::{DType, Tensor};
use polarshard_comm::Pending;
use polarshard_muon::{
    AdamWConfig, Gradient, MuonConfig, Update, adamw_update, apply_updates, momentum_update,
};
use polarshard_partition::{BlockId, ExchangeKind, Matrix, ParamId, Rank};

use super::decision::Verdict;
use super::fragments::Fragments;
use super::owned::OwnedSlice;
use super::shard::{AdamWState, MuonState, Shard};
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
    fn of(self, values: &Tensor) -> Gradient<'_> {
        let Self { mean, clip } = self;
        Gradient { values, mean, clip }
    }

    /// Whether both can be multiplied with in f32.
    pub(crate) fn are_usable(&self) -> bool {
        is_usable(self.mean) && is_usable(self.clip)
    }
}

/// What matrices get subtracted.
#[derive(Debug)]
pub(super) struct Orthogonal {
    results: Fragments,
    /// How many matrices this rank computed.
    pub(super) computed: usize,
}

impl Shard {
    /// Updates the masters of the group `adamw`, and finds what is subtracted from those of matrices.
    pub(super) fn begin_update(
        &mut self,
        channel: &mut Channel,
        reduced: &Reduced,
        factors: impl Fn(ParamId) -> Factors,
        verdict: &Verdict,
        muon: &MuonConfig,
        adamw: &AdamWConfig,
    ) -> Result<Orthogonal> {
        let updates = self.momentum(channel, reduced, &factors, verdict, muon)?;
        let in_flight = self.send(ExchangeKind::Updates, channel, &updates)?;
        // Beside what travels: element-wise work shares a device with a collective. The kernels of a batch of matrices do
        // not, so these are not begun before all are here.
        self.adamw(reduced, &factors, verdict, adamw)?;
        let jobs = self.jobs(channel.rank(), verdict);
        let mut results = self.orthogonalize(&jobs, updates, in_flight, muon)?;
        let in_flight = self.send(ExchangeKind::Results, channel, &results)?;
        self.receive(ExchangeKind::Results, in_flight, &mut results)?;
        Ok(Orthogonal {
            results,
            computed: jobs.len(),
        })
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
        let MuonState {
            stretches,
            momentum,
        } = &self.muon;
        let treatment = |slice: &OwnedSlice| {
            let sum = reduced.place(slice);
            (!skipped(verdict, slice)).then(|| (factors(slice.param), sum))
        };
        for ((factors, _), section) in stretches.iter().flat_map(|all| all.sections(treatment)) {
            let sum = reduced.section(&section)?;
            let momentum = flat::view(momentum, section.in_state)?;
            let gradient = factors.of(&sum);
            let update = momentum_update(&momentum, gradient, muon.momentum, muon.nesterov)?;
            for (slice, part) in section.slices.iter().zip(section.parts(&update)?) {
                updates.put(slice.param, slice.span.start, part);
            }
        }
        for (param, momentum) in &self.full_momentum {
            for id in self.plan().params().matrices_of(*param) {
                let span = self.plan().params().matrix(id).1.span;
                if verdict.zero[id.index()] || verdict.absent[param.index()] {
                    continue;
                }
                let sum = match reduced.whole(*param) {
                    Some(whole) => flat::view(whole, span)?,
                    None => wholes.read(*param, span)?,
                };
                let gradient = factors(*param).of(&sum);
                let momentum = flat::view(momentum, span)?;
                let update = momentum_update(&momentum, gradient, muon.momentum, muon.nesterov)?;
                updates.put(*param, span.start, update);
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
                let gradient = reduced.slice(slice)?.to_dtype(wholes.dtype())?;
                wholes.put(slice.param, slice.span.start, gradient);
            }
            let in_flight = self.send(ExchangeKind::Gradients, channel, &wholes)?;
            self.receive(ExchangeKind::Gradients, in_flight, &mut wholes)?;
        }
        Ok(wholes)
    }

    /// Those of the matrices that this rank computes whose gradient is there and not zero.
    fn jobs(&self, rank: Rank, verdict: &Verdict) -> Vec<(ParamId, Matrix)> {
        let params = self.plan().params();
        let jobs = self.plan().jobs(rank).iter();
        jobs.filter(|id| !verdict.zero[id.index()])
            .map(|id| params.matrix(*id))
            .filter(|(param, _)| !verdict.absent[param.index()])
            .map(|(param, matrix)| (param, *matrix))
            .collect()
    }

    /// Waits for what is missing of the updates, and orthogonalizes. The updates end here, with the buffer in which they
    /// came, before results are sent.
    fn orthogonalize(
        &self,
        jobs: &[(ParamId, Matrix)],
        mut updates: Fragments,
        in_flight: Option<Pending>,
        muon: &MuonConfig,
    ) -> Result<Fragments> {
        self.receive(ExchangeKind::Updates, in_flight, &mut updates)?;
        let matrix = |(param, matrix): &(ParamId, Matrix)| {
            let update = updates.read(*param, matrix.span)?;
            Ok(update.reshape((matrix.rows, matrix.cols))?)
        };
        let matrices = jobs.iter().map(matrix).collect::<Result<Vec<_>>>()?;
        let orthogonal = muon
            .newton_schulz
            .orthogonalize_all_as_iterated(&matrices)?;
        let dtype = muon.newton_schulz.iterate.on(self.device());
        let mut results = Fragments::new(dtype, self.device());
        for ((param, matrix), result) in jobs.iter().zip(orthogonal) {
            results.put(*param, matrix.span.start, result.flatten_all()?);
        }
        Ok(results)
    }

    /// Updates the masters of a block's matrices.
    pub(super) fn finish_update(
        &self,
        block: BlockId,
        orthogonal: &Orthogonal,
        verdict: &Verdict,
        muon: &MuonConfig,
    ) -> Result<()> {
        let slices = self.matrix_slices[block.index()].iter();
        let slices = slices.filter(|(_, slice)| !skipped(verdict, slice));
        let parts = slices.map(|(matrix, slice)| {
            let weights = flat::view(&self.masters[block.index()], slice.in_shard())?;
            let result = orthogonal.results.read(slice.param, slice.span)?;
            let (_, matrix) = self.plan().params().matrix(*matrix);
            Ok((weights, result, muon.scale.factor(matrix.rows, matrix.cols)))
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let updates = parts.iter().map(|(weights, orthogonalized, scale)| Update {
            weights,
            orthogonalized,
            scale: *scale,
        });
        let updates: Vec<_> = updates.collect();
        Ok(apply_updates(&updates, muon.lr, muon.weight_decay)?)
    }

    /// Starts an exchange, if it is one of the plan's.
    fn send(
        &self,
        kind: ExchangeKind,
        channel: &mut Channel,
        fragments: &Fragments,
    ) -> Result<Option<Pending>> {
        let exchange = self.exchanges.get(&kind);
        exchange
            .map(|exchange| exchange.send(channel, fragments))
            .transpose()
    }

    /// Ends it.
    fn receive(
        &self,
        kind: ExchangeKind,
        in_flight: Option<Pending>,
        fragments: &mut Fragments,
    ) -> Result<()> {
        match (self.exchanges.get(&kind), in_flight) {
            (Some(exchange), Some(in_flight)) => exchange.receive(in_flight, fragments),
            _ => Ok(()),
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
        let AdamWState {
            stretches,
            first,
            second,
        } = &self.adamw;
        let treatment = |slice: &OwnedSlice| {
            let (sum, step) = (reduced.place(slice), self.adamw_steps[slice.param.index()]);
            (!skipped(verdict, slice)).then(|| (factors(slice.param), step, sum))
        };
        for ((factors, step, _), section) in
            stretches.iter().flat_map(|all| all.sections(treatment))
        {
            let sum = reduced.section(&section)?;
            let weights = flat::view(&self.masters[section.block.index()], section.in_shard)?;
            let (first, second) = (
                flat::view(first, section.in_state)?,
                flat::view(second, section.in_state)?,
            );
            let gradient = factors.of(&sum);
            adamw_update(&weights, &first, &second, gradient, step, config)?;
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
