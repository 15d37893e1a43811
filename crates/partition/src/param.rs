//! A parameter and its matrices.

use std::fmt;

use smallvec::SmallVec;

use crate::{Span, Wire};

/// Parameters that share an update rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UpdateGroup {
    /// Orthogonalized momentum.
    Muon,
    /// Everything else.
    AdamW,
}

impl fmt::Display for UpdateGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Muon => "muon",
            Self::AdamW => "adamw",
        })
    }
}

/// What one Newton-Schulz iteration runs over: a contiguous run of a Muon parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Matrix {
    /// Its elements, in its parameter.
    pub span: Span,
    /// Its rows.
    pub rows: usize,
    /// Its columns; rows × columns elements.
    pub cols: usize,
    /// FLOPs of its Newton-Schulz iteration, from the caller.
    pub cost: u64,
}

/// One trained parameter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Param {
    /// Its name, by which it is known in checkpoints and messages.
    pub name: String,
    /// Its dimensions.
    pub shape: SmallVec<[usize; 4]>,
    /// The weight's element type.
    pub wire: Wire,
    /// Its matrices, which tile it in ascending order; none for AdamW, and none where it is empty.
    pub matrices: Vec<Matrix>,
}

impl Param {
    /// How many elements: the product of its dimensions.
    pub fn elems(&self) -> usize {
        // A zero anywhere makes it empty, though the other dimensions may overflow a product.
        if self.shape.contains(&0) {
            0
        } else {
            self.shape.iter().product()
        }
    }

    /// Muon where it has matrices.
    pub fn group(&self) -> UpdateGroup {
        if self.matrices.is_empty() {
            UpdateGroup::AdamW
        } else {
            UpdateGroup::Muon
        }
    }
}

/// A parameter, by its place in registration order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId(pub(crate) usize);

impl ParamId {
    /// Its place in registration order.
    pub const fn index(self) -> usize {
        self.0
    }
}

/// A matrix, by its place among all matrices in registration order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MatrixId(pub(crate) usize);

impl MatrixId {
    /// Its place among all matrices.
    pub const fn index(self) -> usize {
        self.0
    }
}
