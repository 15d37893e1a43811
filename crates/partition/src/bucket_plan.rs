use crate::{
    Bucket, Layout, ParamId, Params, Policy, Rank, Ranks, Route, Slice, Span, UpdateGroup,
};

/// What happens to one bucket: how its gradients lie in the wire buffer, who gets which part, and
/// by which calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketPlan {
    /// Elements of the wire buffer: with the block's padding where the bucket is reduce-scattered,
    /// else without.
    pub len: usize,
    /// Where gradients are filled in, ascending in the buffer.
    pub pieces: Vec<Piece>,
    /// Who gets what, ascending in the buffer, and maximal: neighbours differ in owner or
    /// consumers, or are apart. Padding is in none.
    pub segments: Vec<Segment>,
    /// The calls, in order.
    pub ops: Vec<Reduction>,
    /// Indices of `pieces`, by parameter, ascending in it.
    by_param: Vec<usize>,
}

/// A run of a parameter in a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Piece {
    /// The parameter.
    pub param: ParamId,
    /// The elements, in the parameter.
    pub span: Span,
    /// Where they begin in the buffer.
    pub at: usize,
}

/// A run of a bucket with one owner and one set of consumers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Segment {
    /// The elements, in the buffer.
    pub span: Span,
    /// The rank in whose shard they lie.
    pub owner: Rank,
    /// The ranks that keep the reduced values, the owner among them.
    pub consumers: Ranks,
}

/// One call that reduces a part of a bucket's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// The sum to every rank.
    AllReduce(Span),
    /// The sum to one rank.
    Reduce {
        /// The elements, in the buffer.
        span: Span,
        /// The rank that gets their sum.
        root: Rank,
    },
    /// Its shard of the sum to every rank; always the whole buffer.
    ReduceScatter(Span),
}

impl Reduction {
    /// The elements that it reduces, in the buffer.
    pub const fn span(&self) -> Span {
        match self {
            Self::AllReduce(span) | Self::ReduceScatter(span) | Self::Reduce { span, .. } => *span,
        }
    }
}

impl BucketPlan {
    pub(crate) fn new(
        params: &Params,
        layout: &Layout,
        route: Route,
        policy: Policy,
        bucket: &Bucket,
    ) -> Self {
        let native = route == Route::ReduceScatter && bucket.is_block;
        let (pieces, len) = pieces(params, layout, bucket, native);
        let mut by_param: Vec<_> = (0..pieces.len()).collect();
        by_param.sort_by_key(|index| (pieces[*index].param, pieces[*index].span.start));
        let mut plan = Self {
            len,
            pieces,
            segments: Vec::new(),
            ops: Vec::new(),
            by_param,
        };
        plan.segments = plan.segments(params, layout, route, policy);
        plan.ops = if native {
            vec![Reduction::ReduceScatter(Span::new(0, len))]
        } else {
            plan.reductions(route)
        };
        plan
    }

    /// Where a parameter lies in the buffer, ascending in the parameter; nothing if it is in
    /// another bucket.
    pub fn pieces_of(&self, param: ParamId) -> impl Iterator<Item = &Piece> {
        let from = self
            .by_param
            .partition_point(|index| self.pieces[*index].param < param);
        self.by_param[from..]
            .iter()
            .map(|index| &self.pieces[*index])
            .take_while(move |piece| piece.param == param)
    }

    /// Every slice of the bucket and where it begins in the buffer, ascending in the buffer.
    pub(crate) fn slices<'a>(
        &'a self,
        layout: &'a Layout,
    ) -> impl Iterator<Item = (usize, Slice)> + 'a {
        self.pieces.iter().flat_map(|piece| {
            let slices = layout.slices_within(piece.param, piece.span);
            slices.map(|slice| (piece.at + (slice.span.start - piece.span.start), slice))
        })
    }

    fn segments(
        &self,
        params: &Params,
        layout: &Layout,
        route: Route,
        policy: Policy,
    ) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut consumers = Consumers::new(params, layout, route, policy);
        for (at, slice) in self.slices(layout) {
            let (span, owner) = (Span::of_len(at, slice.span.len()), slice.rank);
            let consumers = consumers.of(&slice);
            match segments.last_mut() {
                Some(last)
                    if last.span.end == span.start
                        && last.owner == owner
                        && last.consumers == consumers =>
                {
                    last.span.end = span.end;
                }
                _ => segments.push(Segment {
                    span,
                    owner,
                    consumers,
                }),
            }
        }
        segments
    }

    /// The calls of a buffer without padding.
    fn reductions(&self, route: Route) -> Vec<Reduction> {
        if matches!(route, Route::AllReduce | Route::BucketAllReduce) {
            return vec![Reduction::AllReduce(Span::new(0, self.len))];
        }
        let mut ops: Vec<Reduction> = Vec::new();
        for segment in &self.segments {
            let shared = segment.consumers.len() > 1;
            match ops.last_mut() {
                // Neighbours that go to one rank each are one segment already.
                Some(Reduction::AllReduce(span)) if shared => span.end = segment.span.end,
                _ if shared => ops.push(Reduction::AllReduce(segment.span)),
                _ => ops.push(Reduction::Reduce {
                    span: segment.span,
                    root: segment.owner,
                }),
            }
        }
        ops
    }
}

/// Whether the reduced gradient of a parameter goes to all of its owners, whole, by the reduction
/// itself.
pub(crate) fn copied_to_owners(
    params: &Params,
    layout: &Layout,
    route: Route,
    policy: Policy,
    param: ParamId,
) -> bool {
    policy == Policy::CopyToOwners
        && matches!(route, Route::BucketAllReduce | Route::ReduceToOwner)
        && split(params, layout, param)
}

/// Whether a parameter is a Muon parameter with more than one owner.
pub(crate) fn split(params: &Params, layout: &Layout, param: ParamId) -> bool {
    let slices = layout.slices(param);
    params.get(param).group() == UpdateGroup::Muon
        && slices.iter().any(|slice| slice.rank != slices[0].rank)
}

/// Finds the consumers of slices; the set of a parameter's owners once for all of its slices.
struct Consumers<'a> {
    params: &'a Params,
    layout: &'a Layout,
    route: Route,
    policy: Policy,
    last: Option<(ParamId, Option<Ranks>)>,
}

impl<'a> Consumers<'a> {
    const fn new(params: &'a Params, layout: &'a Layout, route: Route, policy: Policy) -> Self {
        Self {
            params,
            layout,
            route,
            policy,
            last: None,
        }
    }

    fn of(&mut self, slice: &Slice) -> Ranks {
        if self.route == Route::AllReduce {
            return Ranks::all(self.layout.world());
        }
        let Self {
            params,
            layout,
            route,
            policy,
            ..
        } = *self;
        if self
            .last
            .as_ref()
            .is_none_or(|(param, _)| *param != slice.param)
        {
            let copied = copied_to_owners(params, layout, route, policy, slice.param);
            self.last = Some((slice.param, copied.then(|| layout.owners(slice.param))));
        }
        let owners = self.last.as_ref().and_then(|(_, owners)| owners.clone());
        owners.unwrap_or_else(|| Ranks::one(slice.rank))
    }
}

/// The parameters' runs in the order of the flat space, and the buffer's length.
fn pieces(params: &Params, layout: &Layout, bucket: &Bucket, native: bool) -> (Vec<Piece>, usize) {
    let block = layout.block(bucket.block);
    if native {
        let pieces = block.runs.iter().filter_map(|run| {
            let source = run.source?;
            Some(Piece {
                param: source.param,
                span: Span::of_len(source.start, run.len),
                at: run.at,
            })
        });
        return (pieces.collect(), layout.world().get() * block.shard_len);
    }
    let mut at = 0;
    let mut place = |param, span: Span| {
        let piece = Piece { param, span, at };
        at += span.len();
        piece
    };
    let pieces = if bucket.is_block {
        let sources = block
            .runs
            .iter()
            .filter_map(|run| Some((run.source?, run.len)));
        sources
            .map(|(source, len)| place(source.param, Span::of_len(source.start, len)))
            .collect()
    } else {
        // In a block of many buckets every parameter is one run.
        let mut ids = bucket.params.clone();
        ids.sort_by_key(|param| {
            layout
                .slices(*param)
                .first()
                .map(|slice| (slice.rank, slice.at))
        });
        ids.into_iter()
            .map(|param| place(param, Span::new(0, params.get(param).elems())))
            .collect()
    };
    (pieces, at)
}
