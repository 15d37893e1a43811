//! How a product is cut into pairs of tiles.

use super::tiles::{BLOCK, Pair, ROWS, Region, Shape, Tile, Width};

/// Rows of a band: of the two tiles of a pair.
const BAND: usize = 2 * ROWS;
/// Pairs that run at about the same time share rows and columns in the L2 if they come from a square
/// of this many elements a side.
const SQUARE: usize = 8 * BAND;

/// A way to cut a region. All give the same bits, in different times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cut {
    pub(super) width: Width,
    /// So many bands of each matrix, of those that come last, in pieces of 192 columns.
    pub(super) narrow_bands: usize,
    /// So many pairs below the diagonal, over all matrices, in halves of 128 columns.
    pub(super) halved: usize,
    /// The diagonal of two bands as two pairs: the lower tiles of both, and the upper ones, of half
    /// the width.
    pub(super) crossed: bool,
}

impl Cut {
    pub(super) fn plain(width: Width) -> Self {
        Self {
            width,
            narrow_bands: 0,
            halved: 0,
            crossed: false,
        }
    }
}

/// The pairs that make up the region of each of `batch` matrices.
pub(super) fn pairs(region: Region, batch: usize, cut: Cut) -> Vec<Pair> {
    let mut cutter = Cutter {
        region,
        cut,
        narrow_left: cut.narrow_bands,
        halved_left: cut.halved,
        pairs: Vec::new(),
    };
    for matrix in 0..batch {
        cutter.matrix(matrix);
    }
    cutter.pairs
}

/// The pairs of a symmetric n × n region of A Aᵀ in tiles of 64 × 64: of `Half` ones below the diagonal
/// and `Twins` on it. They take less time than those of 128 × 64, and there are more of them.
pub(super) fn small_pairs(n: usize, batch: usize) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for matrix in 0..batch {
        let mut single = Vec::new();
        below_diagonal(n, matrix, BLOCK, Shape::Half, &mut pairs, &mut single);
        single.extend((0..n).step_by(2 * BLOCK).map(|at| {
            let tile = Tile::new(at, at, matrix, BLOCK, 0);
            tile.shaped(Shape::Twins)
        }));
        join(single, n, Shape::Half, &mut pairs);
    }
    pairs
}

/// The pairs of a symmetric n × n region of A Aᵀ in tiles of which each takes the same time: of 128 × 128
/// below the diagonal. A tile on it has three blocks of 64 × 64 below or on the diagonal: the lower two
/// are half a `Strips`, the upper one a quarter of a `Quads`.
pub(super) fn even_pairs(n: usize, batch: usize) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for matrix in 0..batch {
        let mut single = Vec::new();
        below_diagonal(n, matrix, ROWS, Shape::Whole, &mut pairs, &mut single);
        for (shape, rows_of_tiles) in [(Shape::Strips, 2), (Shape::Quads, 4)] {
            single.extend((0..n).step_by(rows_of_tiles * ROWS).map(|at| {
                let tile = Tile::new(at, at, matrix, ROWS, 0);
                tile.shaped(shape)
            }));
        }
        join(single, n, Shape::Whole, &mut pairs);
    }
    pairs
}

/// The tiles of `side` × `side` below the diagonal: two below one another load B together, one may be left
/// in each column.
fn below_diagonal(
    n: usize,
    matrix: usize,
    side: usize,
    shape: Shape,
    pairs: &mut Vec<Pair>,
    single: &mut Vec<Tile>,
) {
    for column in (0..n).step_by(side) {
        let tile = |row, shared| Tile::new(row, column, matrix, side, shared).shaped(shape);
        let rows: Vec<_> = (column + side..n).step_by(side).collect();
        for rows in rows.chunks(2) {
            match *rows {
                [a, b] => pairs.push([tile(a, side), tile(b, side)]),
                [a] => single.push(tile(a, 0)),
                _ => {}
            }
        }
    }
}

/// Pairs of tiles of one matrix that share nothing, the last one with one of which nothing is within n rows.
fn join(mut single: Vec<Tile>, n: usize, shape: Shape, pairs: &mut Vec<Pair>) {
    if let [.., last] = single[..]
        && !single.len().is_multiple_of(2)
    {
        let outside = Tile::new(n.next_multiple_of(ROWS), 0, last.matrix as usize, BLOCK, 0);
        single.push(outside.shaped(shape));
    }
    pairs.extend(single.as_chunks().0);
}

/// The pairs of a symmetric n × n region in tiles of at most 160 columns, which take less time than
/// those of 192, where a product has not many more tiles than there are blocks. The two rows of tiles
/// of a band share B left of the diagonal's blocks; three tiles of 128 × 128 make up each of these.
pub(super) fn medium_pairs(n: usize, batch: usize) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for matrix in 0..batch {
        let mut single = Vec::new();
        for row in (0..n).step_by(BAND) {
            let mut column = 0;
            while column < row {
                let left = row - column;
                let within_block = !column.is_multiple_of(BLOCK);
                // Two of 160 are five blocks.
                let columns = if within_block || left >= 320 {
                    160
                } else {
                    left.min(ROWS)
                };
                let tile = |row| Tile::new(row, column, matrix, columns, columns);
                pairs.push([tile(row), tile(row + ROWS)]);
                column += columns;
            }
            for (down, across) in [(0, 0), (ROWS, 0), (ROWS, ROWS)] {
                if row + down < n {
                    let columns = (n - row - across).next_multiple_of(BLOCK).min(ROWS);
                    single.push(Tile::new(row + down, row + across, matrix, columns, 0));
                }
            }
        }
        join(single, n, Shape::Whole, &mut pairs);
    }
    pairs
}

struct Cutter {
    region: Region,
    cut: Cut,
    narrow_left: usize,
    halved_left: usize,
    pairs: Vec<Pair>,
}

impl Cutter {
    fn rows(&self) -> usize {
        match self.region {
            Region::Symmetric { n } => n,
            Region::Full { rows, .. } => rows,
        }
    }

    fn is_symmetric(&self) -> bool {
        matches!(self.region, Region::Symmetric { .. })
    }

    /// Where the columns of a band end.
    fn end(&self, band: usize) -> usize {
        match self.region {
            Region::Symmetric { n } => n.min((band + 1) * BAND),
            Region::Full { cols, .. } => cols,
        }
    }

    fn matrix(&mut self, matrix: usize) {
        let bands = self.rows().div_ceil(BAND);
        let columns = self.end(bands - 1);
        let widths = self.widths(bands);
        let width = self.cut.width.columns();
        let square = SQUARE / width * width;
        let mut crossing = Vec::new();
        for first in (0..bands).step_by(SQUARE / BAND) {
            for left in (0..columns).step_by(square) {
                for (band, own) in widths.iter().enumerate().skip(first).take(SQUARE / BAND) {
                    let own = own.columns();
                    let end = self.end(band);
                    let right = if own == width {
                        end.min(left + square)
                    } else if left == 0 {
                        end
                    } else {
                        continue;
                    };
                    for column in (left..right).step_by(own) {
                        self.piece(matrix, band, column, own, end, &mut crossing);
                    }
                }
            }
        }
        self.cross(matrix, &crossing);
    }

    /// The width of each band's pieces.
    fn widths(&mut self, bands: usize) -> Vec<Width> {
        let mut widths = vec![self.cut.width; bands];
        for band in (0..bands).rev() {
            // Pieces of 192 fill a symmetric band whose end is a multiple of them.
            let fits = !self.is_symmetric() || ((band + 1) * BAND).is_multiple_of(192);
            if self.narrow_left > 0 && fits {
                widths[band] = Width::W192;
                self.narrow_left -= 1;
            }
        }
        widths
    }

    fn piece(
        &mut self,
        matrix: usize,
        band: usize,
        column: usize,
        width: usize,
        end: usize,
        crossing: &mut Vec<usize>,
    ) {
        let row = band * BAND;
        let full = Width::W256.columns();
        let crosses = self.cut.crossed && self.is_symmetric() && width == full && column == row;
        if crosses && column + ROWS < self.rows() {
            crossing.push(band);
            return;
        }
        let columns = width.min((end - column).next_multiple_of(BLOCK));
        if columns == full && self.halved_left > 0 && column + full <= row {
            self.halved_left -= 1;
            for column in [column, column + full / 2] {
                self.pair(matrix, row, column, full / 2, full / 2);
            }
            return;
        }
        let upper = if self.is_symmetric() {
            // Up to the last row of the upper tile; above the diagonal nothing is computed.
            columns.min((row + ROWS).saturating_sub(column)).max(BLOCK)
        } else {
            columns
        };
        self.pair(matrix, row, column, upper, columns);
    }

    /// Two tiles below one another, which load B together.
    fn pair(&mut self, matrix: usize, row: usize, column: usize, upper: usize, lower: usize) {
        let tile = |row, columns| Tile::new(row, column, matrix, columns, lower);
        self.pairs.push([tile(row, upper), tile(row + ROWS, lower)]);
    }

    /// The tiles on the diagonal of these bands.
    fn cross(&mut self, matrix: usize, bands: &[usize]) {
        for bands in bands.chunks(2) {
            let on_diagonal = |band: &usize, down: usize, columns: usize| {
                Tile::new(band * BAND + down, band * BAND, matrix, columns, 0)
            };
            match bands {
                [p, q] => {
                    self.pairs
                        .push([on_diagonal(p, ROWS, BAND), on_diagonal(q, ROWS, BAND)]);
                    self.pairs
                        .push([on_diagonal(p, 0, ROWS), on_diagonal(q, 0, ROWS)]);
                }
                [p] => self.pair(matrix, p * BAND, p * BAND, ROWS, BAND),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hopper::tiles::HALF_BLOCK;

    /// How often each 64 × 32 block of each matrix is stored by the kernels.
    fn stored(region: Region, batch: usize, pairs: &[Pair]) -> Vec<u32> {
        let (rows, cols, symmetric) = match region {
            Region::Symmetric { n } => (n, n, true),
            Region::Full { rows, cols } => (rows, cols, false),
        };
        let (down, across) = (rows.div_ceil(BLOCK), 2 * cols.div_ceil(BLOCK));
        let mut stored = vec![0; batch * down * across];
        for tile in pairs.iter().flatten() {
            for part in tile.parts() {
                let (r, column) = (part.row / BLOCK, part.column / HALF_BLOCK);
                if r >= down {
                    continue;
                }
                for c in column..(column + part.columns / HALF_BLOCK).min(across) {
                    if !symmetric || c / 2 <= r {
                        stored[(tile.matrix as usize * down + r) * across + c] += 1;
                    }
                }
            }
        }
        stored
    }

    fn check(region: Region, batch: usize, cut: Cut) {
        let pairs = pairs(region, batch, cut);
        check_pairs(&pairs, region, batch, cut.width, &format!("{cut:?}"));
    }

    fn check_pairs(pairs: &[Pair], region: Region, batch: usize, width: Width, cut: &str) {
        let case = format!("{region:?} x {batch}, {cut}");
        for [a, b] in pairs {
            for tile in [a, b] {
                let columns = tile.columns();
                assert_eq!(tile.width().columns(), columns, "{case}");
                assert!(tile.width() <= width.max(Width::W192), "{case}");
                assert!(tile.row % 64 == 0, "{case}");
                if columns == 160 {
                    let end = tile.column + columns as i32;
                    assert!(tile.column % 32 == 0 && end <= tile.row, "{case}");
                } else {
                    assert!(tile.column % 64 == 0 && columns % 64 == 0, "{case}");
                }
                assert!(
                    tile.shared == 0 || BLOCK * usize::from(tile.shared) >= columns,
                    "{case}"
                );
                assert!(tile.blocks() <= 6, "{case}");
            }
            assert_eq!(a.shared, b.shared, "{case}");
            if a.shared > 0 {
                assert_eq!((a.column, a.matrix), (b.column, b.matrix), "{case}");
                assert_eq!(a.shape(), b.shape(), "{case}");
            }
        }
        let stored = stored(region, batch, pairs);
        let symmetric = matches!(region, Region::Symmetric { .. });
        let across = match region {
            Region::Symmetric { n } => 2 * n.div_ceil(BLOCK),
            Region::Full { cols, .. } => 2 * cols.div_ceil(BLOCK),
        };
        let down = stored.len() / batch / across;
        for (i, times) in stored.iter().enumerate() {
            let (r, c) = (i / across % down, i % across);
            assert_eq!(
                *times,
                u32::from(!symmetric || c / 2 <= r),
                "block ({r}, {c}), {case}"
            );
        }
    }

    const SIDES: [usize; 14] = [
        1, 63, 64, 65, 128, 129, 200, 256, 257, 511, 768, 1000, 2049, 2304,
    ];

    #[test]
    fn every_block_is_stored_once() {
        for n in SIDES {
            for width in Width::ALL {
                for batch in [1, 3] {
                    check(Region::Symmetric { n }, batch, Cut::plain(width));
                    for cols in [n, n + 70, 3 * n] {
                        check(Region::Full { rows: n, cols }, batch, Cut::plain(width));
                    }
                }
            }
        }
    }

    /// As `pairs_of` cuts a symmetric region of n rows of each matrix of a batch.
    fn check_symmetric(pairs_of: fn(usize, usize) -> Vec<Pair>, width: Width) {
        for n in SIDES {
            for batch in [1, 3] {
                let region = Region::Symmetric { n };
                check_pairs(
                    &pairs_of(n, batch),
                    region,
                    batch,
                    width,
                    &format!("{width:?}"),
                );
            }
        }
    }

    #[test]
    fn every_block_is_stored_once_in_small_tiles() {
        check_symmetric(small_pairs, Width::W64);
        assert_eq!(small_pairs(1024, 1).len(), 64);
    }

    #[test]
    fn every_block_is_stored_once_in_even_tiles() {
        check_symmetric(even_pairs, Width::W128);
        let pairs = even_pairs(2048, 1);
        assert_eq!(pairs.len(), 66);
        // As much as there is up to the diagonal, in tiles of one size.
        let elements = |tile: &Tile| tile.elements(true);
        assert!(
            pairs
                .iter()
                .flatten()
                .all(|tile| elements(tile) == ROWS * ROWS)
        );
    }

    #[test]
    fn every_block_is_stored_once_in_medium_tiles() {
        check_symmetric(medium_pairs, Width::W160);
        assert_eq!(medium_pairs(2048, 1).len(), 60);
    }

    #[test]
    fn every_block_is_stored_once_however_the_region_is_cut() {
        for n in SIDES {
            for (narrow_bands, halved) in [(1, 0), (5, 0), (0, 1), (0, 7), (2, 3)] {
                for crossed in [false, true] {
                    let cut = Cut {
                        width: Width::W256,
                        narrow_bands,
                        halved,
                        crossed,
                    };
                    check(Region::Symmetric { n }, 2, cut);
                    check(
                        Region::Full {
                            rows: n,
                            cols: 2 * n + 100,
                        },
                        2,
                        cut,
                    );
                }
            }
        }
    }
}
