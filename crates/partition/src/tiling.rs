//! From placement to spaces, blocks and buckets.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use crate::{
    Block, BlockId, Bucket, ParamId, Params, Placement, Space, SpaceId, UpdateGroup, WorldSize,
    bucket, whole,
};

/// All flat spaces, the blocks that they are made of, and the buckets that lie in them.
#[derive(Debug)]
pub(crate) struct Tiling {
    pub(crate) spaces: Vec<Space>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) buckets: Vec<Bucket>,
}

impl Tiling {
    pub(crate) fn new(
        params: &Params,
        world: WorldSize,
        placement: Placement,
        bucket_size: NonZeroUsize,
    ) -> Self {
        let mut members = BTreeMap::<Space, Vec<ParamId>>::new();
        for (id, param) in params.iter().rev().filter(|(_, param)| param.elems() > 0) {
            let space = Space {
                group: param.group(),
                wire: param.wire,
            };
            members.entry(space).or_default().push(id);
        }
        let mut tiling = Self {
            spaces: Vec::new(),
            blocks: Vec::new(),
            buckets: Vec::new(),
        };
        // Buckets that are blocks, which are numbered once all are known.
        let mut own = Vec::new();
        for (space, plan_order) in members {
            let id = SpaceId(tiling.spaces.len());
            tiling.spaces.push(space);
            let closed = bucket::close(params, &plan_order, bucket_size).into_iter();
            match (placement, space.group) {
                (Placement::Flat, group) => {
                    let block = BlockId(tiling.blocks.len());
                    let order = flat_order(params, group, &plan_order);
                    tiling.blocks.push(Block::even(id, params, &order, world));
                    let bucket = |params| Bucket {
                        space: id,
                        block,
                        params,
                        is_block: false,
                    };
                    tiling.buckets.extend(closed.map(bucket));
                }
                (Placement::Whole, UpdateGroup::Muon) => {
                    own.extend(whole::blocks(id, params, &plan_order, world, bucket_size));
                }
                (Placement::Striped | Placement::Whole, _) => own.extend(closed.map(|ids| {
                    let block = Block::even(id, params, &ids, world);
                    (ids, block)
                })),
            }
        }
        own.sort_by_key(|(ids, _)| Reverse(last(ids)));
        for (params, block) in own {
            let (space, id) = (block.space, BlockId(tiling.blocks.len()));
            tiling.blocks.push(block);
            tiling.buckets.push(Bucket {
                space,
                block: id,
                params,
                is_block: true,
            });
        }
        tiling
            .buckets
            .sort_by_key(|bucket| Reverse(last(&bucket.params)));
        tiling
    }
}

/// The last parameter of a bucket in plan order, which is its first in registration order.
fn last(ids: &[ParamId]) -> Option<ParamId> {
    ids.last().copied()
}

/// DeepSpeed's order: Muon's parameters by shape, descending, those of one shape in registration
/// order; AdamW's in registration order.
fn flat_order(params: &Params, group: UpdateGroup, plan_order: &[ParamId]) -> Vec<ParamId> {
    let mut order: Vec<_> = plan_order.iter().rev().copied().collect();
    if group == UpdateGroup::Muon {
        order.sort_by(|a, b| params.get(*b).shape.cmp(&params.get(*a).shape));
    }
    order
}
