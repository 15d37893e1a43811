//! Wire buffers that are made once and used again.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use polarshard_partition::{Span, Wire};

use crate::dtypes;
use crate::error::Result;
use crate::flat;

/// Free buffers by wire dtype, each as long as the longest bucket of it.
#[derive(Debug)]
pub(crate) struct Buffers {
    device: Device,
    longest: BTreeMap<Wire, usize>,
    free: BTreeMap<Wire, Vec<Tensor>>,
}

impl Buffers {
    pub(crate) fn new(device: Device, buckets: impl Iterator<Item = (Wire, usize)>) -> Self {
        let mut longest = BTreeMap::new();
        for (wire, len) in buckets {
            let known = longest.entry(wire).or_insert(len);
            *known = len.max(*known);
        }
        Self {
            device,
            longest,
            free: BTreeMap::new(),
        }
    }

    /// A buffer of at least `len` elements, with any values, and its first `len` elements as a view.
    pub(crate) fn take(&mut self, wire: Wire, len: usize) -> Result<Buffer> {
        let whole = match self.free.get_mut(&wire).and_then(Vec::pop) {
            Some(whole) => whole,
            None => Tensor::zeros(self.longest[&wire], dtypes::dtype(wire), &self.device)?,
        };
        let used = flat::view(&whole, Span::of_len(0, len))?;
        Ok(Buffer { wire, whole, used })
    }

    pub(crate) fn give_back(&mut self, buffer: Buffer) {
        self.free.entry(buffer.wire).or_default().push(buffer.whole);
    }
}

/// A buffer in use.
#[derive(Debug)]
pub(crate) struct Buffer {
    wire: Wire,
    whole: Tensor,
    /// The elements in use.
    pub(crate) used: Tensor,
}

impl Buffer {
    pub(crate) fn bytes(&self) -> usize {
        self.used.elem_count() * self.wire.bytes()
    }
}
