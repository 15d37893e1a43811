//! Into which tiles a product is cut.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::pairs::{Cut, even_pairs, medium_pairs, pairs, small_pairs};
use super::tiles::{BLOCK, Pair, Region, Tile, Width};

/// With more pairs there are so many rounds that other cuts gain nothing.
const MOST_PAIRS_TO_CUT: usize = 3000;
/// The most pairs that are halved, and the most bands that are narrowed, to fill a last round.
const MOST_HALVED: usize = 66;
const MOST_NARROW_BANDS: usize = 200;

/// The pairs of each of a batch of matrices, cut in one way.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Pieces {
    /// The most columns of a tile.
    pub(crate) width: Width,
    pub(crate) pairs: Vec<Pair>,
}

impl Pieces {
    fn new(region: Region, batch: usize, cut: Cut) -> Self {
        Self {
            width: cut.width,
            pairs: pairs(region, batch, cut),
        }
    }

    /// The way that ends soonest where the matrices keep step: where all pairs of this product are
    /// done, and nothing else meanwhile.
    ///
    /// Tiles are 256 wide, a few of them cut narrower if that shortens the last round, and all of
    /// them narrower where there are few of 256 for all clusters, but at most `widest`.
    pub(crate) fn in_step(region: Region, batch: usize, clusters: usize, widest: Width) -> Self {
        let plain = Self::new(region, batch, Cut::plain(Width::W256));
        let count = plain.pairs.len();
        let mut least = plain.rounds(clusters).cost_with_loads();
        let mut best = plain;
        for cut in variations(region, batch, count) {
            let pieces = Self::new(region, batch, cut);
            let cost = pieces.rounds(clusters).cost_with_loads();
            if cost < least - TIE {
                (best, least) = (pieces, cost);
            }
        }
        if count < clusters || widest < Width::W256 {
            let mut least = match widest {
                Width::W256 => best.rounds(clusters).cost(),
                _ => f64::INFINITY,
            };
            let narrower = Width::ALL
                .into_iter()
                .rev()
                .filter(|&width| width < Width::W256);
            for width in narrower.filter(|&width| width <= widest) {
                let pieces = Self::new(region, batch, Cut::plain(width));
                let cost = pieces.rounds(clusters).cost();
                if cost < least - TIE {
                    (best, least) = (pieces, cost);
                }
            }
        }
        if let Region::Symmetric { n } = region
            && widest == Width::W256
            && count < 2 * clusters
        {
            best = best.or_cheaper(Width::W160, medium_pairs(n, batch), clusters);
        }
        best
    }

    /// The same for n × n products A Aᵀ, of which smaller tiles can be cut, and tiles that take the same time.
    pub(crate) fn of_squares(n: usize, batch: usize, clusters: usize) -> Self {
        let mut best = Self::in_step(Region::Symmetric { n }, batch, clusters, Width::W256);
        if best.width == Width::W64 {
            best = best.or_cheaper(Width::W64, small_pairs(n, batch), clusters);
        }
        // With more, all of them wait for memory at once.
        let even = even_pairs(n, batch);
        if even.len() <= clusters {
            best = best.or_cheaper(Width::W128, even, clusters);
        }
        best
    }

    /// These, or others that end sooner.
    fn or_cheaper(self, width: Width, pairs: Vec<Pair>, clusters: usize) -> Self {
        let other = Self { width, pairs };
        let is_cheaper = other.rounds(clusters).cost() < self.rounds(clusters).cost() - TIE;
        if is_cheaper { other } else { self }
    }

    /// The ways of least work, for matrices that need not keep step.
    pub(crate) fn whole(region: Region, batch: usize) -> Vec<Self> {
        let plain = Cut::plain(Width::W256);
        let crossed = Cut {
            crossed: true,
            ..plain
        };
        let cuts: &[Cut] = match region {
            Region::Symmetric { .. } => &[plain, crossed],
            Region::Full { .. } => &[plain],
        };
        let pieces = cuts.iter().map(|&cut| Self::new(region, batch, cut));
        pieces.collect()
    }

    /// The longest first, each to the cluster that is free first.
    fn rounds(&self, clusters: usize) -> Rounds {
        let mut times: Vec<_> = self.pairs.iter().map(|pair| Reverse(cost(pair))).collect();
        times.sort_unstable();
        let mut free: BinaryHeap<_> = vec![Reverse(0); clusters].into();
        let mut end = 0;
        for Reverse(time) in times {
            let Reverse(busy) = free.pop().expect("a device has a cluster");
            end = end.max(busy + time);
            free.push(Reverse(busy + time));
        }
        let work: u64 = self.pairs.iter().flatten().map(Tile::cost).sum();
        let loads: usize = self.pairs.iter().map(loads).sum();
        Rounds {
            end: end as f64 / 100.0,
            loads: loads as f64 / 4096.0,
            power: 0.1 * work as f64 / 100.0 / 2.0 / clusters as f64,
        }
    }
}

/// Costs that differ by less are equal.
const TIE: f64 = 1e-7;

/// What a way to cut costs, in pairs of 256 columns.
struct Rounds {
    /// When the last cluster is done.
    end: f64,
    /// The time of all loads: 4 MiB for each 64 of K in the time of a pair of 256 columns.
    loads: f64,
    /// A tenth of what a cluster does on average: work that is done at all costs power.
    power: f64,
}

impl Rounds {
    fn cost(&self) -> f64 {
        self.end + self.power
    }

    /// The same, where all that is loaded may last longer than any cluster computes.
    fn cost_with_loads(&self) -> f64 {
        self.end.max(self.loads) + self.power
    }
}

/// Cuts into tiles of 256 columns, some of them narrower.
fn variations(region: Region, batch: usize, count: usize) -> Vec<Cut> {
    let crossed: &[bool] = match region {
        Region::Symmetric { .. } => &[false, true],
        Region::Full { .. } => &[false],
    };
    let rows = match region {
        Region::Symmetric { n } => n,
        Region::Full { rows, .. } => rows,
    };
    let bands = rows.div_ceil(256) * batch;
    let mut cuts = Vec::new();
    for &crossed in crossed {
        let plain = Cut {
            crossed,
            ..Cut::plain(Width::W256)
        };
        if crossed {
            cuts.push(plain);
        }
        if count <= MOST_PAIRS_TO_CUT {
            cuts.extend((1..=MOST_HALVED).map(|halved| Cut { halved, ..plain }));
            let narrow = 1..=bands.min(MOST_NARROW_BANDS);
            cuts.extend(narrow.map(|narrow_bands| Cut {
                narrow_bands,
                ..plain
            }));
        }
    }
    cuts
}

/// The time of a pair is that of its wider tile.
pub(super) fn cost([a, b]: &Pair) -> u64 {
    a.cost().max(b.cost())
}

/// KiB that a pair of whole tiles loads for each 64 of K: 128 rows of A a block, and B.
fn loads([a, b]: &Pair) -> usize {
    const BLOCK_KIB: usize = 2 * BLOCK * BLOCK / 1024;
    let blocks = if a.shared > 0 {
        a.shared.into()
    } else {
        a.columns().div_ceil(BLOCK) + b.columns().div_ceil(BLOCK)
    };
    32 + blocks * BLOCK_KIB
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTERS: usize = 66; // of an H200

    fn symmetric(n: usize, batch: usize) -> Pieces {
        Pieces::in_step(Region::Symmetric { n }, batch, CLUSTERS, Width::W256)
    }

    fn full(rows: usize, cols: usize, batch: usize) -> Pieces {
        Pieces::in_step(Region::Full { rows, cols }, batch, CLUSTERS, Width::W256)
    }

    #[test]
    fn widths_are_those_that_were_fastest_when_measured() {
        for (n, width) in [
            (256, Width::W64),
            (512, Width::W64),
            (1024, Width::W64),
            (2048, Width::W160),
            (4096, Width::W256),
        ] {
            assert_eq!(symmetric(n, 1).width, width, "{n}");
        }
        assert_eq!(full(256, 256, 1).width, Width::W64);
        assert_eq!(full(1024, 1024, 1).width, Width::W64);
        assert_eq!(full(1024, 4096, 1).width, Width::W256);
        assert_eq!(full(2048, 2048, 1).width, Width::W256);
        assert_eq!(symmetric(768, 12).width, Width::W256);
        assert_eq!(full(768, 3072, 12).width, Width::W256);
        assert_eq!(symmetric(1024, 24).width, Width::W256);
        let region = Region::Full {
            rows: 1024,
            cols: 4096,
        };
        let small = |n| Pieces::of_squares(n, 1, CLUSTERS).pairs.len();
        assert_eq!((small(1024), small(1025)), (64, 57));
        let of_squares = |n| Pieces::of_squares(n, 1, CLUSTERS).width;
        assert_eq!(of_squares(2048), Width::W128);
        assert_eq!(of_squares(2049), Width::W192);
        let narrow = Pieces::in_step(region, 1, CLUSTERS, Width::W128);
        assert_eq!(narrow.width, Width::W128);
    }

    /// The plain cut of 12 × 768² is 72 pairs: two rounds on 66 clusters.
    #[test]
    fn a_short_last_round_is_made_shorter() {
        let plain = Pieces::new(Region::Symmetric { n: 768 }, 12, Cut::plain(Width::W256));
        assert_eq!(plain.pairs.len(), 72);
        assert!((plain.rounds(CLUSTERS).end - 2.0).abs() < 1e-9);
        assert!(symmetric(768, 12).rounds(CLUSTERS).end < 1.6);
    }
}
