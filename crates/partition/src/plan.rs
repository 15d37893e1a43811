//! What happens in a step, from layout, route and policy.

use crate::compute::Compute;
use crate::{BlockId, BucketPlan, Digest, DigestWriter, Layout, Params, Policy, Route, Span};

/// What happens in a step: how gradients are reduced, who keeps what, who computes what, and what
/// ranks swap for it.
///
/// ```
/// use std::num::NonZeroUsize;
/// use polarshard_partition::{
///     ExchangeKind, Layout, Matrix, Param, Params, Placement, Plan, Policy, Rank, Route, Span, Wire, WorldSize,
/// };
/// let matrix = Matrix { span: Span::new(0, 15), rows: 5, cols: 3, cost: 1 };
/// let param = Param { name: "w".into(), shape: [5, 3].into_iter().collect(), wire: Wire::F32, matrices: vec![matrix] };
/// let params = Params::new(vec![param])?;
/// let layout = Layout::new(&params, WorldSize::new(4)?, Placement::Striped, NonZeroUsize::MAX)?;
/// let plan = Plan::new(&params, layout, Route::ReduceScatter, Policy::AssignOwner);
/// // Rank 0 computes the matrix, and gets the other ranks' slices of it.
/// assert_eq!(plan.jobs(Rank(0)).len(), 1);
/// assert_eq!(plan.exchange(ExchangeKind::Updates, Rank(0)).len, 4 + 4 + 3);
/// # Ok::<(), polarshard_partition::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Plan {
    params: Params,
    layout: Layout,
    route: Route,
    policy: Policy,
    buckets: Vec<BucketPlan>,
    compute: Compute,
    digest: Digest,
}

impl Plan {
    /// The plan of a layout, which must have been built from `params`.
    ///
    /// # Panics
    /// May panic if it was built from others.
    pub fn new(params: &Params, layout: Layout, route: Route, policy: Policy) -> Self {
        let buckets = layout
            .buckets()
            .iter()
            .map(|bucket| BucketPlan::new(params, &layout, route, policy, bucket))
            .collect();
        let compute = Compute::new(params, &layout, policy);
        let digest = DigestWriter::new()
            .u64(layout.digest().0)
            .u64(route as u64)
            .u64(policy as u64)
            .finish();
        Self {
            params: params.clone(),
            layout,
            route,
            policy,
            buckets,
            compute,
            digest,
        }
    }

    /// The parameters.
    pub const fn params(&self) -> &Params {
        &self.params
    }

    /// Where they lie.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// How gradients are reduced.
    pub const fn route(&self) -> Route {
        self.route
    }

    /// How split matrices get whole.
    pub const fn policy(&self) -> Policy {
        self.policy
    }

    /// A digest of the layout, the route and the policy, from which the plan follows.
    pub const fn digest(&self) -> Digest {
        self.digest
    }

    /// What happens to each bucket of the layout, in its order.
    pub fn buckets(&self) -> &[BucketPlan] {
        &self.buckets
    }

    /// The windows in which a block's weights are gathered: runs of shard offsets that tile the
    /// shard, of which W together have at most `bucket_size` elements (or W, if that is more). One
    /// rank alone has nothing to gather, and no window.
    pub fn windows(&self, block: BlockId) -> Vec<Span> {
        let world = self.layout.world().get();
        if world == 1 {
            return Vec::new();
        }
        let len = (self.layout.bucket_size().get() / world).max(1);
        let shard = self.layout.block(block).shard_len;
        (0..shard)
            .step_by(len)
            .map(|start| Span::new(start, shard.min(start.saturating_add(len))))
            .collect()
    }

    pub(crate) const fn compute(&self) -> &Compute {
        &self.compute
    }
}
