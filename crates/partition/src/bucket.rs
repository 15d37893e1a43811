//! Buckets: which gradients are reduced in one go.

use std::num::NonZeroUsize;

use crate::{BlockId, ParamId, Params, SpaceId};

/// A bucket, by its place in `Layout::buckets`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BucketId(pub(crate) usize);

impl BucketId {
    /// Its place in `Layout::buckets`.
    pub const fn index(self) -> usize {
        self.0
    }
}

/// Gradients reduced in one go: whole parameters of one flat space.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Bucket {
    /// Their flat space.
    pub space: SpaceId,
    /// The block that they lie in.
    pub block: BlockId,
    /// The parameters, in plan order.
    pub params: Vec<ParamId>,
    /// Whether the bucket is the block, so that it can be reduce-scattered.
    pub is_block: bool,
}

/// Cuts `ids`, in plan order, into buckets: each closes before the parameter that would pass
/// `bucket_size`, and a larger parameter is alone.
pub(crate) fn close(
    params: &Params,
    ids: &[ParamId],
    bucket_size: NonZeroUsize,
) -> Vec<Vec<ParamId>> {
    let mut buckets = Vec::new();
    let mut rest = ids;
    while !rest.is_empty() {
        let (bucket, after) = rest.split_at(within(params, rest, bucket_size.get()));
        buckets.push(bucket.to_vec());
        rest = after;
    }
    buckets
}

/// How many of `ids`, from the front, have at most `limit` elements together; the first always.
pub(crate) fn within(params: &Params, ids: &[ParamId], limit: usize) -> usize {
    let mut elems = 0;
    let fits = ids.iter().take_while(|id| {
        elems += params.get(**id).elems();
        elems <= limit
    });
    fits.count().max(1)
}
