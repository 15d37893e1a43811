//! Where every element lies, read off the blocks alone, one element at a time.

use std::collections::BTreeSet;

use polarshard_partition::{
    BlockId, Layout, Matrix, MatrixId, ParamId, Params, Rank, Span, UpdateGroup,
};

/// Where one element lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Home {
    pub(crate) block: BlockId,
    pub(crate) rank: Rank,
    pub(crate) at: usize,
}

/// The home of every element, by parameter.
#[derive(Debug)]
pub(crate) struct Oracle {
    homes: Vec<Vec<Option<Home>>>,
    /// Elements of blocks that hold nothing, by rank.
    pub(crate) padding: Vec<usize>,
}

impl Oracle {
    /// Panics where an element lies in two places, or nowhere.
    pub(crate) fn new(params: &Params, layout: &Layout) -> Self {
        let mut homes: Vec<Vec<Option<Home>>> = params
            .iter()
            .map(|(_, param)| vec![None; param.elems()])
            .collect();
        let mut padding = vec![0; layout.world().get()];
        for (block, content) in layout.block_ids().zip(layout.blocks()) {
            let mut end = 0;
            for run in &content.runs {
                assert_eq!(run.at, end, "runs tile");
                for offset in 0..run.len {
                    let place = run.at + offset;
                    let rank = Rank(place / content.shard_len);
                    let Some(source) = run.source else {
                        padding[rank.0] += 1;
                        continue;
                    };
                    let home = &mut homes[source.param.index()][source.start + offset];
                    assert_eq!(*home, None, "an element lies in one place");
                    *home = Some(Home {
                        block,
                        rank,
                        at: place % content.shard_len,
                    });
                }
                end += run.len;
            }
            assert_eq!(
                end,
                content.shard_len * layout.world().get(),
                "runs tile the block"
            );
        }
        assert!(
            homes.iter().flatten().all(Option::is_some),
            "every element lies somewhere"
        );
        Self { homes, padding }
    }

    pub(crate) fn home(&self, param: ParamId, elem: usize) -> Home {
        self.homes[param.index()][elem].expect("checked above")
    }

    pub(crate) fn owner(&self, param: ParamId, elem: usize) -> Rank {
        self.home(param, elem).rank
    }

    pub(crate) fn owners(&self, param: ParamId, span: Span) -> BTreeSet<Rank> {
        (span.start..span.end)
            .map(|elem| self.owner(param, elem))
            .collect()
    }

    pub(crate) fn param_owners(&self, param: ParamId) -> BTreeSet<Rank> {
        self.owners(param, Span::new(0, self.homes[param.index()].len()))
    }

    /// Whether it is a Muon parameter with several owners.
    pub(crate) fn split(&self, params: &Params, param: ParamId) -> bool {
        params.get(param).group() == UpdateGroup::Muon && self.param_owners(param).len() > 1
    }

    /// Elements of a matrix on a rank.
    pub(crate) fn share(&self, param: ParamId, matrix: &Matrix, rank: Rank) -> usize {
        let span = matrix.span;
        (span.start..span.end)
            .filter(|elem| self.owner(param, *elem) == rank)
            .count()
    }
}

/// The id of an element's matrix.
pub(crate) fn matrix_at(params: &Params, param: ParamId, elem: usize) -> MatrixId {
    let at = params
        .get(param)
        .matrices
        .iter()
        .position(|matrix| matrix.span.end > elem);
    params.matrices_of(param).nth(at.unwrap()).unwrap()
}
