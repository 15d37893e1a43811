//! Which cluster computes which pairs of tiles, of all products of an iteration, in which order.

mod dealt;
mod dependent;
mod launches;

use std::collections::BTreeSet;
use std::ops::Range;

use super::cuts::Pieces;
use super::program::{Buffer, Product};
use super::tiles::{BLOCK, Region, Tile, Width};
use super::workspace::Batch;
use dependent::Dependent;
use launches::launch_by_launch;

/// With more pairs, of all products, ways to cut are not compared.
const MOST_PAIRS_TO_COMPARE: usize = 20_000;

/// All pairs of all products, dealt to clusters.
///
/// Either in one launch, in which the products of a matrix wait for each other, and matrices need not
/// keep step. Then a cluster's list is in an order in which everything that a pair waits for was dealt
/// before, so that clusters that work off their lists at once never wait for each other in a circle.
/// Or in a launch a step, each with the products that wait only for those of launches before.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Schedule {
    /// The most columns of tiles of the n × n products, and of the n × m ones.
    pub(crate) square: usize,
    pub(crate) wide: usize,
    pub(crate) launches: Vec<Launch>,
    /// In pairs. Of each launch the first pair of every cluster, then what remains of the first cluster, of
    /// the second one, and so on.
    pub(crate) tiles: Vec<Tile>,
    /// For each launch where, among its pairs, those that remain of each cluster begin, and where they end.
    pub(crate) rest: Vec<i32>,
    /// For each matrix and each product how many parts of tiles there are. The last product is two:
    /// that of wide matrices, and that of tall ones.
    pub(crate) parts: Vec<u32>,
    /// Clocks, as estimated.
    end: u64,
}

/// Clusters that are launched at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Launch {
    pub(crate) stage: Stage,
    /// Where its tiles start, and what of `rest` is its own.
    pub(crate) tiles_from: usize,
    pub(crate) rest_from: usize,
    pub(crate) clusters: usize,
}

/// An operand of a tile that the launch before does not store: earlier launches have ended when this one
/// starts. A, if it stores neither. Laid out as `Early` in `kernels/hopper/tasks.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Early {
    Neither,
    A,
    B,
}

impl Early {
    /// In a launch after one that stores tiles of these stacks, or after normalization, which stores X.
    fn of(product: &Product, stored: Option<&BTreeSet<Buffer>>) -> Self {
        match stored {
            Some(stored) if !stored.contains(&product.a) => Self::A,
            Some(stored) if !stored.contains(&product.b) => Self::B,
            _ => Self::Neither,
        }
    }
}

/// The most blocks that are loaded at once for a tile, as kernels are made for them. One for fewer has
/// more stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Of3,
    Of4,
    Of6,
}

impl Stage {
    pub(crate) const ALL: [Self; 3] = [Self::Of3, Self::Of4, Self::Of6];

    /// The least that all tiles fit.
    fn of<'a>(tiles: impl Iterator<Item = &'a Tile>) -> Self {
        let most = tiles.map(Tile::blocks).max().unwrap_or(0);
        let least = Self::ALL.into_iter().find(|stage| stage.blocks() >= most);
        least.expect("a tile has at most 256 columns")
    }

    pub(crate) fn blocks(self) -> usize {
        match self {
            Self::Of3 => 3,
            Self::Of4 => 4,
            Self::Of6 => 6,
        }
    }
}

impl Schedule {
    /// The schedule that ends soonest, of a few ways to cut.
    pub(crate) fn new(program: &[Product], batch: Batch, clusters: usize) -> Self {
        let Batch { n, m, .. } = batch;
        let count = batch.count();
        let square = Region::Symmetric { n };
        let wide = Region::Full { rows: n, cols: m };
        let dependent = Dependent::new(program, batch);
        let mut best = launch_by_launch(&dependent, clusters);
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

    /// For each tile what can be loaded while the launch before ends. Of a cluster's first pair alone it is.
    pub(crate) fn early(&self, program: &[Product]) -> Vec<Early> {
        let mut early = Vec::with_capacity(self.tiles.len());
        let mut stored: Option<BTreeSet<Buffer>> = None;
        for tiles in self.tiles_of_launches() {
            let products = self.tiles[tiles]
                .iter()
                .map(|tile| product_of(program, tile));
            let of = |product: &Product| Early::of(product, stored.as_ref());
            early.extend(products.clone().map(of));
            stored = Some(products.map(|product| product.d).collect());
        }
        early
    }

    /// Where among all tiles those of each launch are.
    fn tiles_of_launches(&self) -> impl Iterator<Item = Range<usize>> {
        let ends = self.launches.iter().skip(1).map(|next| next.tiles_from);
        let ends = ends.chain([self.tiles.len()]);
        let launches = self.launches.iter().zip(ends);
        launches.map(|(launch, end)| launch.tiles_from..end)
    }

    /// Floating-point operations of all tiles.
    pub(crate) fn flops(&self, program: &[Product], batch: Batch) -> u64 {
        let of = |tile: &Tile| {
            let product = product_of(program, tile);
            let k = k_blocks(product, batch) * BLOCK as u64;
            2 * tile.elements(product.is_symmetric()) as u64 * k
        };
        self.tiles.iter().map(of).sum()
    }
}

/// The last product is two, of wide and of tall matrices.
pub(super) fn product_of<'a>(program: &'a [Product], tile: &Tile) -> &'a Product {
    &program[usize::from(tile.product).min(program.len() - 1)]
}

/// The sum of a product's tiles goes over so many times 64.
fn k_blocks(product: &Product, batch: Batch) -> u64 {
    let columns_of_a = if product.a.is_symmetric() {
        batch.n
    } else {
        batch.m
    };
    columns_of_a.div_ceil(BLOCK) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hopper::program::{program, waits};
    use crate::{Coefficients, Method};

    const CLUSTERS: usize = 66; // of an H200

    fn schedule(method: Method, wide: usize, tall: usize, n: usize, m: usize) -> Schedule {
        let program = program(method, &Coefficients::default().steps(5));
        Schedule::new(&program, Batch { n, m, wide, tall }, CLUSTERS)
    }

    /// The pairs of each cluster of a launch.
    fn lists(schedule: &Schedule, launch: &Launch) -> Vec<Vec<[Tile; 2]>> {
        let pairs = schedule.tiles[launch.tiles_from..].as_chunks::<2>().0;
        let rest = &schedule.rest[launch.rest_from..=launch.rest_from + launch.clusters];
        let list = |cluster: usize| {
            let rest = rest[cluster] as usize..rest[cluster + 1] as usize;
            [&pairs[cluster..=cluster], &pairs[rest]].concat()
        };
        (0..launch.clusters).map(list).collect()
    }

    /// Works off the lists as the clusters do, one pair of one of them after the other.
    fn run(schedule: &Schedule, method: Method, wide: usize) {
        let program = program(method, &Coefficients::default().steps(5));
        let waits = waits(&program);
        let products = program.len() + 1;
        let mut left = schedule.parts.clone();
        for launch in &schedule.launches {
            let waits_inside = schedule.launches.len() == 1;
            let is_last = std::ptr::eq(launch, &schedule.launches[schedule.launches.len() - 1]);
            let before = left.clone();
            let mut lists = lists(schedule, launch);
            lists.iter_mut().for_each(|list| list.reverse());
            let mut moved = true;
            while std::mem::take(&mut moved) {
                for list in &mut lists {
                    while let Some([a, b]) = list.last() {
                        assert_eq!((a.matrix, a.product), (b.matrix, b.product));
                        assert!(a.blocks().max(b.blocks()) <= launch.stage.blocks());
                        let (matrix, product) = (a.matrix as usize, usize::from(a.product));
                        assert!(product < products - 1 || matrix >= wide);
                        // Nothing but the last launch is given the maps of results.
                        assert!(product < program.len() - 1 || is_last);
                        let seen = if waits_inside { &left } else { &before };
                        let of_program = product.min(program.len() - 1);
                        let is_left = |&other: &usize| seen[matrix * products + other] > 0;
                        if waits[of_program].iter().any(is_left) {
                            break;
                        }
                        left[matrix * products + product] -= a.warpgroups() + b.warpgroups();
                        list.pop();
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
            }
            run(&schedule, method, wide);
        }
    }

    #[test]
    fn operands_that_are_there_already_are_loaded_early() {
        use Early::{A, B, Neither};
        let early = |method, m| {
            let schedule = schedule(method, 1, 0, 1024, m);
            let early = schedule.early(&program(method, &Coefficients::default().steps(5)));
            assert_eq!(early.len(), schedule.tiles.len());
            let of = |launch: &Launch| early[launch.tiles_from];
            schedule.launches.iter().map(of).collect::<Vec<_>>()
        };
        // X Xᵀ, R², ZX.
        let step = [Neither, Neither, B];
        assert_eq!(early(Method::Standard, 1024), step.repeat(5));
        // X Xᵀ, then R², RZ and Z(RZ) for each step, factors gathered beside the last ones, and QX.
        let until_restart = [Neither, Neither, A, A, Neither, A, B];
        let after_restart = [Neither, Neither, A, A, Neither, A, A, Neither, A, B];
        assert_eq!(
            early(Method::Gram, 4096),
            [&until_restart[..], &after_restart].concat()
        );
    }

    /// Earlier launches than the one before have ended when one starts, and nothing else is known to have.
    #[test]
    fn what_is_loaded_early_was_stored_ahead_of_the_launch_before() {
        let mut found = [0; 3];
        for steps in 1..=7 {
            let rows = Coefficients::default().steps(steps);
            for (method, wide, tall, n, m) in [
                (Method::Standard, 1, 0, 1024, 1024),
                (Method::Standard, 0, 2, 640, 640),
                (Method::Gram, 1, 0, 2048, 8192),
                (Method::Gram, 2, 0, 768, 1536),
                (Method::Gram, 0, 1, 1024, 4096),
                (Method::Gram, 1, 2, 100, 1000),
            ] {
                let program = program(method, &rows);
                let schedule = Schedule::new(&program, Batch { n, m, wide, tall }, CLUSTERS);
                let all_early = schedule.early(&program);
                let launches: Vec<_> = schedule.tiles_of_launches().collect();
                let stores = |launch: usize, buffer: Buffer| {
                    let mut tiles = schedule.tiles[launches[launch].clone()].iter();
                    tiles.any(|tile| product_of(&program, tile).d == buffer)
                };
                for (launch, tiles) in launches.iter().enumerate() {
                    for index in tiles.clone() {
                        let product = product_of(&program, &schedule.tiles[index]);
                        let early = all_early[index];
                        found[early as usize] += 1;
                        let operand = match early {
                            Early::Neither => continue,
                            Early::A => product.a,
                            Early::B => product.b,
                        };
                        let case = format!("{method}, {n} x {m}, {steps}: {operand:?} in {launch}");
                        assert!(launch > 0, "{case}");
                        assert!(!stores(launch - 1, operand), "{case}");
                        assert!(!stores(launch, operand), "{case}");
                        let is_there = (0..launch - 1).any(|before| stores(before, operand));
                        assert!(is_there || operand == Buffer::X, "{case}");
                    }
                }
            }
        }
        assert!(found.iter().all(|count| *count > 0), "{found:?}");
    }

    /// The factors gathered in the fourth step are needed only after the fifth.
    #[test]
    fn what_the_next_launch_does_not_wait_for_goes_to_idle_clusters() {
        const GATHERING: u16 = 14;
        let schedule = schedule(Method::Gram, 1, 0, 1024, 4096);
        let of_gathering = |launch: &Launch| {
            let lists = lists(&schedule, launch);
            let pairs = lists.iter().flatten();
            pairs.filter(|pair| pair[0].product == GATHERING).count()
        };
        let counts: Vec<_> = schedule.launches.iter().map(of_gathering).collect();
        // 40 of 66 clusters are busy in both.
        assert_eq!(counts[12..=13], [26, 14]);
        assert_eq!(counts.iter().sum::<usize>(), 40);
        for launch in &schedule.launches[12..=13] {
            assert!(lists(&schedule, launch).iter().all(|list| list.len() == 1));
        }
    }

    /// 72 pairs a square product would be two rounds of 66 clusters if the matrices kept step.
    #[test]
    fn a_batch_that_does_not_keep_step_wastes_little() {
        let program = program(Method::Standard, &Coefficients::default().steps(5));
        let batch = Batch {
            n: 768,
            m: 768,
            wide: 12,
            tall: 0,
        };
        let schedule = Schedule::new(&program, batch, CLUSTERS);
        assert_eq!(schedule.launches.len(), 1);
        let dependent = Dependent::new(&program, batch);
        let pairs = schedule.tiles.as_chunks::<2>().0.iter();
        let work: u64 = pairs
            .map(|pair| dependent.time(usize::from(pair[0].product), pair))
            .sum();
        let ideal = work / CLUSTERS as u64;
        assert!(
            schedule.end < ideal * 115 / 100,
            "{} of {ideal}",
            schedule.end
        );
    }
}
