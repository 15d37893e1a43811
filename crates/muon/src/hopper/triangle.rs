//! What is stored of a symmetric stack, and how a product reads it.
//!
//! Of each row the blocks up to the diagonal are stored, and few or none to its right. What lies further right
//! is read from below the diagonal, down the columns. A tile reads all of its rows of an operand along them up
//! to one block of K, and down the columns from there on: its first rows up to the few blocks right of the
//! diagonal, and its last ones, further down, from at most so many blocks above it.

use super::program::{Buffer, Product};
use super::schedule::{Schedule, product_of};
use super::tiles::{BLOCK, Tile};

/// The most rows or columns of a matrix: tasks count blocks of K in 16 bits.
pub(crate) const LONGEST_SIDE: usize = u16::MAX as usize * BLOCK;

/// How an operand is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Read {
    /// K along its rows: X of X Xᵀ.
    Along,
    /// K down its columns: X of QX.
    Down,
    /// A symmetric stack.
    Symmetric,
}

impl Read {
    /// From which block of K on rows that start at this one are read down the columns.
    fn down_from(self, row: i32, near: usize) -> u16 {
        match self {
            Self::Along => u16::MAX, // never: there are no more blocks
            Self::Down => 0,
            Self::Symmetric => u16::try_from(row as usize / BLOCK + near + 1).unwrap_or(u16::MAX),
        }
    }
}

/// The blocks of K from which on A and B of a tile are read down their columns, laid out as the end of `Task`
/// in `kernels/hopper/tasks.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DownFrom {
    a: u16,
    b: u16,
}

/// How a product's A and B are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reads {
    a: Read,
    b: Read,
}

impl Reads {
    pub(crate) fn of(product: &Product) -> Self {
        let unless_symmetric = |operand: Buffer, read| {
            if operand.is_symmetric() {
                Read::Symmetric
            } else {
                read
            }
        };
        let b = if product.is_symmetric() {
            Read::Along
        } else {
            Read::Down
        };
        Self {
            a: unless_symmetric(product.a, Read::Along),
            b: unless_symmetric(product.b, b),
        }
    }

    /// Of a tile, where `near` blocks right of the diagonal are stored; of a symmetric product B is read down its
    /// columns no later than A.
    pub(crate) fn down_from(self, tile: &Tile, near: usize) -> DownFrom {
        let b = self.b.down_from(tile.first_of_b(), near);
        // B would be later only for columns right of the diagonal, where these rows of A are not used.
        let a = self.a.down_from(tile.row, near).max(b);
        DownFrom { a, b }
    }
}

/// How many blocks of each row, right of the diagonal's, must be stored for what the tiles read.
pub(crate) fn near(program: &[Product], schedule: &Schedule) -> usize {
    let blocks_apart = |tile: &Tile| {
        let reads = Reads::of(product_of(program, tile));
        let [of_a, of_b] = tile.blocks_apart();
        let of_symmetric = |read, apart| if read == Read::Symmetric { apart } else { 0 };
        of_symmetric(reads.a, of_a).max(of_symmetric(reads.b, of_b))
    };
    let most = schedule.tiles.iter().map(blocks_apart).max();
    // Of rows d blocks apart the first is read along up to `near` right of its diagonal, and the last down from
    // d - near - 1 right of its own: both are stored if d ≤ 2 near + 1.
    most.unwrap_or(0) / 2
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::hopper::program::program;
    use crate::hopper::tiles::{HALF_BLOCK, Pair, Part};
    use crate::hopper::workspace::Batch;
    use crate::{Coefficients, Method};

    /// Where the 32 × 32 elements are that start at a row and a column of a result.
    type Place = (u16, i32, usize, usize);

    /// What is computed and stored of a tile.
    fn parts(tile: &Tile, is_symmetric: bool) -> impl Iterator<Item = Part> {
        let parts = tile.parts().into_iter();
        let stored = parts.filter(move |part| !is_symmetric || part.column <= part.row);
        stored.map(move |part| part.computed(is_symmetric))
    }

    /// All that `store_block` of the kernels stores of symmetric results.
    fn stored(schedule: &Schedule, program: &[Product], near: usize) -> BTreeSet<Place> {
        let mut stored = BTreeSet::new();
        for tile in &schedule.tiles {
            if !product_of(program, tile).is_symmetric() {
                continue;
            }
            for part in parts(tile, true) {
                for c in (0..part.columns).step_by(BLOCK) {
                    let column = part.column + c.min(part.columns - BLOCK);
                    for (down, across) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                        let r = part.row + down * HALF_BLOCK;
                        let c = column + across * HALF_BLOCK;
                        stored.insert((tile.product, tile.matrix, r, c));
                        if part.row - column < (near + 1) * BLOCK {
                            stored.insert((tile.product, tile.matrix, c, r));
                        }
                    }
                }
            }
        }
        stored
    }

    /// What is read of symmetric stacks for a part, down the columns where it is said to be.
    fn check(pair: &Pair, n: usize, near: usize, program: &[Product], stored: &BTreeSet<Place>) {
        let index = usize::from(pair[0].product).min(program.len() - 1);
        let product = program[index];
        let all_down = pair.map(|tile| Reads::of(&product).down_from(&tile, near));
        if pair[0].shared > 0 {
            assert_eq!(all_down[0].b, all_down[1].b, "{pair:?}");
        }
        for (tile, down_from) in pair.iter().zip(all_down) {
            assert!(down_from.b <= down_from.a, "{tile:?}");
            for part in parts(tile, product.is_symmetric()) {
                let of_a = (product.a, part.row, BLOCK, down_from.a);
                let of_b = (product.b, part.column, part.columns, down_from.b);
                for (operand, across, width, down) in [of_a, of_b] {
                    if !operand.is_symmetric() {
                        continue;
                    }
                    let of_operand = |other: &Product| other.d == operand;
                    let source = program[..index].iter().rposition(of_operand).unwrap();
                    for k in (0..n).step_by(HALF_BLOCK) {
                        for x in (across..across + width).step_by(HALF_BLOCK) {
                            let (r, c) = if k / BLOCK < usize::from(down) {
                                (x, k)
                            } else {
                                (k, x)
                            };
                            assert!(
                                r.max(c) >= n
                                    || stored.contains(&(source as u16, tile.matrix, r, c)),
                                "{product:?}, {tile:?} reads ({r}, {c})"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_read_of_symmetric_stacks_is_stored() {
        const CLUSTERS: usize = 66; // of an H200
        let rows = Coefficients::default().steps(5);
        let mut nears = BTreeSet::new();
        for (wide, tall, n, m) in [
            (1, 0, 100, 200),
            (1, 0, 512, 512),
            (1, 0, 1024, 4096),
            (4, 0, 568, 2084),
            (12, 0, 768, 768),
            (2, 0, 886, 2167),
            (0, 1, 1157, 1950),
            (1, 1, 1536, 1536),
            (0, 1, 1800, 2000),
            (1, 0, 2048, 2048),
            (1, 0, 2304, 2400),
            (1, 2, 2500, 2501),
        ] {
            for method in [Method::Standard, Method::Gram] {
                let program = program(method, &rows);
                let schedule = Schedule::new(&program, Batch { n, m, wide, tall }, CLUSTERS);
                let near = near(&program, &schedule);
                nears.insert(near);
                let stored = stored(&schedule, &program, near);
                for pair in schedule.tiles.as_chunks().0 {
                    check(pair, n, near, &program, &stored);
                }
            }
        }
        assert_eq!(nears, BTreeSet::from([0, 1, 3]));
    }
}
