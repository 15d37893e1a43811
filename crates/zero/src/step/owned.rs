//! The slices that a rank owns, cut to matrices.

use polarshard_partition::{BlockId, MatrixId, ParamId, Plan, Rank, Span};

/// A run of one matrix, or of one parameter of the group `adamw`, in this rank's shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OwnedSlice {
    pub(crate) param: ParamId,
    pub(crate) matrix: Option<MatrixId>,
    /// In the parameter.
    pub(crate) span: Span,
    pub(crate) block: BlockId,
    /// Offset in this rank's shard of the block.
    pub(crate) at: usize,
}

impl OwnedSlice {
    /// In this rank's shard of the block.
    pub(crate) fn in_shard(&self) -> Span {
        Span::of_len(self.at, self.span.len())
    }
}

/// All slices of a rank, by parameter and offset.
pub(crate) fn owned(plan: &Plan, rank: Rank) -> Vec<OwnedSlice> {
    let (params, layout) = (plan.params(), plan.layout());
    let mut owned = Vec::new();
    for slice in layout.rank_slices(rank) {
        let mut push = |matrix, span: Span| {
            let at = slice.at + (span.start - slice.span.start);
            owned.push(OwnedSlice {
                param: slice.param,
                matrix,
                span,
                block: slice.block,
                at,
            });
        };
        let mut matrices = params.matrices_of(slice.param).peekable();
        if matrices.peek().is_none() {
            push(None, slice.span);
        }
        for matrix in matrices {
            if let Some(common) = params.matrix(matrix).1.span.intersect(slice.span) {
                push(Some(matrix), common);
            }
        }
    }
    owned.sort_by_key(|slice| (slice.param, slice.span.start));
    owned
}
