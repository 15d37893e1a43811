//! The optimizer's state on one rank.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use polarshard_partition::{ExchangeKind, ParamId, Plan, Rank};

use super::exchange::Exchange;
use super::owned::{OwnedSlice, owned};
use super::stretches::Stretch;
use crate::error::Result;
use crate::flat;
use crate::report::MemoryUse;
use crate::weights::Weight;

/// The optimizer's state on one rank, all in fp32.
#[derive(Debug)]
pub(crate) struct Shard {
    plan: Arc<Plan>,
    device: Device,
    pub(crate) owned: Vec<OwnedSlice>,
    /// By block.
    pub(crate) masters: Vec<Tensor>,
    /// By owned slice.
    pub(crate) state: Vec<SliceState>,
    /// The slices whose momentum is kept as slices, and that.
    pub(super) muon: (Vec<Stretch>, Tensor),
    /// The slices of the group `adamw`, and their first and second moments.
    pub(super) adamw: (Vec<Stretch>, [Tensor; 2]),
    /// Parameters whose momentum this rank keeps whole (`CopyToOwners`).
    pub(crate) full_momentum: BTreeMap<ParamId, Tensor>,
    /// Those of the plan's route and policy.
    pub(super) exchanges: BTreeMap<ExchangeKind, Exchange>,
    /// By parameter: how often its AdamW moments were updated.
    pub(crate) adamw_steps: Vec<u64>,
}

/// The state of one slice, as views of one allocation a kind.
#[derive(Debug)]
pub(crate) enum SliceState {
    Momentum(Tensor),
    /// The whole parameter's momentum is in `full_momentum`.
    InFull,
    Moments {
        first: Tensor,
        second: Tensor,
    },
}

impl Shard {
    pub(crate) fn new(
        plan: &Arc<Plan>,
        rank: Rank,
        weights: &[Weight],
        device: &Device,
    ) -> Result<Self> {
        let owned = owned(plan, rank);
        let masters = (plan.layout().blocks().iter())
            .map(|block| flat::zeros(block.shard_len, DType::F32, device))
            .collect::<candle_core::Result<Vec<_>>>()?;
        for slice in &owned {
            let values = flat::view(weights[slice.param.index()].values(), slice.span)?;
            flat::write(&masters[slice.block.index()], slice.at, &values)?;
        }
        let mut full_momentum = BTreeMap::new();
        for param in plan.full_momentum(rank) {
            let elems = plan.params().get(param).elems();
            full_momentum.insert(param, flat::zeros(elems, DType::F32, device)?);
        }
        // Of each kind one allocation: an operation cannot write two views of one storage.
        let in_full = |slice: &OwnedSlice| full_momentum.contains_key(&slice.param);
        let stretches = |kind: &dyn Fn(&OwnedSlice) -> bool| {
            let stretches = Stretch::all(owned.iter().copied().filter(|slice| kind(slice)));
            let elems = stretches.iter().map(Stretch::elems).sum();
            (stretches, move || flat::zeros(elems, DType::F32, device))
        };
        let (muon, zeros) = stretches(&|slice| slice.matrix.is_some() && !in_full(slice));
        let muon = (muon, zeros()?);
        let (adamw, zeros) = stretches(&|slice| slice.matrix.is_none());
        let adamw = (adamw, [zeros()?, zeros()?]);
        let state = states(&owned, &muon, &adamw)?;
        let kinds = plan.exchange_kinds().iter();
        let exchanges = kinds.map(|kind| (*kind, Exchange::new(plan, *kind, rank)));
        let exchanges = exchanges.collect();
        let adamw_steps = vec![0; weights.len()];
        let (plan, device) = (Arc::clone(plan), device.clone());
        Ok(Self {
            plan,
            device,
            owned,
            masters,
            state,
            muon,
            adamw,
            full_momentum,
            exchanges,
            adamw_steps,
        })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes of this state, beside those of reduced gradients.
    pub(crate) fn memory(&self, reduced_gradients: usize) -> MemoryUse {
        let of = |tensor: &Tensor| tensor.elem_count() * size_of::<f32>();
        let mut bytes = MemoryUse {
            masters: self.masters.iter().map(of).sum(),
            momentum: self.full_momentum.values().map(of).sum(),
            moments: 0,
            reduced_gradients,
        };
        for state in &self.state {
            match state {
                SliceState::Momentum(momentum) => bytes.momentum += of(momentum),
                SliceState::InFull => {}
                SliceState::Moments { first, second } => bytes.moments += of(first) + of(second),
            }
        }
        bytes
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }
}

/// By owned slice.
fn states(
    owned: &[OwnedSlice],
    (muon, momentum): &(Vec<Stretch>, Tensor),
    (adamw, [first, second]): &(Vec<Stretch>, [Tensor; 2]),
) -> Result<Vec<SliceState>> {
    let mut states = BTreeMap::new();
    for (slice, span) in muon.iter().flat_map(Stretch::places) {
        let momentum = flat::view(momentum, span)?;
        states.insert((slice.block, slice.at), SliceState::Momentum(momentum));
    }
    for (slice, span) in adamw.iter().flat_map(Stretch::places) {
        let (first, second) = (flat::view(first, span)?, flat::view(second, span)?);
        states.insert(
            (slice.block, slice.at),
            SliceState::Moments { first, second },
        );
    }
    let mut state = |slice: &OwnedSlice| states.remove(&(slice.block, slice.at));
    let all = owned
        .iter()
        .map(|slice| state(slice).unwrap_or(SliceState::InFull));
    Ok(all.collect())
}
