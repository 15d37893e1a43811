//! Lists of pairs, as they grow.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Launch, Schedule, Stage, product_of};
use crate::hopper::program::Product;
use crate::hopper::tiles::{Pair, Tile};

/// What was dealt to each cluster, and when each is free.
pub(super) struct Clusters {
    free: BinaryHeap<Reverse<(u64, usize)>>,
    lists: Vec<Vec<Pair>>,
    end: u64,
}

impl Clusters {
    pub(super) fn new(count: usize) -> Self {
        Self {
            free: (0..count).map(|cluster| Reverse((0, cluster))).collect(),
            lists: vec![Vec::new(); count],
            end: 0,
        }
    }

    /// When the next cluster is free.
    pub(super) fn now(&self) -> u64 {
        self.free.peek().map_or(0, |Reverse((at, _))| *at)
    }

    /// The next cluster stays idle until then.
    pub(super) fn wait_until(&mut self, at: u64) {
        if let Some(Reverse((_, cluster))) = self.free.pop() {
            self.free.push(Reverse((at, cluster)));
        }
    }

    /// Gives a pair to the next cluster, and says when it is done.
    pub(super) fn deal(&mut self, pair: &Pair, product: u16, time: u64) -> u64 {
        let Reverse((at, cluster)) = self.free.pop().expect("a device has a cluster");
        self.lists[cluster].push(pair.map(|tile| Tile { product, ..tile }));
        self.free.push(Reverse((at + time, cluster)));
        self.end = self.end.max(at + time);
        at + time
    }
}

/// Launches that are dealt.
pub(super) struct Dealt<'a> {
    program: &'a [Product],
    matrices: usize,
    launches: Vec<Launch>,
    tiles: Vec<Tile>,
    rest: Vec<i32>,
    pub(super) end: u64,
}

impl<'a> Dealt<'a> {
    /// Of so many matrices.
    pub(super) fn new(program: &'a [Product], matrices: usize) -> Self {
        Self {
            program,
            matrices,
            launches: Vec::new(),
            tiles: Vec::new(),
            rest: Vec::new(),
            end: 0,
        }
    }

    pub(super) fn push(&mut self, clusters: &Clusters) {
        let lists = clusters.lists.iter().filter_map(|list| list.split_first());
        let lists: Vec<_> = lists.collect();
        self.launches.push(Launch {
            stage: Stage::of(lists.iter().flat_map(|(first, rest)| {
                let rest = rest.iter().flatten();
                first.iter().chain(rest)
            })),
            tiles_from: self.tiles.len(),
            rest_from: self.rest.len(),
            clusters: lists.len(),
        });
        for (first, _) in &lists {
            self.tiles.extend(*first);
        }
        let mut pairs = lists.len();
        self.rest.push(pairs as i32);
        for (_, rest) in &lists {
            self.tiles.extend(rest.iter().flatten());
            pairs += rest.len();
            self.rest.push(pairs as i32);
        }
        self.end += clusters.end;
    }

    pub(super) fn into_schedule(self) -> Schedule {
        // As `product_of` has them.
        let products = self.program.len() + 1;
        let mut parts = vec![0; self.matrices * products];
        let (mut square, mut wide) = (0, 0);
        for tile in &self.tiles {
            let product = usize::from(tile.product);
            parts[tile.matrix as usize * products + product] += tile.warpgroups();
            let is_square = product_of(self.program, tile).is_symmetric();
            let most = if is_square { &mut square } else { &mut wide };
            *most = tile.columns().max(*most);
        }
        Schedule {
            square,
            wide,
            launches: self.launches,
            tiles: self.tiles,
            rest: self.rest,
            parts,
            end: self.end,
        }
    }
}
