//! Which cluster computes which pairs of tiles, of all products of an iteration, in which order.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::cuts::{Pieces, cost};
use super::program::{Buffer, Product, waits};
use super::tiles::{BLOCK, Pair, Region, Tile, Width};
use super::workspace::Batch;

/// Clocks of an H200, as far as they decide the order: of 64 of K in a hundredth of a tile of 256
/// columns, of what comes after a tile's sum for each of its columns, and from the last store of a
/// product to the first sum of the next.
const K_BLOCK: u64 = 11;
const AFTER: u64 = 13;
const BETWEEN: u64 = 4000;
/// The same where a launch follows the one before.
const BETWEEN_LAUNCHES: u64 = 2200;
/// Matrices are begun in groups with at least so many pairs a cluster of their smallest product, and
/// a group goes before the next: what it works on stays in the L2.
const PAIRS_OF_A_GROUP: usize = 2;
/// With more pairs, of all products, ways to cut are not compared.
const MOST_PAIRS_TO_COMPARE: usize = 20_000;
/// Warpgroups that store a part each of a tile.
const PARTS_OF_A_TILE: u32 = 2;

/// All pairs of all products, dealt to clusters.
///
/// Either in one launch, in which the products of a matrix wait for each other, and matrices need not
/// keep step. Then a cluster's list is in an order in which everything that a pair waits for was dealt
/// before, so that clusters that work off their lists at once never wait for each other in a circle.
/// Or in a launch a step, each with the products that wait only for those of launches before.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Schedule {
    /// The most columns of tiles of the n × n products, and of the n × m ones.
    pub(crate) square: Width,
    pub(crate) wide: Width,
    pub(crate) launches: Vec<Launch>,
    /// The pairs of one cluster of a launch after those of the other.
    pub(crate) tiles: Vec<Tile>,
    /// The first pair of each cluster of a launch, and the end of the last one's.
    pub(crate) first: Vec<i32>,
    /// For each matrix and each product how many parts of tiles there are. The last product is two:
    /// that of wide matrices, and that of tall ones.
    pub(crate) parts: Vec<u32>,
    /// Clocks, as estimated.
    end: u64,
}

/// Clusters that are launched at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Launch {
    /// The most columns of its tiles.
    pub(crate) width: Width,
    /// Where its firsts start.
    pub(crate) first_from: usize,
    pub(crate) clusters: usize,
}

impl Schedule {
    /// The schedule that ends soonest, of a few ways to cut.
    pub(crate) fn new(program: &[Product], batch: Batch, clusters: usize) -> Self {
        let Batch { n, m, .. } = batch;
        let count = batch.count();
        let square = Region::Symmetric { n };
        let wide = Region::Full { rows: n, cols: m };
        let dependent = Dependent::new(program, batch);
        let mut best = dependent.launch_by_launch(clusters);
        if count == 1 {
            return best;
        }
        let squares = Pieces::in_step(square, count, clusters, Width::W256);
        // The stages of the loads are as large as the widest tile needs, and narrow ones need many.
        let widest = match squares.width {
            Width::W64 => Width::W128,
            _ => Width::W256,
        };
        let wides = Pieces::in_step(wide, count, clusters, widest);
        let (mut all_squares, mut all_wides) = (vec![squares], vec![wides]);
        if widest == Width::W256 && best.tiles.len() <= 2 * MOST_PAIRS_TO_COMPARE {
            all_squares.extend(Pieces::whole(square, count));
            all_wides.extend(Pieces::whole(wide, count));
            all_squares.dedup();
            all_wides.dedup();
        }
        for squares in &all_squares {
            for wides in &all_wides {
                let other = dependent.deal(squares, wides, clusters);
                if other.end < best.end {
                    best = other;
                }
            }
        }
        best
    }

    /// Floating-point operations of all tiles.
    pub(crate) fn flops(&self, program: &[Product], batch: Batch) -> u64 {
        let of = |tile: &Tile| {
            let product = usize::from(tile.product).min(program.len() - 1);
            let k = k_blocks(&program[product], batch) * BLOCK as u64;
            2 * tile.elements() as u64 * k
        };
        self.tiles.iter().map(of).sum()
    }
}

/// The sum of a product's tiles goes over so many times 64.
fn k_blocks(product: &Product, batch: Batch) -> u64 {
    let columns_of_a = match product.a {
        Buffer::X | Buffer::Y => batch.m,
        _ => batch.n,
    };
    columns_of_a.div_ceil(BLOCK) as u64
}

/// A program, of which every product of a matrix waits for others of the same matrix.
struct Dependent<'a> {
    program: &'a [Product],
    batch: Batch,
    waits: Vec<Vec<usize>>,
    followers: Vec<Vec<usize>>,
}

impl<'a> Dependent<'a> {
    fn new(program: &'a [Product], batch: Batch) -> Self {
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
    fn time(&self, product: usize, pair: &Pair) -> u64 {
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

    /// Launch after launch, each with what waits only for those before, the longest pairs first.
    fn launch_by_launch(&self, clusters: usize) -> Schedule {
        let Batch { n, m, .. } = self.batch;
        let count = self.batch.count();
        let mut levels: Vec<usize> = Vec::new();
        for waits in &self.waits {
            levels.push(
                waits
                    .iter()
                    .map(|&other| levels[other] + 1)
                    .max()
                    .unwrap_or(0),
            );
        }
        let mut dealt = Dealt::new(count * (self.program.len() + 1));
        let (mut square, mut wide) = (Width::W64, Width::W64);
        for level in 0..=levels.iter().copied().max().unwrap_or(0) {
            let products = (0..levels.len()).filter(|&product| levels[product] == level);
            let (squares, wides): (Vec<_>, Vec<_>) =
                products.partition(|&product| self.program[product].is_symmetric());
            let mut clusters_of_launch = Clusters::new(clusters);
            let mut pairs = Vec::new();
            let mut width = Width::W64;
            let regions = [
                (squares, Region::Symmetric { n }, &mut square),
                (wides, Region::Full { rows: n, cols: m }, &mut wide),
            ];
            for (products, region, most) in regions {
                if products.is_empty() {
                    continue;
                }
                let batch = products.len() * count;
                let of_square = |&product: &usize| {
                    let Product { a, b, .. } = self.program[product];
                    a == b
                };
                let pieces = if products.iter().all(of_square) {
                    Pieces::of_squares(n, batch, clusters)
                } else {
                    Pieces::in_step(region, batch, clusters, Width::W256)
                };
                width = width.max(pieces.width);
                *most = pieces.width.max(*most);
                pairs.extend(pieces.pairs.into_iter().map(|pair| {
                    let matrix = pair[0].matrix as usize;
                    let product = products[matrix / count];
                    let matrix = (matrix % count) as i32;
                    let pair = pair.map(|tile| Tile { matrix, ..tile });
                    (self.time(product, &pair), product, pair)
                }));
            }
            pairs.sort_by_key(|(time, ..)| Reverse(*time));
            for (time, product, pair) in pairs {
                let placed = self.placed(product, pair[0].matrix as usize);
                clusters_of_launch.deal(&pair, placed, time);
            }
            dealt.end += BETWEEN_LAUNCHES;
            dealt.push(&clusters_of_launch, width);
        }
        dealt.into_schedule([square, wide], self.program.len() + 1)
    }

    /// In one launch, pair after pair to the cluster that is free first: of what waits for nothing more, the
    /// most urgent.
    fn deal(&self, squares: &Pieces, wides: &Pieces, clusters: usize) -> Schedule {
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
        let mut dealt = Dealt::new(count * (products + 1));
        dealt.push(&clusters, squares.width.max(wides.width));
        dealt.into_schedule([squares.width, wides.width], products + 1)
    }

    /// The product as the kernels know it, in which the last one is another of tall matrices.
    fn placed(&self, product: usize, matrix: usize) -> u16 {
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

/// What was dealt to each cluster, and when each is free.
struct Clusters {
    free: BinaryHeap<Reverse<(u64, usize)>>,
    lists: Vec<Vec<Pair>>,
    end: u64,
}

impl Clusters {
    fn new(count: usize) -> Self {
        Self {
            free: (0..count).map(|cluster| Reverse((0, cluster))).collect(),
            lists: vec![Vec::new(); count],
            end: 0,
        }
    }

    /// When the next cluster is free.
    fn now(&self) -> u64 {
        self.free.peek().map_or(0, |Reverse((at, _))| *at)
    }

    /// The next cluster stays idle until then.
    fn wait_until(&mut self, at: u64) {
        if let Some(Reverse((_, cluster))) = self.free.pop() {
            self.free.push(Reverse((at, cluster)));
        }
    }

    /// Gives a pair to the next cluster, and says when it is done.
    fn deal(&mut self, pair: &Pair, product: u16, time: u64) -> u64 {
        let Reverse((at, cluster)) = self.free.pop().expect("a device has a cluster");
        self.lists[cluster].push(pair.map(|tile| Tile { product, ..tile }));
        self.free.push(Reverse((at + time, cluster)));
        self.end = self.end.max(at + time);
        at + time
    }
}

/// Launches that are dealt.
struct Dealt {
    launches: Vec<Launch>,
    tiles: Vec<Tile>,
    first: Vec<i32>,
    parts: Vec<u32>,
    end: u64,
}

impl Dealt {
    fn new(parts: usize) -> Self {
        Self {
            launches: Vec::new(),
            tiles: Vec::new(),
            first: Vec::new(),
            parts: vec![0; parts],
            end: 0,
        }
    }

    fn push(&mut self, clusters: &Clusters, width: Width) {
        let first_from = self.first.len();
        for list in clusters.lists.iter().filter(|list| !list.is_empty()) {
            self.first.push((self.tiles.len() / 2) as i32);
            self.tiles.extend(list.iter().flatten());
        }
        self.launches.push(Launch {
            width,
            first_from,
            clusters: self.first.len() - first_from,
        });
        self.first.push((self.tiles.len() / 2) as i32);
        self.end += clusters.end;
    }

    /// With so many products of each matrix.
    fn into_schedule(mut self, widths: [Width; 2], products: usize) -> Schedule {
        for tile in &self.tiles {
            let index = tile.matrix as usize * products + usize::from(tile.product);
            self.parts[index] += PARTS_OF_A_TILE;
        }
        let [square, wide] = widths;
        Schedule {
            square,
            wide,
            launches: self.launches,
            tiles: self.tiles,
            first: self.first,
            parts: self.parts,
            end: self.end,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hopper::program::program;
    use crate::{Coefficients, Method};

    const CLUSTERS: usize = 66; // of an H200

    fn schedule(method: Method, wide: usize, tall: usize, n: usize, m: usize) -> Schedule {
        let program = program(method, &Coefficients::default().steps(5));
        Schedule::new(&program, Batch { n, m, wide, tall }, CLUSTERS)
    }

    /// Works off the lists as the clusters do, one pair of one of them after the other.
    fn run(schedule: &Schedule, method: Method, wide: usize) {
        let program = program(method, &Coefficients::default().steps(5));
        let waits = waits(&program);
        let products = program.len() + 1;
        let mut left = schedule.parts.clone();
        for launch in &schedule.launches {
            let first = &schedule.first[launch.first_from..=launch.first_from + launch.clusters];
            let waits_inside = schedule.launches.len() == 1;
            let before = left.clone();
            let mut at: Vec<_> = first[..launch.clusters].to_vec();
            let mut moved = true;
            while std::mem::take(&mut moved) {
                for (cluster, at) in at.iter_mut().enumerate() {
                    while *at < first[cluster + 1] {
                        let [a, b] = &schedule.tiles[2 * *at as usize..][..2] else {
                            unreachable!()
                        };
                        assert_eq!((a.matrix, a.product), (b.matrix, b.product));
                        assert!(a.width().max(b.width()) <= launch.width.max(Width::W192));
                        let (matrix, product) = (a.matrix as usize, usize::from(a.product));
                        assert!(product < products - 1 || matrix >= wide);
                        let seen = if waits_inside { &left } else { &before };
                        let of_program = product.min(program.len() - 1);
                        let is_left = |&other: &usize| seen[matrix * products + other] > 0;
                        if waits[of_program].iter().any(is_left) {
                            break;
                        }
                        left[matrix * products + product] -= 2 * PARTS_OF_A_TILE;
                        *at += 1;
                        moved = true;
                    }
                }
            }
        }
        assert!(left.iter().all(|left| *left == 0));
    }

    #[test]
    fn clusters_never_wait_in_a_circle_and_store_all() {
        for (method, wide, tall, n, m) in [
            (Method::Standard, 1, 0, 1, 1),
            (Method::Standard, 1, 0, 1024, 1024),
            (Method::Gram, 0, 1, 1024, 4096),
            (Method::Gram, 2, 0, 2048, 8192),
            (Method::Standard, 12, 0, 768, 768),
            (Method::Gram, 7, 5, 768, 3072),
            (Method::Gram, 30, 50, 100, 333),
        ] {
            let schedule = schedule(method, wide, tall, n, m);
            for launch in &schedule.launches {
                assert!((1..=CLUSTERS).contains(&launch.clusters));
                let first =
                    &schedule.first[launch.first_from..=launch.first_from + launch.clusters];
                assert!(first.windows(2).all(|pair| pair[0] < pair[1]));
            }
            run(&schedule, method, wide);
        }
    }

    /// 72 pairs a square product would be two rounds of 66 clusters if the matrices kept step.
    #[test]
    fn a_batch_that_does_not_keep_step_wastes_little() {
        let schedule = schedule(Method::Standard, 12, 0, 768, 768);
        let work: u64 = schedule
            .tiles
            .chunks_exact(2)
            .map(|pair| {
                let pair = [pair[0], pair[1]];
                12 * cost(&pair) * K_BLOCK
                    + AFTER * pair[0].width().max(pair[1].width()).columns() as u64
            })
            .sum();
        let ideal = work / CLUSTERS as u64;
        assert_eq!(schedule.launches.len(), 1);
        assert!(
            schedule.end < ideal * 115 / 100,
            "{} of {ideal}",
            schedule.end
        );
    }
}
