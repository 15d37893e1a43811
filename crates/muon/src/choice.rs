//! Which method, kernels and tiles a batch on a CUDA device gets: from its shape and the
//! device, by a few measured numbers, never by a search while running.

use std::fmt;

use candle_core::DType;

use crate::bands::{bands, computed_elements};
use crate::hopper::program::{flops, program};
use crate::hopper::schedule::Schedule;
use crate::hopper::triangle::LONGEST_SIDE;
use crate::hopper::workspace::Batch;
use crate::{Kernels, Method, NewtonSchulz, measured};

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
    /// Floating-point operations that are executed for the batch, a multiply-add counted as two: of a
    /// symmetric product by the kernels for Hopper a half, and what they compute beyond its diagonal
    /// and beyond edges; by cuBLAS what is in its bands.
    pub flops: u64,
}

/// What computes the products of a [`Choice`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Products {
    /// cuBLAS.
    Cublas {
        /// In how many bands of rows a symmetric result is cut, of each of which what lies right of its diagonal block
        /// is not computed.
        bands: usize,
    },
    /// The kernels for Hopper.
    Hopper {
        /// The most columns of a tile of the n × n products.
        square: usize,
        /// The same of the n × m products.
        wide: usize,
        /// In how many launches the products are computed.
        launches: usize,
    },
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.method, self.dtype.as_str())?;
        match self.products {
            Products::Cublas { bands: 1 } => write!(f, " by cublas"),
            Products::Cublas { bands } => {
                write!(f, " by cublas, symmetric products in {bands} bands")
            }
            Products::Hopper {
                square,
                wide,
                launches,
            } => {
                write!(
                    f,
                    " by hopper kernels in tiles of {square} and {wide} columns"
                )?;
                match launches {
                    1 => write!(f, ", in one launch"),
                    _ => write!(f, ", in {launches} launches"),
                }
            }
        }
    }
}

/// A CUDA device, as far as it decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// Compute capability.
    pub(crate) capability: (i32, i32),
    /// Clusters of two blocks of the kernels for Hopper that run at once.
    pub(crate) clusters: usize,
}

impl Gpu {
    /// The capability of the kernels for Hopper.
    pub(crate) const HOPPER: (i32, i32) = (9, 0);

    /// Whether the kernels for Hopper run here, in `dtype`.
    pub(crate) fn has_hopper_kernels(self, dtype: DType) -> bool {
        self.capability == Self::HOPPER
            && self.clusters > 0
            && matches!(dtype, DType::F16 | DType::BF16)
    }
}

/// Of the n from which `Gram` is measured: what it costs beside its FLOPs, in hundredths of those of
/// `Standard`. It has more products, and smaller ones, which small matrices feel.
const GRAM_OVERHEAD: [(usize, u128); 2] = [(0, 125), (1025, 110)];

impl NewtonSchulz {
    /// Whether the kernels for Hopper are to be taken for matrices of at most so many rows and columns, on a
    /// device that may have them or not.
    pub(crate) fn takes_hopper_kernels(&self, gpu: Gpu, dtype: DType, longer_side: usize) -> bool {
        longer_side <= LONGEST_SIDE
            && self.kernels != Kernels::Cublas
            && gpu.has_hopper_kernels(dtype)
    }

    /// The method of n × m matrices, n ≤ m, where symmetric products cost a half.
    pub(crate) fn chosen_on_hopper(&self, n: usize, m: usize) -> Method {
        let rows = self.coefficients.steps(self.steps);
        let cost = |method| flops(&program(method, &rows), n, m);
        let overhead = measured::at(&GRAM_OVERHEAD, n);
        let gram = match self.method {
            Method::Standard => false,
            Method::Gram => m > n,
            Method::Auto => {
                overhead.saturating_mul(cost(Method::Gram))
                    <= cost(Method::Standard).saturating_mul(100)
            }
        };
        if gram { Method::Gram } else { Method::Standard }
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
        let (n, m) = (rows.min(cols), rows.max(cols));
        if !self.takes_hopper_kernels(gpu, dtype, m) {
            return self.choose_cublas(dtype, count, n, m);
        }
        let method = self.chosen_on_hopper(n, m);
        let batch = Batch {
            n,
            m,
            wide: count,
            tall: 0,
        };
        let program = program(method, &self.coefficients.steps(self.steps));
        let schedule = Schedule::new(&program, batch, gpu.clusters);
        Choice {
            method,
            dtype,
            products: Products::Hopper {
                square: schedule.square,
                wide: schedule.wide,
                launches: schedule.launches.len(),
            },
            flops: schedule.flops(&program, batch),
        }
    }

    fn choose_cublas(&self, dtype: DType, count: usize, n: usize, m: usize) -> Choice {
        let method = self.chosen(n, m);
        let program = program(method, &self.coefficients.steps(self.steps));
        let whole = self.flops(n, m);
        let symmetric = 2 * u128::from(whole).saturating_sub(flops(&program, n, m));
        let (all, computed) = (n as u128 * n as u128, computed_elements(dtype, n));
        let left_out =
            symmetric / all * (all - computed) + symmetric % all * (all - computed) / all;
        Choice {
            method,
            dtype,
            products: Products::Cublas {
                bands: bands(dtype, n).len(),
            },
            flops: (count as u64).saturating_mul(whole - left_out as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Gpu = Gpu {
        capability: Gpu::HOPPER,
        clusters: 66,
    };

    /// The method, the columns of tiles, and the number of launches.
    fn choose(count: usize, rows: usize, cols: usize) -> String {
        let choice = NewtonSchulz::default().choose(H200, DType::F16, count, rows, cols);
        let Products::Hopper {
            square,
            wide,
            launches,
        } = choice.products
        else {
            return choice.to_string();
        };
        format!(
            "{} in tiles of {square} and {wide}, {launches}",
            choice.method
        )
    }

    #[test]
    fn longer_matrices_than_the_kernels_count_are_left_to_cublas() {
        let products = |rows, cols| {
            let choice = NewtonSchulz::default().choose(H200, DType::F16, 1, rows, cols);
            choice.products
        };
        assert!(matches!(products(8, 4_194_240), Products::Hopper { .. }));
        assert_eq!(products(8, 4_194_241), Products::Cublas { bands: 1 });
        assert_eq!(products(5_000_000, 64), Products::Cublas { bands: 1 });
    }

    #[test]
    fn shapes_get_what_was_fastest_when_measured() {
        for (count, rows, cols, expected) in [
            (1, 1024, 1024, "standard in tiles of 64 and 64, 15"),
            (1, 2048, 2048, "standard in tiles of 128 and 256, 15"),
            (1, 4096, 4096, "standard in tiles of 256 and 256, 15"),
            (1, 1024, 4096, "gram in tiles of 64 and 256, 17"),
            (1, 8192, 2048, "gram in tiles of 160 and 256, 17"),
            (12, 768, 768, "standard in tiles of 256 and 256, 1"),
            (12, 768, 3072, "gram in tiles of 256 and 256, 1"),
            (24, 1024, 4096, "gram in tiles of 256 and 256, 1"),
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
            clusters: 0,
        };
        let blackwell = Gpu {
            capability: (10, 0),
            ..H200
        };
        let too_small = Gpu {
            clusters: 0,
            ..H200
        };
        let forced = NewtonSchulz {
            kernels: Kernels::Cublas,
            ..NewtonSchulz::default()
        };
        for choice in [
            ns.choose(a100, DType::F16, 1, 64, 64),
            ns.choose(blackwell, DType::F16, 1, 64, 64),
            ns.choose(too_small, DType::F16, 1, 64, 64),
            ns.choose(H200, DType::F32, 1, 64, 64),
            forced.choose(H200, DType::F16, 1, 64, 64),
        ] {
            assert_eq!(choice.products, Products::Cublas { bands: 1 });
        }
        let choice = ns.choose(a100, DType::BF16, 1, 64, 200);
        assert_eq!(choice.to_string(), "gram in bf16 by cublas");
        assert_eq!(choice.flops, ns.flops(64, 200));
    }

    #[test]
    fn cublas_leaves_out_what_is_right_of_bands() {
        let ns = NewtonSchulz {
            method: Method::Standard,
            ..NewtonSchulz::default()
        };
        let a100 = Gpu {
            capability: (8, 0),
            clusters: 0,
        };
        let choice = ns.choose(a100, DType::F32, 3, 2048, 4096);
        let expected = "standard in f32 by cublas, symmetric products in 4 bands";
        assert_eq!(choice.to_string(), expected);
        // Of four bands 1 + 2 + 3 + 4 parts of 16 are computed, of X Xᵀ and of R².
        let (n, m) = (2048, 4096);
        let step = 2 * n * n * m * 10 / 16 + 2 * n * n * n * 10 / 16 + 2 * n * n * m;
        assert_eq!(choice.flops, 3 * 5 * step);
    }
}
