//! Finds tensors that a model computed from a weight once, at construction, and goes on using.
//!
//! candle builds its graph anew in every forward pass, so a node that was there before the last step and is there
//! again was kept by the model. If it is neither a variable nor a view of a weight, it never sees the weight's new
//! values.

use std::collections::BTreeSet;

use candle_core::{Tensor, TensorId};

use crate::error::{Error, Result};
use crate::flat;

/// Looks at the losses of the first step, the first one after a checkpoint was loaded too, and at the first loss after it.
#[derive(Debug)]
pub(crate) struct StaleCheck {
    /// Where the storages of the weights and buffers are.
    registered: BTreeSet<usize>,
    #[expect(
        clippy::disallowed_types,
        reason = "asked for members only, on one rank; candle's ids have no order"
    )]
    seen: std::collections::HashSet<TensorId>,
    /// The step of the first loss, counted from 0.
    first: Option<u64>,
    done: bool,
}

impl StaleCheck {
    pub(super) fn new<'a>(registered: impl Iterator<Item = &'a Tensor>) -> Self {
        Self {
            registered: registered.map(flat::address).collect(),
            seen: Default::default(),
            first: None,
            done: false,
        }
    }

    /// Checks the loss of a micro-batch, when so many steps have been applied.
    pub(crate) fn check(&mut self, loss: &Tensor, steps: u64) -> Result<()> {
        if self.done {
            return Ok(());
        }
        let nodes = loss.sorted_nodes();
        let mut kept = nodes
            .into_iter()
            .filter(|node| !node.is_variable() && !self.registered.contains(&flat::address(node)));
        if steps == *self.first.get_or_insert(steps) {
            self.seen.extend(kept.map(Tensor::id));
            return Ok(());
        }
        match kept.find(|node| self.seen.contains(&node.id())) {
            Some(stale) => Err(Error::Stale {
                shape: stale.dims().to_vec(),
            }),
            None => {
                self.done = true;
                self.seen.clear();
                Ok(())
            }
        }
    }
}
