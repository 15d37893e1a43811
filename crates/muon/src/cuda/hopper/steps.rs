//! The products of an iteration as the kernels take them, and the stacks that they are of.

use candle_core::{DType, Result};
use cudarc::driver::DeviceRepr;
use cudarc::driver::sys::CUtensorMap;

use super::kernel::Plain;
use super::maps::Stack;
use crate::hopper::program::{Buffer, Product, Scalars, waits};
use crate::hopper::schedule::Early;
use crate::hopper::tiles::{BLOCK, Tile};
use crate::hopper::triangle::{DownFrom, Reads};
use crate::hopper::workspace::{Batch, Workspace};

/// The most products that one waits for.
const MOST_WAITS: usize = 3;

/// What the kernels compute, by their numbers.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
enum Op {
    Symmetric,
    Apply,
    ApplyTransposed,
}

/// A product, laid out as `Product` in `kernels/hopper/tasks.cuh`.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(16))]
pub(super) struct Factors {
    scalars: Scalars,
    waits: [i32; MOST_WAITS],
    padding: i32,
}

// SAFETY: it is laid out as the kernels' struct, and its padding is explicit.
unsafe impl DeviceRepr for Factors {}
const _: () = assert!(size_of::<Factors>() == 32);

/// A product as the kernels compute it.
pub(super) struct Step {
    pub(super) factors: Factors,
    op: Op,
    /// Its stacks, by their maps.
    a: u8,
    b: u8,
    d: u8,
    reads: Reads,
    k_blocks: i32,
    /// The matrix that is the first one of D's stack.
    first: i32,
}

/// A tile with what it takes to load and to store it, laid out as `Task` in `kernels/hopper/tasks.cuh`.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(16))]
pub(super) struct Task {
    tile: Tile,
    /// Its [`Op`] in the lower four bits, its [`Early`] in the upper ones.
    op: u8,
    a: u8,
    b: u8,
    d: u8,
    k_blocks: i32,
    place: i32,
    down_from: DownFrom,
}

// SAFETY: it is laid out as the kernels' struct, without padding.
unsafe impl DeviceRepr for Task {}
const _: () = assert!(
    size_of::<Task>() == 32
        && std::mem::offset_of!(Task, op) == 16
        && std::mem::offset_of!(Task, down_from) == 28
);

impl Step {
    /// With a tile of this product, where `near` blocks right of the diagonal are stored.
    pub(super) fn task(&self, tile: Tile, near: usize, early: Early) -> Task {
        let Self {
            op,
            a,
            b,
            d,
            k_blocks,
            first,
            reads,
            ..
        } = *self;
        Task {
            tile,
            op: op as u8 | (early as u8) << 4,
            a,
            b,
            d,
            k_blocks,
            place: tile.matrix - first,
            down_from: reads.down_from(&tile, near),
        }
    }
}

/// Maps of the stacks of a workspace, by their [`Buffer`], and of the results of wide and of tall
/// matrices, laid out as `Maps` in `kernels/hopper/tasks.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Maps([CUtensorMap; Buffer::ALL.len() + 2]);

// SAFETY: maps are words alone.
unsafe impl Plain for Maps {}

impl Maps {
    /// The same with other maps of results.
    pub(super) fn with_results(mut self, which: usize, map: CUtensorMap) -> Self {
        self.0[Buffer::ALL.len() + which] = map;
        self
    }
}

/// The stacks of a workspace.
pub(super) struct Stacks {
    pub(super) base: u64,
    pub(super) batch: Batch,
    pub(super) workspace: Workspace,
}

impl Stacks {
    /// All matrices of a stack, tall ones as their transposes.
    pub(super) fn all(&self, buffer: Buffer) -> Stack {
        let Batch { n, m, .. } = self.batch;
        let cols = if buffer.is_symmetric() { n } else { m };
        Stack {
            address: self.base + self.workspace.start(buffer) as u64,
            count: self.batch.count(),
            rows: n,
            cols,
        }
    }

    /// A program's results: wide ones, and tall ones, no longer transposed.
    pub(super) fn results(&self, program: &[Product]) -> [Stack; 2] {
        let Batch { n, m, wide, tall } = self.batch;
        let last = program.last().expect("an iteration has a step");
        let wide_results = self.all(last.d).take(wide);
        let tall_results = Stack {
            address: self.base + self.workspace.tall_results(last.d) as u64,
            count: tall,
            rows: m,
            cols: n,
        };
        [wide_results, tall_results]
    }

    /// Where there are no wide or no tall matrices, nothing looks at the map of their results.
    pub(super) fn maps(&self, results: [Stack; 2], dtype: DType) -> Result<Maps> {
        let mut maps = [CUtensorMap { opaque: [0; 16] }; Buffer::ALL.len() + 2];
        let stacks = Buffer::ALL.map(|buffer| self.all(buffer));
        for (map, stack) in maps.iter_mut().zip(stacks.into_iter().chain(results)) {
            if stack.count > 0 {
                *map = stack.map(dtype)?;
            }
        }
        Ok(Maps(maps))
    }

    /// The products of a program. The last one is two, of wide matrices, and of tall ones with
    /// transposed results.
    pub(super) fn steps(&self, program: &[Product]) -> Vec<Step> {
        let wide = self.batch.wide;
        let results = Buffer::ALL.len() as u8;
        let mut steps: Vec<_> = program
            .iter()
            .zip(waits(program))
            .map(|(product, before)| {
                let mut waits = [-1; MOST_WAITS];
                assert!(before.len() <= MOST_WAITS, "{before:?}");
                for (wait, other) in waits.iter_mut().zip(before) {
                    *wait = other as i32;
                }
                Step {
                    factors: Factors {
                        scalars: product.scalars,
                        waits,
                        padding: 0,
                    },
                    op: if product.is_symmetric() {
                        Op::Symmetric
                    } else {
                        Op::Apply
                    },
                    a: product.a as u8,
                    b: product.b as u8,
                    d: product.d as u8,
                    reads: Reads::of(product),
                    k_blocks: self.all(product.a).cols.div_ceil(BLOCK) as i32,
                    first: 0,
                }
            })
            .collect();
        let last = steps.last_mut().expect("an iteration has a step");
        last.d = results;
        let of_tall = Step {
            op: Op::ApplyTransposed,
            d: results + 1,
            first: wide as i32,
            ..*last
        };
        steps.push(of_tall);
        steps
    }
}
