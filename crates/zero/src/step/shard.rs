//! The optimizer's state on one rank.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use polarshard_partition::{ExchangeKind, MatrixId, ParamId, Plan, Rank};

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
    /// By block: those of matrices.
    pub(super) matrix_slices: Vec<Vec<(MatrixId, OwnedSlice)>>,
    /// By block.
    pub(crate) masters: Vec<Tensor>,
    /// By owned slice.
    pub(crate) state: Vec<SliceState>,
    pub(super) muon: MuonState,
    pub(super) adamw: AdamWState,
    /// Parameters whose momentum this rank keeps whole (`CopyToOwners`).
    pub(crate) full_momentum: BTreeMap<ParamId, Tensor>,
    /// Those of the plan's route and policy.
    pub(super) exchanges: BTreeMap<ExchangeKind, Exchange>,
    /// By parameter: how often its AdamW moments were updated.
    pub(crate) adamw_steps: Vec<u64>,
}

/// The state of the slices whose momentum is kept as slices. It is one allocation, since an operation cannot write two
/// views of one storage.
#[derive(Debug)]
pub(super) struct MuonState {
    pub(super) stretches: Vec<Stretch>,
    pub(super) momentum: Tensor,
}

/// The state of the slices of the group `adamw`, one allocation for each kind of moment.
#[derive(Debug)]
pub(super) struct AdamWState {
    pub(super) stretches: Vec<Stretch>,
    pub(super) first: Tensor,
    pub(super) second: Tensor,
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
        let mut matrix_slices = vec![Vec::new(); masters.len()];
        for slice in &owned {
            if let Some(matrix) = slice.matrix {
                matrix_slices[slice.block.index()].push((matrix, *slice));
            }
        }
        let mut full_momentum = BTreeMap::new();
        for param in plan.full_momentum(rank) {
            let elems = plan.params().get(param).elems();
            full_momentum.insert(param, flat::zeros(elems, DType::F32, device)?);
        }
        let muon = MuonState::new(&owned, &full_momentum, device)?;
        let adamw = AdamWState::new(&owned, device)?;
        let state = states(&owned, &full_momentum, &muon, &adamw)?;
        let kinds = plan.exchange_kinds().iter();
        let exchanges = kinds.map(|kind| (*kind, Exchange::new(plan, *kind, rank)));
        let exchanges = exchanges.collect();
        let adamw_steps = vec![0; weights.len()];
        let (plan, device) = (Arc::clone(plan), device.clone());
        Ok(Self {
            plan,
            device,
            owned,
            matrix_slices,
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

impl MuonState {
    fn new(
        owned: &[OwnedSlice],
        full_momentum: &BTreeMap<ParamId, Tensor>,
        device: &Device,
    ) -> Result<Self> {
        let own = |slice: &OwnedSlice| {
            slice.matrix.is_some() && !full_momentum.contains_key(&slice.param)
        };
        let stretches = Stretch::all(owned.iter().copied().filter(own));
        let momentum = zeros(&stretches, device)?;
        Ok(Self {
            stretches,
            momentum,
        })
    }
}

impl AdamWState {
    fn new(owned: &[OwnedSlice], device: &Device) -> Result<Self> {
        let own = |slice: &OwnedSlice| slice.matrix.is_none();
        let stretches = Stretch::all(owned.iter().copied().filter(own));
        let (first, second) = (zeros(&stretches, device)?, zeros(&stretches, device)?);
        Ok(Self {
            stretches,
            first,
            second,
        })
    }
}

/// As many elements as the stretches have.
fn zeros(stretches: &[Stretch], device: &Device) -> candle_core::Result<Tensor> {
    let elems = stretches.iter().map(Stretch::elems).sum();
    flat::zeros(elems, DType::F32, device)
}

/// By owned slice.
///
/// # Panics
/// If a slice is in no stretch and its parameter's momentum is not kept in full.
fn states(
    owned: &[OwnedSlice],
    full_momentum: &BTreeMap<ParamId, Tensor>,
    muon: &MuonState,
    adamw: &AdamWState,
) -> Result<Vec<SliceState>> {
    let mut states = BTreeMap::new();
    for (slice, span) in muon.stretches.iter().flat_map(Stretch::places) {
        let momentum = flat::view(&muon.momentum, span)?;
        states.insert((slice.block, slice.at), SliceState::Momentum(momentum));
    }
    for (slice, span) in adamw.stretches.iter().flat_map(Stretch::places) {
        let moments = SliceState::Moments {
            first: flat::view(&adamw.first, span)?,
            second: flat::view(&adamw.second, span)?,
        };
        states.insert((slice.block, slice.at), moments);
    }
    let state = |slice: &OwnedSlice| {
        if full_momentum.contains_key(&slice.param) {
            return SliceState::InFull;
        }
        let state = states.remove(&(slice.block, slice.at));
        state.expect("a slice lies in a stretch of its group")
    };
    Ok(owned.iter().map(state).collect())
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use polarshard_partition::{
        Layout, Matrix, Param, Params, Placement, Policy, Route, Span, Wire, WorldSize,
    };

    use super::*;

    /// The slices of the first of two ranks: of a matrix that it shares with the other one, and of a vector.
    fn plan(policy: Policy) -> Result<Plan> {
        let matrix = Matrix {
            span: Span::new(0, 12),
            rows: 4,
            cols: 3,
            cost: 1,
        };
        let param = |name: &str, matrices| Param {
            name: name.to_owned(),
            shape: [4, 3].into_iter().collect(),
            wire: Wire::F32,
            matrices,
        };
        let params = Params::new(vec![param("vector", vec![]), param("matrix", vec![matrix])])?;
        let world = WorldSize::new(2)?;
        let layout = Layout::new(&params, world, Placement::Striped, NonZeroUsize::MAX)?;
        Ok(Plan::new(&params, layout, Route::default(), policy))
    }

    #[test]
    fn momentum_is_in_full_where_the_policy_copies_it() -> Result<()> {
        let device = Device::Cpu;
        let values = Tensor::zeros((4, 3), DType::F32, &device)?;
        let weights = ["vector", "matrix"];
        let weights = weights.map(|name| Weight::new(name.to_owned(), &values, false));
        let weights = weights.into_iter().collect::<Result<Vec<_>>>()?;
        for policy in Policy::ALL {
            let plan = Arc::new(plan(policy)?);
            let shard = Shard::new(&plan, Rank(0), &weights, &device)?;
            let [vector, matrix] = &shard.state[..] else {
                panic!("{policy}: {:?}", shard.state)
            };
            assert!(matches!(vector, SliceState::Moments { .. }), "{policy}");
            let in_full = matches!(matrix, SliceState::InFull);
            assert_eq!(in_full, policy == Policy::CopyToOwners, "{policy}");
        }
        Ok(())
    }

    #[test]
    #[should_panic(expected = "a slice lies in a stretch of its group")]
    fn a_slice_that_was_forgotten_is_not_taken_for_one_in_full() {
        let plan = plan(Policy::AssignOwner).unwrap();
        let (owned, none) = (owned(&plan, Rank(0)), BTreeMap::new());
        let muon = MuonState::new(&[], &none, &Device::Cpu).unwrap();
        let adamw = AdamWState::new(&owned, &Device::Cpu).unwrap();
        let _ = states(&owned, &none, &muon, &adamw);
    }
}
