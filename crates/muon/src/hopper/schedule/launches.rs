//! Products dealt launch after launch, each with what waits only for those before.

use std::cmp::Reverse;

use super::Schedule;
use super::dealt::{Clusters, Dealt};
use super::dependent::Dependent;
use crate::hopper::cuts::Pieces;
use crate::hopper::tiles::{Pair, Region, Tile, Width};

/// Clocks of an H200 from the last store of a launch to the first sum of the next.
const BETWEEN_LAUNCHES: u64 = 2200;

/// In each launch the longest pairs come first.
pub(super) fn launch_by_launch(dependent: &Dependent<'_>, clusters: usize) -> Schedule {
    let mut cuts = Cuts::new(dependent, clusters);
    let mut dealt = Dealt::new(dependent.program, dependent.batch.count());
    for mut pairs in pairs_of_launches(dependent, &mut cuts) {
        pairs.sort_by_key(|pair| Reverse(pair.time));
        let mut clusters_of_launch = Clusters::new(clusters);
        for Timed {
            time,
            product,
            pair,
        } in pairs
        {
            let placed = dependent.placed(product, pair[0].matrix as usize);
            clusters_of_launch.deal(&pair, placed, time);
        }
        dealt.end += BETWEEN_LAUNCHES;
        dealt.push(&clusters_of_launch);
    }
    dealt.into_schedule()
}

/// The pairs of each launch.
///
/// A product is computed as soon as it can be, but one that the next launch does not wait for goes, pair
/// by pair, to clusters that others leave idle, if all of its pairs find one in time.
fn pairs_of_launches(dependent: &Dependent<'_>, cuts: &mut Cuts<'_>) -> Vec<Vec<Timed>> {
    let earliest = earliest(dependent);
    let count = earliest.iter().max().map_or(0, |last| last + 1);
    let latest = latest(dependent, count);
    let (fixed, loose): (Vec<usize>, Vec<_>) =
        (0..earliest.len()).partition(|&product| earliest[product] == latest[product]);
    let mut products = vec![Vec::new(); count];
    for product in fixed {
        products[earliest[product]].push(product);
    }
    let mut idle: Vec<Vec<Timed>> = vec![Vec::new(); count];
    // The launch with the last pair of each product.
    let mut ends = earliest;
    for product in loose {
        let before = dependent.waits[product].iter();
        let first = before.map(|&other| ends[other] + 1).max().unwrap_or(0);
        let mut pairs = cuts.pairs(&[product]);
        let launches = first..=latest[product];
        let rooms = launches.clone().map(|launch| {
            let taken = cuts.pairs(&products[launch]).len() + idle[launch].len();
            cuts.clusters.saturating_sub(taken)
        });
        let rooms: Vec<_> = rooms.collect();
        if rooms.iter().sum::<usize>() < pairs.len() {
            products[first].push(product);
            ends[product] = first;
            continue;
        }
        for (launch, room) in launches.zip(rooms) {
            let fitting: Vec<_> = pairs.drain(..room.min(pairs.len())).collect();
            if !fitting.is_empty() {
                ends[product] = launch;
            }
            idle[launch].extend(fitting);
        }
    }
    let all = products.iter().zip(idle);
    all.map(|(products, idle)| [cuts.pairs(products), idle].concat())
        .collect()
}

/// The first launch in which each product can be.
fn earliest(dependent: &Dependent<'_>) -> Vec<usize> {
    let mut earliest: Vec<usize> = Vec::new();
    for waits in &dependent.waits {
        let before = waits.iter().map(|&other| earliest[other] + 1);
        earliest.push(before.max().unwrap_or(0));
    }
    earliest
}

/// The last one, of `count`.
fn latest(dependent: &Dependent<'_>, count: usize) -> Vec<usize> {
    let mut latest = vec![count - 1; dependent.followers.len()];
    for product in (0..latest.len()).rev() {
        let after = dependent.followers[product]
            .iter()
            .map(|&next| latest[next]);
        if let Some(first) = after.min() {
            latest[product] = first - 1;
        }
    }
    latest
}

/// A pair of a product, and the clocks that it takes.
#[derive(Clone)]
struct Timed {
    time: u64,
    product: usize,
    pair: Pair,
}

/// Into which pairs products are cut that are computed at once.
struct Cuts<'a> {
    dependent: &'a Dependent<'a>,
    clusters: usize,
    known: Vec<(Kind, Pieces)>,
}

/// What decides how products are cut.
#[derive(Clone, Copy, PartialEq)]
struct Kind {
    region: Region,
    /// Of all products.
    matrices: usize,
    /// Whether all are A Aᵀ.
    of_squares: bool,
}

impl<'a> Cuts<'a> {
    fn new(dependent: &'a Dependent<'a>, clusters: usize) -> Self {
        Self {
            dependent,
            clusters,
            known: Vec::new(),
        }
    }

    /// The pairs of these products of all matrices.
    fn pairs(&mut self, products: &[usize]) -> Vec<Timed> {
        let (n, m) = (self.dependent.batch.n, self.dependent.batch.m);
        let program = self.dependent.program;
        let (squares, wides): (Vec<_>, Vec<_>) = products
            .iter()
            .partition(|&&product| program[product].is_symmetric());
        let of_squares = self.pairs_of_region(&squares, Region::Symmetric { n });
        let of_wides = self.pairs_of_region(&wides, Region::Full { rows: n, cols: m });
        [of_squares, of_wides].concat()
    }

    fn pairs_of_region(&mut self, products: &[usize], region: Region) -> Vec<Timed> {
        if products.is_empty() {
            return Vec::new();
        }
        let (dependent, clusters) = (self.dependent, self.clusters);
        let count = dependent.batch.count();
        // Only of symmetric products.
        let of_square = |&product: &usize| {
            let product = &dependent.program[product];
            product.a == product.b
        };
        let kind = Kind {
            region,
            matrices: products.len() * count,
            of_squares: products.iter().all(of_square),
        };
        let index = self.known.iter().position(|(other, _)| *other == kind);
        let index = index.unwrap_or_else(|| {
            let pieces = if kind.of_squares {
                Pieces::of_squares(dependent.batch.n, kind.matrices, clusters)
            } else {
                Pieces::in_step(region, kind.matrices, clusters, Width::W256)
            };
            self.known.push((kind, pieces));
            self.known.len() - 1
        });
        let (_, pieces) = &self.known[index];
        let timed = |pair: &Pair| {
            let matrix = pair[0].matrix as usize;
            let product = products[matrix / count];
            let matrix = (matrix % count) as i32;
            let pair = pair.map(|tile| Tile { matrix, ..tile });
            Timed {
                time: dependent.time(product, &pair),
                product,
                pair,
            }
        };
        pieces.pairs.iter().map(timed).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hopper::program::program;
    use crate::hopper::workspace::Batch;
    use crate::{Coefficients, Method};

    /// Products 2 and 5 may both wait, the second one for the first. No iteration has such a chain now.
    #[test]
    fn what_is_not_waited_for_at_once_still_follows_what_it_waits_for() {
        let rows = Coefficients::default().steps(2);
        let iteration = program(Method::Gram, &rows);
        let mut products = vec![iteration[2]; 7];
        products.extend(iteration.last().copied());
        let waits = [&[][..], &[0], &[0], &[1], &[3], &[2], &[4], &[5, 6]].map(<[usize]>::to_vec);
        let mut followers = vec![Vec::new(); waits.len()];
        for (index, waits) in waits.iter().enumerate() {
            waits.iter().for_each(|&other| followers[other].push(index));
        }
        for n in (64..2400).step_by(64) {
            let dependent = Dependent {
                program: &products,
                batch: Batch {
                    n,
                    m: n,
                    wide: 1,
                    tall: 0,
                },
                waits: waits.to_vec(),
                followers: followers.clone(),
            };
            let mut cuts = Cuts::new(&dependent, 66);
            let launches = pairs_of_launches(&dependent, &mut cuts);
            let of = |product: usize| {
                let has = |pairs: &Vec<Timed>| pairs.iter().any(|pair| pair.product == product);
                let first = launches.iter().position(has).expect("it is computed");
                (
                    first,
                    launches.iter().rposition(has).expect("it is computed"),
                )
            };
            for (product, waits) in waits.iter().enumerate() {
                for &other in waits {
                    assert!(of(other).1 < of(product).0, "{n}: {product} before {other}");
                }
            }
        }
    }
}
