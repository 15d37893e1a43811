//! Products of which some wait for others, and how their pairs are dealt in one launch.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::dealt::{Clusters, Dealt};
use super::{Schedule, k_blocks};
use crate::hopper::cuts::{Pieces, cost};
use crate::hopper::program::{Product, waits};
use crate::hopper::tiles::Pair;
use crate::hopper::workspace::Batch;

/// Clocks of an H200, as far as they decide the order: of 64 of K in a hundredth of a tile of 256
/// columns, of what comes after a tile's sum for each of its columns, and from the last store of a
/// product to the first sum of the next.
const K_BLOCK: u64 = 11;
const AFTER: u64 = 13;
const BETWEEN: u64 = 4000;
/// Matrices are begun in groups with at least so many pairs a cluster of their smallest product, and
/// a group goes before the next: what it works on stays in the L2.
const PAIRS_OF_A_GROUP: usize = 2;

/// A program, of which every product of a matrix waits for others of the same matrix.
pub(super) struct Dependent<'a> {
    pub(super) program: &'a [Product],
    pub(super) batch: Batch,
    pub(super) waits: Vec<Vec<usize>>,
    pub(super) followers: Vec<Vec<usize>>,
}

impl<'a> Dependent<'a> {
    pub(super) fn new(program: &'a [Product], batch: Batch) -> Self {
        let waits = waits(program);
        let mut followers = vec![Vec::new(); program.len()];
        for (index, waits) in waits.iter().enumerate() {
            for &other in waits {
                followers[other].push(index);
            }
        }
        Self {
            program,
            batch,
            waits,
            followers,
        }
    }

    /// Clocks of a pair of a product.
    pub(super) fn time(&self, product: usize, pair: &Pair) -> u64 {
        let columns = pair[0].width().max(pair[1].width()).columns() as u64;
        k_blocks(&self.program[product], self.batch) * cost(pair) * K_BLOCK + AFTER * columns
    }

    /// Clocks from the start of each product to the end of all, on clusters without end.
    fn urgencies(&self, of_matrix: impl Fn(usize) -> u64) -> Vec<u64> {
        let mut urgencies = vec![0; self.program.len()];
        for product in (0..self.program.len()).rev() {
            let after = self.followers[product].iter().map(|&next| urgencies[next]);
            urgencies[product] = of_matrix(product) + BETWEEN + after.max().unwrap_or(0);
        }
        urgencies
    }

    /// In one launch, pair after pair to the cluster that is free first: of what waits for nothing more, the
    /// most urgent.
    pub(super) fn deal(&self, squares: &Pieces, wides: &Pieces, clusters: usize) -> Schedule {
        let (count, products) = (self.batch.count(), self.program.len());
        let [squares_of, wides_of] = [squares, wides].map(|pieces| by_matrix(&pieces.pairs, count));
        let pairs_of = |product: usize, matrix: usize| -> &[Pair] {
            if self.program[product].is_symmetric() {
                &squares_of[matrix]
            } else {
                &wides_of[matrix]
            }
        };
        let urgencies = self.urgencies(|product| {
            let times = pairs_of(product, 0)
                .iter()
                .map(|pair| self.time(product, pair));
            let (sum, longest) =
                times.fold((0, 0), |(sum, most), time| (sum + time, most.max(time)));
            longest.max(sum / clusters as u64)
        });
        let smallest = squares_of[0].len().min(wides_of[0].len()).max(1);
        let matrices_of_a_group = (PAIRS_OF_A_GROUP * clusters).div_ceil(smallest);
        let rank = |matrix: usize, product: usize| Rank {
            group: Reverse(matrix / matrices_of_a_group),
            urgency: urgencies[product],
            matrix: Reverse(matrix),
            product,
        };

        let mut clusters = Clusters::new(clusters);
        let mut waits_left = vec![self.waits.iter().map(Vec::len).collect::<Vec<_>>(); count];
        let mut progress = vec![vec![Progress::default(); products]; count];
        let mut ready = BinaryHeap::new();
        let mut soon = BinaryHeap::new();
        for matrix in 0..count {
            let at_once = (0..products).filter(|&product| self.waits[product].is_empty());
            ready.extend(at_once.map(|product| rank(matrix, product)));
        }
        loop {
            let now = clusters.now();
            while let Some((Reverse(at), next)) = soon.peek()
                && *at <= now
            {
                ready.push(*next);
                soon.pop();
            }
            let Some(&next) = ready.peek() else {
                match soon.peek() {
                    Some((Reverse(at), _)) => clusters.wait_until(*at),
                    None => break,
                }
                continue;
            };
            let (matrix, product) = (next.matrix.0, next.product);
            let pairs = pairs_of(product, matrix);
            let Progress { dealt, end } = &mut progress[matrix][product];
            let pair = &pairs[*dealt];
            *dealt += 1;
            let placed = self.placed(product, matrix);
            *end = clusters
                .deal(pair, placed, self.time(product, pair))
                .max(*end);
            if *dealt < pairs.len() {
                continue;
            }
            ready.pop();
            for &follower in &self.followers[product] {
                let left = &mut waits_left[matrix][follower];
                *left -= 1;
                if *left == 0 {
                    let before = self.waits[follower].iter();
                    let before = before.map(|&other| progress[matrix][other].end).max();
                    let at = before.unwrap_or(0) + BETWEEN;
                    soon.push((Reverse(at), rank(matrix, follower)));
                }
            }
        }
        let mut dealt = Dealt::new(self.program, count);
        dealt.push(&clusters);
        dealt.into_schedule()
    }

    /// The product as the kernels know it, in which the last one is another of tall matrices.
    pub(super) fn placed(&self, product: usize, matrix: usize) -> u16 {
        let is_tall = matrix >= self.batch.wide;
        let last = product + 1 == self.program.len();
        (product + usize::from(last && is_tall)) as u16
    }
}

/// What is dealt first, among products of matrices that may start: the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    group: Reverse<usize>,
    urgency: u64,
    matrix: Reverse<usize>,
    product: usize,
}

/// How many pairs of a product of a matrix are dealt, and when the last of them ends.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    dealt: usize,
    end: u64,
}

/// The pairs of each matrix, the longest first.
fn by_matrix(pairs: &[Pair], count: usize) -> Vec<Vec<Pair>> {
    let mut of_matrices = vec![Vec::new(); count];
    for pair in pairs {
        of_matrices[pair[0].matrix as usize].push(*pair);
    }
    for pairs in &mut of_matrices {
        pairs.sort_by_key(|pair| Reverse(cost(pair)));
    }
    of_matrices
}
