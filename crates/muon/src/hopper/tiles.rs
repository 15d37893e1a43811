//! The tiles of a product, in the pairs that the two blocks of a cluster compute together.

/// Rows of a tile.
pub(super) const ROWS: usize = 128;
/// Side of what is loaded and stored at once.
pub(crate) const BLOCK: usize = 64;
/// What the columns of tiles are multiples of.
pub(super) const HALF_BLOCK: usize = BLOCK / 2;

/// What is computed of a result: of a symmetric one the tiles on and below the diagonal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Region {
    /// n × n.
    Symmetric { n: usize },
    /// rows × cols.
    Full { rows: usize, cols: usize },
}

/// The most columns of a product's tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Width {
    W64,
    W128,
    W160,
    W192,
    W256,
}

impl Width {
    /// Those into which any region can be cut.
    pub(crate) const ALL: [Self; 4] = [Self::W64, Self::W128, Self::W192, Self::W256];

    pub(crate) fn columns(self) -> usize {
        match self {
            Self::W64 => 64,
            Self::W128 => 128,
            Self::W160 => 160,
            Self::W192 => 192,
            Self::W256 => 256,
        }
    }

    /// Time that a tile takes, measured on an H200, in hundredths of that of 256 columns.
    pub(super) fn cost(self) -> u64 {
        match self {
            Self::W64 => 36,
            Self::W128 => 55,
            Self::W160 => 67,
            Self::W192 => 78,
            Self::W256 => 100,
        }
    }
}

/// A block's part of a result, laid out as `Tile` in `kernels/hopper/tasks.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(16))]
pub(crate) struct Tile {
    pub(crate) row: i32,
    pub(crate) column: i32,
    pub(crate) matrix: i32,
    /// Its place in a program.
    pub(crate) product: u16,
    /// Its columns in units of 32, and 16 times its [`Shape`].
    pub(super) extent: u8,
    /// Blocks of B that the pair, of one shape, loads together, enough for each; 0 if it does not.
    pub(crate) shared: u8,
}

/// What a tile has of a region from its row and column on, numbered as in `kernels/hopper/tasks.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Shape {
    /// 128 rows.
    Whole,
    /// 64 rows and columns.
    Half,
    /// Two of 64 × 64 on the diagonal, one after the other.
    Twins,
    /// Two of 64 × 128 that end with the diagonal's block, 128 rows apart, from the row's 64th on.
    Strips,
    /// Four of 64 × 64 on the diagonal, 128 rows apart.
    Quads,
}

/// Columns of 64 rows, which a warpgroup computes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) row: usize,
    pub(super) column: usize,
    pub(super) columns: usize,
}

impl Part {
    /// The columns that are computed of it: of a symmetric product those up to the diagonal, not less than a
    /// block.
    pub(super) fn computed(self, is_symmetric: bool) -> Self {
        if !is_symmetric {
            return self;
        }
        let to_diagonal = (self.row + BLOCK).saturating_sub(self.column);
        Self {
            columns: self.columns.min(to_diagonal.max(BLOCK)),
            ..self
        }
    }
}

impl Tile {
    pub(super) fn new(
        row: usize,
        column: usize,
        matrix: usize,
        columns: usize,
        shared: usize,
    ) -> Self {
        // All far below the limits: n and m are checked against i32 before anything is dealt.
        Self {
            row: row as i32,
            column: column as i32,
            matrix: matrix as i32,
            product: 0,
            extent: (columns / HALF_BLOCK) as u8 | (Shape::Whole as u8) << 4,
            shared: shared.div_ceil(BLOCK) as u8,
        }
    }

    pub(super) fn shaped(self, shape: Shape) -> Self {
        Self {
            extent: self.extent & 15 | (shape as u8) << 4,
            ..self
        }
    }

    pub(super) fn columns(&self) -> usize {
        HALF_BLOCK * usize::from(self.extent & 15)
    }

    pub(super) fn width(&self) -> Width {
        match self.columns() {
            64 => Width::W64,
            128 => Width::W128,
            160 => Width::W160,
            192 => Width::W192,
            _ => Width::W256,
        }
    }

    pub(super) fn parts(&self) -> Vec<Part> {
        let (row, column) = (self.row as usize, self.column as usize);
        let part = |row, column, columns| Part {
            row,
            column,
            columns,
        };
        let on_diagonal = |at: usize| part(at, at, BLOCK);
        match self.shape() {
            Shape::Whole => [row, row + BLOCK]
                .map(|row| part(row, column, self.columns()))
                .to_vec(),
            Shape::Half => vec![part(row, column, BLOCK)],
            Shape::Twins => [row, row + BLOCK].map(on_diagonal).to_vec(),
            Shape::Strips => [row, row + ROWS]
                .map(|at| part(at + BLOCK, at, ROWS))
                .to_vec(),
            Shape::Quads => (0..4).map(|i| on_diagonal(row + i * ROWS)).collect(),
        }
    }

    /// Elements that are computed of it: of a symmetric product about those up to the diagonal.
    pub(super) fn elements(&self, is_symmetric: bool) -> usize {
        let columns = |part: Part| part.computed(is_symmetric).columns;
        BLOCK * self.parts().into_iter().map(columns).sum::<usize>()
    }

    /// Blocks of A and B that are loaded at once for it.
    pub(super) fn blocks(&self) -> usize {
        match self.shape() {
            Shape::Whole => {
                let own = self.columns().div_ceil(BLOCK);
                ROWS / BLOCK + own.max(self.shared.into())
            }
            Shape::Half | Shape::Twins => 2,
            Shape::Strips | Shape::Quads => 4,
        }
    }

    fn loads_b(&self) -> bool {
        matches!(self.shape(), Shape::Whole | Shape::Half)
    }

    /// The first column that B is loaded for: the first row, where A is all that is loaded.
    pub(super) fn first_of_b(&self) -> i32 {
        if self.loads_b() {
            self.column
        } else {
            self.row
        }
    }

    /// How many blocks apart the first and the last are that it uses, of A and of B.
    pub(super) fn blocks_apart(&self) -> [usize; 2] {
        let of_a = match self.shape() {
            Shape::Half => 0,
            Shape::Whole | Shape::Twins => 1,
            Shape::Strips => 3,
            Shape::Quads => 6,
        };
        let of_b = if self.loads_b() {
            let (first, count) = (self.column as usize, self.columns());
            (first + count - 1) / BLOCK - first / BLOCK
        } else {
            of_a
        };
        [of_a, of_b]
    }

    /// How many warpgroups of a block compute and store a part of it.
    pub(super) fn warpgroups(&self) -> u32 {
        if self.shape() == Shape::Half { 1 } else { 2 }
    }

    pub(super) fn shape(&self) -> Shape {
        match self.extent >> 4 {
            0 => Shape::Whole,
            1 => Shape::Half,
            2 => Shape::Twins,
            3 => Shape::Strips,
            _ => Shape::Quads,
        }
    }

    /// Time that it takes, measured on an H200, in hundredths of that of 256 columns.
    pub(super) fn cost(&self) -> u64 {
        match self.shape() {
            Shape::Half => 25,
            Shape::Twins => 29,
            Shape::Whole | Shape::Strips | Shape::Quads => self.width().cost(),
        }
    }
}

/// The tiles of the two blocks of a cluster.
pub(super) type Pair = [Tile; 2];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_is_laid_out_as_the_kernels_read_it() {
        assert_eq!((size_of::<Tile>(), align_of::<Tile>()), (16, 16));
        assert_eq!(std::mem::offset_of!(Tile, product), 12);
        assert_eq!(std::mem::offset_of!(Tile, extent), 14);
        assert_eq!(std::mem::offset_of!(Tile, shared), 15);
    }
}
