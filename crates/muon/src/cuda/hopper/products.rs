//! Products as the kernels take them.

use candle_core::{DType, Result};
use cudarc::driver::sys::CUtensorMap;
use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr};

use super::modules::{Grid, Modules, argument, launch};
use super::steps::{Op, Step};
use crate::hopper::deal::Deal;
use crate::hopper::program::Scalars;
use crate::hopper::tiles::{Region, Tile, Width};

/// Threads of a block of a product: two warpgroups that compute and one that loads.
const THREADS: u32 = 384;

// SAFETY: `Tile` is laid out as the kernels' struct of the same name, without padding.
unsafe impl DeviceRepr for Tile {}

/// All tiles of a kind of batch, one list behind the other.
pub(super) struct Deals {
    clusters: usize,
    known: Vec<Dealt>,
    pub(super) tiles: Vec<Tile>,
    pub(super) first: Vec<i32>,
}

/// A deal, and where it lies in the lists of all.
pub(super) struct Dealt {
    region: Region,
    count: usize,
    width: Width,
    clusters: usize,
    tiles_from: usize,
    first_from: usize,
}

impl Deals {
    pub(super) fn new(clusters: usize) -> Self {
        Self {
            clusters,
            known: Vec::new(),
            tiles: Vec::new(),
            first: Vec::new(),
        }
    }

    /// Deals a region of so many matrices, unless it is known.
    pub(super) fn add(&mut self, region: Region, count: usize) {
        let known = |dealt: &Dealt| dealt.region == region && dealt.count == count;
        if self.known.iter().any(known) {
            return;
        }
        let deal = Deal::new(region, count, self.clusters);
        self.known.push(Dealt {
            region,
            count,
            width: deal.width,
            clusters: deal.clusters(),
            tiles_from: self.tiles.len(),
            first_from: self.first.len(),
        });
        self.tiles.extend(deal.tiles);
        self.first.extend(deal.first);
    }

    pub(super) fn of(&self, region: Region, count: usize) -> &Dealt {
        let same = |dealt: &&Dealt| dealt.region == region && dealt.count == count;
        let known = self.known.iter().find(same);
        known.expect("the regions of all products are dealt first")
    }
}

/// A product as the kernels take it.
pub(super) struct Launch {
    function: CudaFunction,
    grid: Grid,
    maps: [CUtensorMap; 3],
    tiles: u64,
    first: u64,
    k_blocks: i32,
    scalars: Scalars,
}

impl Launch {
    /// `tiles` and `first` are the addresses of the lists of all deals.
    pub(super) fn new(
        modules: &Modules,
        dtype: DType,
        step: &Step,
        dealt: &Dealt,
        tiles: u64,
        first: u64,
    ) -> Result<Self> {
        let op = match step.op {
            Op::Symmetric => "symmetric",
            Op::Apply => "apply",
            Op::ApplyTransposed => "apply_transposed",
        };
        let columns = dealt.width.kernel();
        let name = format!("newton_schulz_{op}_{}_{columns}", dtype.as_str());
        let shared_bytes = match columns {
            256 => 230_464,
            128 => 230_496,
            _ => 230_528,
        };
        Ok(Self {
            function: modules.product(&name, shared_bytes)?,
            grid: Grid {
                blocks: (2 * dealt.clusters as u32, 1),
                threads: THREADS,
                shared_bytes,
            },
            maps: [step.a.map(dtype)?, step.b.map(dtype)?, step.d.map(dtype)?],
            tiles: tiles + (dealt.tiles_from * size_of::<Tile>()) as u64,
            first: first + (dealt.first_from * size_of::<i32>()) as u64,
            k_blocks: step.a.cols.div_ceil(64) as i32,
            scalars: step.scalars,
        })
    }

    /// Puts the product on a stream, with its result in the stack of a step, or in another one.
    pub(super) fn launch(&self, stream: &CudaStream, other: Option<&CUtensorMap>) -> Result<()> {
        let [a, b, d] = &self.maps;
        let d = other.unwrap_or(d);
        let mut arguments = [
            argument(a),
            argument(b),
            argument(d),
            argument(&self.tiles),
            argument(&self.first),
            argument(&self.k_blocks),
            argument(&self.scalars),
        ];
        // SAFETY: `newton_schulz_*(a, b, d, tiles, first, k_blocks, scalars)`: the maps are of stacks
        // in the workspace or of results of their size, d is neither a nor b, `first` has an entry
        // more than there are clusters, and the kernels store within their maps.
        unsafe { launch(stream, &self.function, self.grid, &mut arguments) }
    }
}
