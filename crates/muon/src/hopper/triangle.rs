//! What is stored of a symmetric stack, and how a product reads it.
//!
//! Of each row the blocks up to the diagonal and a few to its right are stored. What lies further right is
//! read from below the diagonal, down the columns. A tile reads all of its rows of an operand along them up
//! to one block of K, and down the columns from there on, so the few must reach as far right as its last row
//! does.

use super::program::{Buffer, Product};
use super::tiles::{BLOCK, Pair, Shape};

/// So many blocks of each row, right of the diagonal's, are stored; as `kNear` in
/// `kernels/hopper/products.cu`. Rows that are loaded together are at most four blocks, or four of every
/// other block on the diagonal.
const NEAR: usize = 3;

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
    fn down_from(self, row: i32) -> u16 {
        match self {
            Self::Along => u16::MAX, // never: there are no more blocks
            Self::Down => 0,
            Self::Symmetric => u16::try_from(row as usize / BLOCK + NEAR + 1).unwrap_or(u16::MAX),
        }
    }
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

    /// For each tile of a pair the blocks of K from which on its A and its B are read down the columns; of
    /// a symmetric product that of B is no later than that of A.
    pub(crate) fn down_from(self, pair: &Pair) -> [[u16; 2]; 2] {
        let first = pair[0].row.min(pair[1].row);
        pair.map(|tile| {
            let of_b = match tile.shape() {
                // Tiles that share B read it alike. Columns right of the diagonal of a tile's rows are not
                // used, so they may be read where nothing is stored.
                Shape::Whole | Shape::Half if tile.shared > 0 => tile.column.min(first),
                Shape::Whole | Shape::Half => tile.column.min(tile.row),
                Shape::Twins | Shape::Strips | Shape::Quads => tile.row,
            };
            [self.a.down_from(tile.row), self.b.down_from(of_b)]
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::hopper::program::program;
    use crate::hopper::schedule::Schedule;
    use crate::hopper::tiles::{HALF_BLOCK, Part, Tile};
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
    fn stored(schedule: &Schedule, program: &[Product]) -> BTreeSet<Place> {
        let mut stored = BTreeSet::new();
        for tile in &schedule.tiles {
            let product = usize::from(tile.product).min(program.len() - 1);
            if !program[product].is_symmetric() {
                continue;
            }
            for part in parts(tile, true) {
                for c in (0..part.columns).step_by(BLOCK) {
                    let column = part.column + c.min(part.columns - BLOCK);
                    for (down, across) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                        let r = part.row + down * HALF_BLOCK;
                        let c = column + across * HALF_BLOCK;
                        stored.insert((tile.product, tile.matrix, r, c));
                        if part.row - column < (NEAR + 1) * BLOCK {
                            stored.insert((tile.product, tile.matrix, c, r));
                        }
                    }
                }
            }
        }
        stored
    }

    /// What is read of symmetric stacks for a part, down the columns where it is said to be.
    fn check(pair: &Pair, n: usize, program: &[Product], stored: &BTreeSet<Place>) {
        let index = usize::from(pair[0].product).min(program.len() - 1);
        let product = program[index];
        let all_down = Reads::of(&product).down_from(pair);
        if pair[0].shared > 0 {
            assert_eq!(all_down[0][1], all_down[1][1], "{pair:?}");
        }
        for (tile, [a_down, b_down]) in pair.iter().zip(all_down) {
            assert!(b_down <= a_down, "{tile:?}");
            for part in parts(tile, product.is_symmetric()) {
                let of_a = (product.a, part.row, BLOCK, a_down);
                let of_b = (product.b, part.column, part.columns, b_down);
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
        for (wide, n, m) in [
            (1, 100, 200),
            (1, 512, 512),
            (1, 1024, 4096),
            (4, 568, 2084),
            (12, 768, 768),
            (2, 886, 2167),
            (1, 1157, 1950),
            (1, 2048, 2048),
            (1, 2304, 2400),
        ] {
            for method in [Method::Standard, Method::Gram] {
                let program = program(method, &rows);
                let schedule = Schedule::new(
                    &program,
                    Batch {
                        n,
                        m,
                        wide,
                        tall: 0,
                    },
                    CLUSTERS,
                );
                let stored = stored(&schedule, &program);
                for pair in schedule.tiles.as_chunks().0 {
                    check(pair, n, &program, &stored);
                }
            }
        }
    }
}
