//! Which method, kernels, tiles and launches a batch on a CUDA device gets: from its shape and the
//! device, by a few measured numbers, never by a search while running.

use std::fmt;

use candle_core::DType;

use crate::hopper::deal::Deal;
use crate::hopper::program::{flops, program};
use crate::hopper::tiles::{Region, Width};
use crate::{Kernels, Method, NewtonSchulz};

/// How a batch of matrices of one shape is orthogonalized on a CUDA device.
///
/// What decides the bits of a result, the method and the kernels, depends on the device and the
/// shape alone, so that a matrix has one result in whatever batch it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// The products: `Standard` or `Gram`.
    pub method: Method,
    /// What their results are rounded to.
    pub dtype: DType,
    /// What computes them.
    pub products: Products,
}

/// What computes the products of a [`Choice`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Products {
    /// cuBLAS.
    Cublas,
    /// The kernels for Hopper.
    Hopper {
        /// The most columns of a tile of the n × n products.
        square: usize,
        /// The same of the n × m products.
        wide: usize,
        /// Whether the products are launched as one captured graph from their second run on.
        graph: bool,
    },
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.method, self.dtype.as_str())?;
        match self.products {
            Products::Cublas => write!(f, " by cublas"),
            Products::Hopper {
                square,
                wide,
                graph,
            } => {
                let graph = if graph { ", as a graph" } else { "" };
                write!(
                    f,
                    " by hopper kernels in tiles of {square} and {wide} columns{graph}"
                )
            }
        }
    }
}

/// A CUDA device, as far as it decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// Compute capability.
    pub(crate) capability: (i32, i32),
    pub(crate) multiprocessors: usize,
}

impl Gpu {
    /// Whether the kernels for Hopper run here, in `dtype`.
    pub(crate) fn has_hopper_kernels(self, dtype: DType) -> bool {
        self.capability == (9, 0) && matches!(dtype, DType::F16 | DType::BF16)
    }

    /// Clusters of two blocks that run at once, each block with a multiprocessor of its own.
    pub(crate) fn clusters(self) -> usize {
        (self.multiprocessors / 2).max(1)
    }
}

/// Of the n from which `Gram` is measured: what it costs beside its FLOPs, in hundredths of those of
/// `Standard`. It has more products, and smaller ones, which small matrices feel.
const GRAM_OVERHEAD: [(usize, u64); 2] = [(0, 125), (1025, 110)];

/// Products with fewer FLOPs on average take a device less time than a host takes to launch them.
const LAUNCH_BOUND_FLOPS: u64 = 4_000_000_000;

impl NewtonSchulz {
    /// Whether the kernels for Hopper are to be taken, on a device that may have them or not.
    pub(crate) fn takes_hopper_kernels(&self, gpu: Gpu, dtype: DType) -> bool {
        // Without a step there is no product.
        self.steps > 0 && self.kernels != Kernels::Cublas && gpu.has_hopper_kernels(dtype)
    }

    /// The method of n × m matrices, n ≤ m, where symmetric products cost a half.
    pub(crate) fn chosen_on_hopper(&self, n: usize, m: usize) -> Method {
        let rows = self.coefficients.steps(self.steps);
        let cost = |method| flops(&program(method, &rows), n, m);
        let (_, overhead) = *GRAM_OVERHEAD
            .iter()
            .rfind(|(from, _)| n >= *from)
            .expect("the first entry is for all");
        let gram = match self.method {
            Method::Standard => false,
            Method::Gram => m > n,
            Method::Auto => overhead * cost(Method::Gram) <= 100 * cost(Method::Standard),
        };
        if gram { Method::Gram } else { Method::Standard }
    }

    /// Whether `count` n × m matrices, n ≤ m, are bound by launches.
    pub(crate) fn is_launch_bound(&self, count: usize, n: usize, m: usize) -> bool {
        let rows = self.coefficients.steps(self.steps);
        let program = program(self.chosen_on_hopper(n, m), &rows);
        count as u64 * flops(&program, n, m) < LAUNCH_BOUND_FLOPS * program.len() as u64
    }

    /// The choice for `count` matrices of `rows` × `cols`, at least one of each.
    pub(crate) fn choose(
        &self,
        gpu: Gpu,
        dtype: DType,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Choice {
        if !self.takes_hopper_kernels(gpu, dtype) {
            let (method, products) = (self.chosen(rows, cols), Products::Cublas);
            return Choice {
                method,
                dtype,
                products,
            };
        }
        let (n, m) = (rows.min(cols), rows.max(cols));
        let width = |region| -> Width { Deal::new(region, count, gpu.clusters()).width };
        Choice {
            method: self.chosen_on_hopper(n, m),
            dtype,
            products: Products::Hopper {
                square: width(Region::Symmetric { n }).columns(),
                wide: width(Region::Full { rows: n, cols: m }).columns(),
                graph: self.is_launch_bound(count, n, m),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Gpu = Gpu {
        capability: (9, 0),
        multiprocessors: 132,
    };

    fn choose(count: usize, rows: usize, cols: usize) -> String {
        let ns = NewtonSchulz::default();
        ns.choose(H200, DType::F16, count, rows, cols).to_string()
    }

    #[test]
    fn shapes_get_what_was_fastest_when_measured() {
        for (count, rows, cols, expected) in [
            (
                1,
                1024,
                1024,
                "standard in f16 by hopper kernels in tiles of 64 and 64 columns, as a graph",
            ),
            (
                1,
                2048,
                2048,
                "standard in f16 by hopper kernels in tiles of 192 and 256 columns",
            ),
            (
                1,
                4096,
                4096,
                "standard in f16 by hopper kernels in tiles of 256 and 256 columns",
            ),
            (
                1,
                8192,
                2048,
                "gram in f16 by hopper kernels in tiles of 192 and 256 columns",
            ),
            (
                12,
                768,
                768,
                "standard in f16 by hopper kernels in tiles of 256 and 256 columns",
            ),
            (
                12,
                768,
                3072,
                "gram in f16 by hopper kernels in tiles of 256 and 256 columns",
            ),
            (
                24,
                1024,
                4096,
                "gram in f16 by hopper kernels in tiles of 256 and 256 columns",
            ),
        ] {
            assert_eq!(
                choose(count, rows, cols),
                expected,
                "{count} x {rows} x {cols}"
            );
        }
    }

    #[test]
    fn what_decides_the_bits_does_not_depend_on_the_batch() {
        let ns = NewtonSchulz::default();
        for (rows, cols) in [(30, 50), (1000, 1400), (2000, 2400), (700, 5000)] {
            let choice = |count| ns.choose(H200, DType::BF16, count, rows, cols);
            for count in [2, 7, 50] {
                assert_eq!(choice(count).method, choice(1).method);
                assert!(matches!(choice(count).products, Products::Hopper { .. }));
            }
        }
    }

    #[test]
    fn a_method_that_was_asked_for_is_taken() {
        let with = |method| NewtonSchulz {
            method,
            ..NewtonSchulz::default()
        };
        assert_eq!(with(Method::Gram).chosen_on_hopper(100, 101), Method::Gram);
        assert_eq!(with(Method::Gram).chosen_on_hopper(9, 9), Method::Standard);
        assert_eq!(
            with(Method::Standard).chosen_on_hopper(9, 99),
            Method::Standard
        );
        assert_eq!(
            with(Method::Auto).chosen_on_hopper(2048, 2300),
            Method::Standard
        );
        assert_eq!(
            with(Method::Auto).chosen_on_hopper(2048, 2700),
            Method::Gram
        );
        assert_eq!(
            with(Method::Auto).chosen_on_hopper(512, 800),
            Method::Standard
        );
        assert_eq!(with(Method::Auto).chosen_on_hopper(512, 900), Method::Gram);
    }

    #[test]
    fn others_get_cublas() {
        let ns = NewtonSchulz::default();
        let a100 = Gpu {
            capability: (8, 0),
            multiprocessors: 108,
        };
        let blackwell = Gpu {
            capability: (10, 0),
            ..H200
        };
        let forced = NewtonSchulz {
            kernels: Kernels::Cublas,
            ..NewtonSchulz::default()
        };
        for choice in [
            ns.choose(a100, DType::F16, 1, 64, 64),
            ns.choose(blackwell, DType::F16, 1, 64, 64),
            ns.choose(H200, DType::F32, 1, 64, 64),
            forced.choose(H200, DType::F16, 1, 64, 64),
        ] {
            assert_eq!(choice.products, Products::Cublas);
        }
        let choice = ns.choose(a100, DType::BF16, 1, 64, 200);
        assert_eq!(choice.to_string(), "gram in bf16 by cublas");
    }
}
