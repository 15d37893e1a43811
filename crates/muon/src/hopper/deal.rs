//! Which cluster computes which pairs of tiles.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::tiles::{BLOCK, Cut, Pair, Region, Tile, Width, pairs};

/// A list with more pairs has so many rounds that other cuts of it gain nothing.
const MOST_PAIRS_TO_CUT: usize = 3000;
/// The most pairs that are halved, and the most bands that are narrowed, to fill a last round.
const MOST_HALVED: usize = 66;
const MOST_NARROW_BANDS: usize = 200;

/// All pairs of a product, dealt to clusters.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Deal {
    /// The most columns of its tiles.
    pub(crate) width: Width,
    /// The pairs of one cluster after those of the other.
    pub(crate) tiles: Vec<Tile>,
    /// The first pair of each cluster, and the number of all.
    pub(crate) first: Vec<i32>,
}

impl Deal {
    /// Deals the region of each of `batch` matrices to at most `clusters` clusters, in the way that
    /// ends soonest: the longest pairs first, each to the cluster with the least so far.
    ///
    /// Tiles are 256 wide, a few of them cut narrower if that shortens the last round, and all of
    /// them narrower where there are not enough of 256 for all clusters.
    pub(crate) fn new(region: Region, batch: usize, clusters: usize) -> Self {
        let plain = pairs(region, batch, Cut::plain(Width::W256));
        let mut best = Dealt::new(plain, Width::W256, clusters);
        let (count, load_bound) = (best.pairs.len(), best.cost_with_loads(clusters));
        let mut least = load_bound;
        for cut in variations(region, batch, count) {
            let dealt = Dealt::new(pairs(region, batch, cut), cut.width, clusters);
            let cost = dealt.cost_with_loads(clusters);
            if cost < least - TIE {
                (best, least) = (dealt, cost);
            }
        }
        if count < clusters {
            let mut least = best.cost(clusters);
            for width in [Width::W192, Width::W128, Width::W64] {
                let dealt = Dealt::new(pairs(region, batch, Cut::plain(width)), width, clusters);
                let cost = dealt.cost(clusters);
                if cost < least - TIE {
                    (best, least) = (dealt, cost);
                }
            }
        }
        best.into_deal()
    }

    /// Clusters to launch; each has a pair at least.
    pub(crate) fn clusters(&self) -> usize {
        self.first.len() - 1
    }
}

/// Costs that differ by less are equal.
const TIE: f64 = 1e-7;

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

struct Dealt {
    width: Width,
    /// The longest first.
    pairs: Vec<Pair>,
    /// Indices into `pairs`, for each cluster.
    lists: Vec<Vec<usize>>,
    /// When the last cluster is done, in hundredths of a pair of 256 columns.
    end: u32,
}

impl Dealt {
    fn new(mut pairs: Vec<Pair>, width: Width, clusters: usize) -> Self {
        pairs.sort_by_key(|pair| Reverse(time(pair)));
        let mut lists = vec![Vec::new(); clusters.min(pairs.len())];
        let mut free: BinaryHeap<_> = (0..lists.len()).map(|list| Reverse((0, list))).collect();
        let mut end = 0;
        for (index, pair) in pairs.iter().enumerate() {
            let Reverse((busy, list)) = free.pop().expect("there are pairs, so there are clusters");
            lists[list].push(index);
            let until = busy + time(pair);
            end = end.max(until);
            free.push(Reverse((until, list)));
        }
        Self {
            width,
            pairs,
            lists,
            end,
        }
    }

    /// In pairs of 256 columns: the last cluster's end, and a tenth of the mean, since work that is
    /// done at all costs power.
    fn cost(&self, clusters: usize) -> f64 {
        f64::from(self.end) / 100.0 + self.power(clusters)
    }

    /// The same, where all that is loaded may last longer than any cluster computes: 4 MiB for each
    /// 64 of K in the time of a pair of 256 columns.
    fn cost_with_loads(&self, clusters: usize) -> f64 {
        let loads: usize = self.pairs.iter().map(loads).sum();
        let loads = loads as f64 / 4096.0;
        (f64::from(self.end) / 100.0).max(loads) + self.power(clusters)
    }

    fn power(&self, clusters: usize) -> f64 {
        let work: u32 = self.pairs.iter().flatten().map(Tile::cost).sum();
        0.1 * f64::from(work) / 100.0 / 2.0 / clusters as f64
    }

    fn into_deal(self) -> Deal {
        let mut tiles = Vec::with_capacity(2 * self.pairs.len());
        let mut first = vec![0];
        for list in &self.lists {
            tiles.extend(list.iter().flat_map(|&index| self.pairs[index]));
            first.push((tiles.len() / 2) as i32);
        }
        Deal {
            width: self.width,
            tiles,
            first,
        }
    }
}

/// The time of a pair is that of its wider tile.
fn time([a, b]: &Pair) -> u32 {
    a.cost().max(b.cost())
}

/// KiB that a pair loads for each 64 of K: 128 rows of A a block, and B.
fn loads([a, b]: &Pair) -> usize {
    const COLUMN_BYTES: usize = 2 * BLOCK;
    let columns = if a.shared > 0 {
        a.shared as usize
    } else {
        (a.columns + b.columns) as usize
    };
    32 + columns * COLUMN_BYTES / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTERS: usize = 66; // of an H200

    fn symmetric(n: usize, batch: usize) -> Deal {
        Deal::new(Region::Symmetric { n }, batch, CLUSTERS)
    }

    fn full(rows: usize, cols: usize, batch: usize) -> Deal {
        Deal::new(Region::Full { rows, cols }, batch, CLUSTERS)
    }

    #[test]
    fn widths_are_those_that_were_fastest_when_measured() {
        for (n, width) in [
            (256, Width::W64),
            (512, Width::W64),
            (1024, Width::W64),
            (2048, Width::W192),
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
    }

    #[test]
    fn a_deal_holds_every_pair_once_and_leaves_no_cluster_idle() {
        for (deal, least_pairs) in [
            (symmetric(1, 1), 1),
            (symmetric(700, 5), 30),
            (full(300, 5000, 2), 80),
            (symmetric(2048, 24), 24 * 36),
        ] {
            assert_eq!(deal.first[0], 0);
            assert!(deal.first.windows(2).all(|pair| pair[0] < pair[1]));
            let pairs = *deal.first.last().unwrap() as usize;
            assert_eq!(deal.tiles.len(), 2 * pairs);
            assert!(deal.clusters() <= CLUSTERS && pairs >= least_pairs.min(CLUSTERS));
            let mut seen: Vec<_> = deal
                .tiles
                .iter()
                .map(|t| (t.matrix, t.row, t.column))
                .collect();
            seen.sort_unstable();
            let count = seen.len();
            seen.dedup();
            assert_eq!(seen.len(), count);
        }
    }

    /// The plain cut of 12 × 768² is 72 pairs: two rounds on 66 clusters.
    #[test]
    fn a_short_last_round_is_made_shorter() {
        let plain = pairs(Region::Symmetric { n: 768 }, 12, Cut::plain(Width::W256));
        let plain = Dealt::new(plain, Width::W256, CLUSTERS);
        assert_eq!((plain.pairs.len(), plain.end), (72, 200));
        let deal = symmetric(768, 12);
        let busy = deal.first.windows(2).map(|list| {
            let of = 2 * list[0] as usize..2 * list[1] as usize;
            let lists = deal.tiles[of].chunks_exact(2);
            lists
                .map(|pair| pair[0].cost().max(pair[1].cost()))
                .sum::<u32>()
        });
        assert!(busy.max().unwrap() < 160);
    }
}
