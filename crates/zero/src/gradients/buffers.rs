//! Wire buffers that are made once and used again.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use polarshard_partition::{Space, Span, Wire};

use crate::dtypes;
use crate::error::Result;
use crate::flat;

/// Free buffers by flat space, each as long as the longest use of it.
#[derive(Debug)]
pub(crate) struct Buffers {
    device: Device,
    longest: BTreeMap<Space, (Wire, usize)>,
    free: BTreeMap<Space, Vec<Tensor>>,
}

impl Buffers {
    /// `uses` are all that will be asked for: the space, the dtype on the wire, and the number of elements.
    pub(crate) fn new(device: Device, uses: impl Iterator<Item = (Space, Wire, usize)>) -> Self {
        let mut longest = BTreeMap::new();
        for (space, wire, len) in uses {
            let known = longest.entry(space).or_insert((wire, len));
            known.1 = len.max(known.1);
        }
        Self {
            device,
            longest,
            free: BTreeMap::new(),
        }
    }

    /// A buffer of which `len` elements are used, with any values.
    pub(crate) fn take(&mut self, space: Space, len: usize) -> Result<Buffer> {
        let whole = match self.free.get_mut(&space).and_then(Vec::pop) {
            Some(whole) => whole,
            None => {
                let (wire, longest) = self.longest[&space];
                flat::zeros(longest, dtypes::dtype(wire), &self.device)?
            }
        };
        let used = flat::view(&whole, Span::of_len(0, len))?;
        Ok(Buffer { space, whole, used })
    }

    pub(crate) fn give_back(&mut self, buffer: Buffer) {
        self.free
            .entry(buffer.space)
            .or_default()
            .push(buffer.whole);
    }

    /// What it holds while none is in use.
    #[cfg(test)]
    pub(crate) fn free_bytes(&self) -> usize {
        self.free.values().flatten().map(flat::bytes).sum()
    }
}

/// A buffer in use.
#[derive(Debug)]
pub(crate) struct Buffer {
    space: Space,
    whole: Tensor,
    /// The elements in use.
    pub(crate) used: Tensor,
}

impl Buffer {
    /// What it holds, used or not.
    pub(crate) fn bytes(&self) -> usize {
        flat::bytes(&self.whole)
    }
}
