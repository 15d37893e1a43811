//! Where every element lies, and who owns it.

use std::num::NonZeroUsize;

use crate::slices::{Slices, owners};
use crate::tiling::Tiling;
use crate::{
    Block, BlockId, Bucket, BucketId, Digest, DigestWriter, Error, MatrixId, ParamId, Params,
    Placement, Rank, Ranks, Slice, Space, SpaceId, Span, WorldSize,
};

/// Where every element lies, and who owns it: all blocks of all flat spaces, each tiled by runs of
/// parameters and padding. Everything else is derived from it.
///
/// ```
/// use std::num::NonZeroUsize;
/// use polarshard_partition::{Layout, Matrix, Param, Params, Placement, Rank, Span, Wire, WorldSize};
/// let matrix = Matrix { span: Span::new(0, 15), rows: 5, cols: 3, cost: 1 };
/// let param = Param { name: "w".into(), shape: [5, 3].into_iter().collect(), wire: Wire::F32, matrices: vec![matrix] };
/// let params = Params::new(vec![param])?;
/// let layout = Layout::new(&params, WorldSize::new(4)?, Placement::Striped, NonZeroUsize::MAX)?;
/// // One matrix over four ranks; the last one holds an element of padding.
/// let lens: Vec<_> = layout.slices(params.id("w").unwrap()).iter().map(|slice| slice.span.len()).collect();
/// assert_eq!((lens, layout.padding()), (vec![4, 4, 4, 3], 1));
/// # Ok::<(), polarshard_partition::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    world: WorldSize,
    placement: Placement,
    bucket_size: NonZeroUsize,
    spaces: Vec<Space>,
    blocks: Vec<Block>,
    buckets: Vec<Bucket>,
    /// By parameter; `None` is empty.
    bucket_of: Vec<Option<BucketId>>,
    slices: Slices,
    padding: usize,
    digest: Digest,
}

impl Layout {
    /// Lays `params` out for `world` ranks, in buckets of up to `bucket_size` elements.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the elements and their padding do not fit a `usize`.
    pub fn new(
        params: &Params,
        world: WorldSize,
        placement: Placement,
        bucket_size: NonZeroUsize,
    ) -> Result<Self, Error> {
        check_size(params, world)?;
        let Tiling {
            spaces,
            blocks,
            buckets,
        } = Tiling::new(params, world, placement, bucket_size);
        let mut bucket_of = vec![None; params.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            for param in &bucket.params {
                bucket_of[param.index()] = Some(BucketId(index));
            }
        }
        let slices = Slices::new(&blocks, params.len());
        let padded: usize = blocks
            .iter()
            .map(|block| block.shard_len * world.get())
            .sum();
        let padding = padded - params.iter().map(|(_, param)| param.elems()).sum::<usize>();
        let digest = DigestWriter::new()
            .u64(params.digest().0)
            .u64(world.get() as u64)
            .u64(placement as u64)
            .u64(bucket_size.get() as u64)
            .finish();
        Ok(Self {
            world,
            placement,
            bucket_size,
            spaces,
            blocks,
            buckets,
            bucket_of,
            slices,
            padding,
            digest,
        })
    }

    /// How many ranks it is for.
    pub const fn world(&self) -> WorldSize {
        self.world
    }

    /// How elements are placed.
    pub const fn placement(&self) -> Placement {
        self.placement
    }

    /// The most elements of a bucket of several parameters, and of an all-gather's window.
    pub const fn bucket_size(&self) -> NonZeroUsize {
        self.bucket_size
    }

    /// The flat spaces: Muon's, then AdamW's, by element type.
    pub fn spaces(&self) -> &[Space] {
        &self.spaces
    }

    /// One flat space.
    pub fn space(&self, id: SpaceId) -> Space {
        self.spaces[id.0]
    }

    /// Every block: in `Flat` one a flat space, in its order; else one a bucket, in its order.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The ids of all blocks, ascending.
    pub fn block_ids(&self) -> impl ExactSizeIterator<Item = BlockId> + Clone + use<> {
        (0..self.blocks.len()).map(BlockId)
    }

    /// One block.
    pub fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.0]
    }

    /// A rank's shard, in its block.
    pub fn shard_span(&self, block: BlockId, rank: Rank) -> Span {
        let len = self.block(block).shard_len;
        Span::of_len(rank.0 * len, len)
    }

    /// Every bucket, by its last parameter in plan order: each is full before its successor.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The ids of all buckets, ascending.
    pub fn bucket_ids(&self) -> impl ExactSizeIterator<Item = BucketId> + Clone + use<> {
        (0..self.buckets.len()).map(BucketId)
    }

    /// One bucket.
    pub fn bucket(&self, id: BucketId) -> &Bucket {
        &self.buckets[id.0]
    }

    /// The one bucket that a parameter lies in; `None` if the parameter is empty.
    pub fn bucket_of(&self, param: ParamId) -> Option<BucketId> {
        self.bucket_of[param.index()]
    }

    /// The slices of a parameter, ascending in it: they tile it.
    pub fn slices(&self, param: ParamId) -> &[Slice] {
        self.slices.of_param(param)
    }

    /// The slices of a matrix, with spans in its parameter: they tile the matrix. No rank has two.
    pub fn matrix_slices(&self, params: &Params, matrix: MatrixId) -> Vec<Slice> {
        let (param, matrix) = params.matrix(matrix);
        self.slices_within(param, matrix.span).collect()
    }

    /// The ranks that own a part of a parameter.
    pub fn owners(&self, param: ParamId) -> Ranks {
        owners(self.slices(param))
    }

    /// The ranks that own a part of a matrix.
    pub fn matrix_owners(&self, params: &Params, matrix: MatrixId) -> Ranks {
        let (param, matrix) = params.matrix(matrix);
        owners(self.slices.touching(param, matrix.span))
    }

    /// All slices that a rank owns, by block and place in the shard.
    pub fn rank_slices(&self, rank: Rank) -> impl Iterator<Item = &Slice> {
        self.block_ids()
            .flat_map(move |block| self.slices.of_shard(block, rank))
    }

    /// Elements of all blocks that hold no parameter.
    pub const fn padding(&self) -> usize {
        self.padding
    }

    /// A digest of the parameters, the world, the placement and the bucket size, from which the
    /// layout follows.
    pub const fn digest(&self) -> Digest {
        self.digest
    }

    /// The slices of `span` of a parameter, cut to it.
    pub(crate) fn slices_within(
        &self,
        param: ParamId,
        span: Span,
    ) -> impl Iterator<Item = Slice> + '_ {
        self.slices
            .touching(param, span)
            .iter()
            .filter_map(move |slice| slice.within(span))
    }
}

/// Padding is below 2W a block, but for `Whole`, whose cap is 5%: twice the elements and 2W a
/// parameter are above both.
fn check_size(params: &Params, world: WorldSize) -> Result<(), Error> {
    let elems: usize = params.iter().map(|(_, param)| param.elems()).sum();
    let padding = world
        .get()
        .checked_mul(2)
        .and_then(|align| align.checked_mul(params.len()));
    let size = padding.and_then(|padding| elems.checked_mul(2)?.checked_add(padding));
    size.map(|_| ()).ok_or_else(|| Error::TooLarge {
        what: "the layout".into(),
    })
}
