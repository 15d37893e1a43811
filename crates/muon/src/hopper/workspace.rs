//! Where the matrices of an iteration lie in one allocation, and how many of them at once.

use std::ops::Range;

use super::program::Buffer;
use crate::Method;

/// Bytes of an element of the iteration.
const ELEMENT: usize = 2;
/// What the start of a stack is a multiple of, for tensor maps and vector loads.
const ALIGNMENT: usize = 256;
/// Elements of 16 bytes: what a tensor map's pitch is a multiple of.
const PITCH: usize = 8;
/// Bytes of a part of a sum of squares, and the most parts of a matrix.
const PART: usize = 8;
const MOST_PARTS: usize = 512;

/// Matrices that are iterated together: first `wide` ones, n × m with n ≤ m, then `tall` ones,
/// m × n, which are iterated as their transposes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) n: usize,
    pub(crate) m: usize,
    pub(crate) wide: usize,
    pub(crate) tall: usize,
}

impl Batch {
    pub(crate) fn count(&self) -> usize {
        self.wide + self.tall
    }

    /// Elements between the starts of two rows of n, or of m, columns.
    pub(crate) fn pitch(columns: usize) -> usize {
        columns.next_multiple_of(PITCH)
    }

    /// Into how many parts the sum of squares of a matrix is cut: by its shape alone.
    pub(crate) fn parts(&self) -> usize {
        let elements = self.n * self.m;
        let few = (elements / 8192).clamp(1, 256);
        few.max((elements / 32768).min(MOST_PARTS))
    }

    /// Elements of X or Y of one matrix.
    fn rectangle(&self) -> usize {
        self.n * Self::pitch(self.m)
    }

    /// Elements of the result of a tall matrix.
    fn tall_result(&self) -> usize {
        self.m * Self::pitch(self.n)
    }
}

/// Offsets in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Workspace {
    rectangles: [usize; 2],
    squares: [usize; 5],
    tall_results: TallResults,
    /// The parts of sums of squares.
    pub(crate) parts: usize,
    /// Of all.
    pub(crate) bytes: usize,
}

/// Where the results of tall matrices lie. Matrices of a batch need not keep step, so a result must not lie over what
/// another matrix still reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TallResults {
    /// Each over its own matrix in X or Y, so far from the first one.
    InPlace(usize),
    /// In a stack of their own, for padding makes them longer or shorter than that.
    Apart(usize),
}

impl Workspace {
    pub(crate) fn new(method: Method, batch: Batch) -> Self {
        let mut bytes = 0;
        let mut place = |size: usize| {
            let start = bytes;
            bytes = (start + size).next_multiple_of(ALIGNMENT);
            start
        };
        let rectangle = batch.count() * batch.rectangle() * ELEMENT;
        let square = batch.count() * batch.n * Batch::pitch(batch.n) * ELEMENT;
        let rectangles = [place(rectangle), place(rectangle)];
        // `Standard` needs R and Z alone.
        let gathers = if method == Method::Gram { square } else { 0 };
        let squares = [square, square, gathers, gathers, gathers].map(&mut place);
        let tall_results = if batch.tall_result() == batch.rectangle() {
            TallResults::InPlace(batch.wide * batch.rectangle() * ELEMENT)
        } else {
            TallResults::Apart(place(batch.tall * batch.tall_result() * ELEMENT))
        };
        let parts = place(batch.count() * batch.parts() * PART);
        Self {
            rectangles,
            squares,
            tall_results,
            parts,
            bytes,
        }
    }

    /// Where a stack starts.
    pub(crate) fn start(&self, buffer: Buffer) -> usize {
        match buffer {
            Buffer::X => self.rectangles[0],
            Buffer::Y => self.rectangles[1],
            Buffer::R => self.squares[0],
            Buffer::Z => self.squares[1],
            Buffer::Q => self.squares[2],
            Buffer::T => self.squares[3],
            Buffer::S => self.squares[4],
        }
    }

    /// Where the results of tall matrices start, if the last product is stored in this stack.
    pub(crate) fn tall_results(&self, last: Buffer) -> usize {
        match self.tall_results {
            TallResults::InPlace(behind) => self.start(last) + behind,
            TallResults::Apart(start) => start,
        }
    }
}

/// Parts of a batch, as even as they can be, each with a workspace of at most `most_bytes`, or of
/// one matrix: the ranges of its wide and of its tall matrices.
pub(crate) fn chunks(
    method: Method,
    batch: Batch,
    most_bytes: usize,
) -> Vec<(Range<usize>, Range<usize>)> {
    // A tall one, whose result may take room of its own, where there is one.
    let tall = batch.tall.min(1);
    let one = Batch {
        wide: 1 - tall,
        tall,
        ..batch
    };
    let count = batch.count();
    let at_once = (most_bytes / Workspace::new(method, one).bytes).max(1);
    let chunks = count.div_ceil(at_once);
    let clamp = |at: usize, range: Range<usize>| at.clamp(range.start, range.end) - range.start;
    (0..chunks)
        .map(|i| {
            let (start, end) = (i * count / chunks, (i + 1) * count / chunks);
            let of = |range: Range<usize>| clamp(start, range.clone())..clamp(end, range);
            (of(0..batch.wide), of(batch.wide..count))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCHES: [Batch; 4] = [
        Batch {
            n: 1,
            m: 1,
            wide: 1,
            tall: 0,
        },
        Batch {
            n: 5,
            m: 13,
            wide: 3,
            tall: 4,
        },
        Batch {
            n: 100,
            m: 257,
            wide: 0,
            tall: 2,
        },
        Batch {
            n: 768,
            m: 3072,
            wide: 12,
            tall: 12,
        },
    ];

    #[test]
    fn stacks_are_aligned_and_do_not_overlap() {
        for batch in BATCHES {
            let (n, m, count) = (batch.n, batch.m, batch.count());
            let rectangle = 2 * count * n * m.next_multiple_of(8);
            let square = 2 * count * n * n.next_multiple_of(8);
            let workspace = Workspace::new(Method::Gram, batch);
            let size = |buffer| match buffer {
                Buffer::X | Buffer::Y => rectangle,
                _ => square,
            };
            let mut runs: Vec<_> = Buffer::ALL
                .into_iter()
                .map(|buffer| (workspace.start(buffer), size(buffer)))
                .chain([(workspace.parts, 8 * count * batch.parts())])
                .chain(match workspace.tall_results {
                    TallResults::InPlace(_) => None,
                    TallResults::Apart(start) => {
                        Some((start, 2 * batch.tall * m * n.next_multiple_of(8)))
                    }
                })
                .collect();
            runs.sort_unstable();
            runs.push((workspace.bytes, 0));
            for pair in runs.windows(2) {
                assert!(pair[0].0 % 256 == 0 && pair[0].0 + pair[0].1 <= pair[1].0);
            }
            assert!(Workspace::new(Method::Standard, batch).bytes <= workspace.bytes);
        }
    }

    /// While one matrix of a batch is at its last product, another may be at any.
    #[test]
    fn a_result_of_a_tall_matrix_lies_over_no_other_one() {
        for (n, m) in [
            (8, 30),
            (17, 70),
            (5, 13),
            (16, 64),
            (7, 7),
            (1, 7),
            (64, 1000),
        ] {
            let batch = Batch {
                n,
                m,
                wide: 3,
                tall: 5,
            };
            let workspace = Workspace::new(Method::Standard, batch);
            let (matrix, result) = (2 * n * m.next_multiple_of(8), 2 * m * n.next_multiple_of(8));
            for last in [Buffer::X, Buffer::Y] {
                let stacks = [Buffer::X, Buffer::Y].map(|buffer| workspace.start(buffer));
                for tall in 0..batch.tall {
                    let start = workspace.tall_results(last) + tall * result;
                    let others = (0..batch.count()).filter(|other| *other != batch.wide + tall);
                    for other in others.flat_map(|other| stacks.map(|stack| stack + other * matrix))
                    {
                        let is_apart = start + result <= other || other + matrix <= start;
                        assert!(is_apart, "{n} x {m}, tall matrix {tall}");
                    }
                    assert!(start + result <= workspace.bytes);
                }
            }
        }
    }

    #[test]
    fn chunks_cover_a_batch_in_order_under_any_cap() {
        for batch in BATCHES {
            for most_bytes in [0, 1 << 16, 1 << 24, usize::MAX] {
                let chunks = chunks(Method::Gram, batch, most_bytes);
                let (mut wide, mut tall) = (0, 0);
                for (w, t) in &chunks {
                    assert_eq!((w.start, t.start), (wide, tall));
                    (wide, tall) = (w.end, t.end);
                    let part = Batch {
                        wide: w.len(),
                        tall: t.len(),
                        ..batch
                    };
                    assert!(part.count() > 0);
                    let fits = Workspace::new(Method::Gram, part).bytes <= most_bytes;
                    assert!(fits || part.count() == 1);
                }
                assert_eq!((wide, tall), (batch.wide, batch.tall));
                if most_bytes == usize::MAX {
                    assert_eq!(chunks.len(), 1);
                }
            }
        }
    }

    #[test]
    fn parts_are_within_what_the_kernels_sum() {
        let parts = |n, m| {
            Batch {
                n,
                m,
                wide: 1,
                tall: 0,
            }
            .parts()
        };
        assert_eq!(parts(1, 1), 1);
        assert_eq!(parts(1024, 1024), 128);
        assert_eq!(parts(1 << 16, 1 << 16), MOST_PARTS);
    }
}
