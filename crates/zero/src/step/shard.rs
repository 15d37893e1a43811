//! The optimizer's state on one rank.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use polarshard_partition::{ParamId, Plan, Rank, Span};

use super::owned::{OwnedSlice, owned};
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
    /// Parameters whose momentum this rank keeps whole (`CopyToOwners`).
    pub(crate) full_momentum: BTreeMap<ParamId, Tensor>,
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
        let elems = |kind: &dyn Fn(&OwnedSlice) -> bool| -> usize {
            owned
                .iter()
                .filter(|slice| kind(slice))
                .map(|slice| slice.span.len())
                .sum()
        };
        let mut momentum = Runs::new(
            elems(&|slice| slice.matrix.is_some() && !in_full(slice)),
            device,
        )?;
        let mut first = Runs::new(elems(&|slice| slice.matrix.is_none()), device)?;
        let mut second = Runs::new(elems(&|slice| slice.matrix.is_none()), device)?;
        let state = owned
            .iter()
            .map(|slice| {
                let len = slice.span.len();
                Ok(match slice.matrix {
                    Some(_) if in_full(slice) => SliceState::InFull,
                    Some(_) => SliceState::Momentum(momentum.next(len)?),
                    None => SliceState::Moments {
                        first: first.next(len)?,
                        second: second.next(len)?,
                    },
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let adamw_steps = vec![0; weights.len()];
        let (plan, device) = (Arc::clone(plan), device.clone());
        Ok(Self {
            plan,
            device,
            owned,
            masters,
            state,
            full_momentum,
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

/// Zeros, handed out run by run.
struct Runs {
    all: Tensor,
    next: usize,
}

impl Runs {
    fn new(elems: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            all: flat::zeros(elems, DType::F32, device)?,
            next: 0,
        })
    }

    fn next(&mut self, len: usize) -> Result<Tensor> {
        let span = Span::of_len(self.next, len);
        self.next = span.end;
        Ok(flat::view(&self.all, span)?)
    }
}
