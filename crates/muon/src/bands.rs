//! How cuBLAS, which has no product A B of symmetric matrices that commute, computes about a half of its result: rows
//! are cut into bands, and each band is computed up to the end of its block on the diagonal. What lies above the
//! diagonal is then a copy of what lies below.

use std::ops::Range;

use candle_core::DType;

use crate::measured;

/// From which n on a result has so many bands, as measured on an H200 (docs/gpu.md): with more of them less is computed,
/// but a product of a narrow band is slower.
const IN_HALF_PRECISION: [(usize, usize); 5] = [(0, 1), (3000, 3), (4096, 4), (6144, 6), (8192, 8)];
const IN_F32: [(usize, usize); 3] = [(0, 1), (1536, 3), (2048, 4)];
/// Bands begin at multiples of this.
const ROWS: usize = 128;

/// The rows of each band of an n × n result.
pub(crate) fn bands(dtype: DType, n: usize) -> Vec<Range<usize>> {
    let table: &[_] = match dtype {
        DType::F32 => &IN_F32,
        _ => &IN_HALF_PRECISION,
    };
    let rows = n.div_ceil(measured::at(table, n)).next_multiple_of(ROWS);
    (0..n)
        .step_by(rows.max(1))
        .map(|start| start..n.min(start + rows))
        .collect()
}

/// How many elements of an n × n result are computed.
pub(crate) fn computed_elements(dtype: DType, n: usize) -> u128 {
    let of = |band: Range<usize>| band.len() as u128 * band.end as u128;
    bands(dtype, n).into_iter().map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_follow_each_other_and_hold_all_below_the_diagonal() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for n in [
                1, 127, 128, 129, 1000, 1025, 2048, 3001, 4096, 4097, 8192, 9001,
            ] {
                let bands = bands(dtype, n);
                let ends = bands.windows(2).all(|pair| pair[0].end == pair[1].start);
                assert!(ends && bands[0].start == 0 && bands[bands.len() - 1].end == n);
                let n = n as u128;
                let least = n * (n + 1) / 2;
                assert!(
                    (least..=n * n).contains(&computed_elements(dtype, n as usize)),
                    "{dtype:?} {n}"
                );
            }
        }
    }
}
