//! The products of an iteration, on stacks at their addresses.

use super::maps::Stack;
use crate::hopper::program::{Buffer, Product, Scalars};
use crate::hopper::tiles::Region;
use crate::hopper::workspace::{Batch, Workspace};

/// What the kernels compute, by their names.
#[derive(Debug, Clone, Copy)]
pub(super) enum Op {
    Symmetric,
    Apply,
    ApplyTransposed,
}

/// A product of stacks at their addresses.
pub(super) struct Step {
    pub(super) op: Op,
    pub(super) region: Region,
    pub(super) a: Stack,
    pub(super) b: Stack,
    pub(super) d: Stack,
    pub(super) scalars: Scalars,
}

/// The stacks of a workspace.
pub(super) struct Stacks {
    pub(super) base: u64,
    pub(super) batch: Batch,
    pub(super) workspace: Workspace,
}

impl Stacks {
    /// All matrices of a stack, tall ones as their transposes.
    pub(super) fn all(&self, buffer: Buffer) -> Stack {
        let Batch { n, m, .. } = self.batch;
        let cols = match buffer {
            Buffer::X | Buffer::Y => m,
            _ => n,
        };
        Stack {
            address: self.base + self.workspace.start(buffer) as u64,
            count: self.batch.count(),
            rows: n,
            cols,
        }
    }

    /// The last product's results: wide ones, and behind them tall ones, no longer transposed.
    fn results(&self, buffer: Buffer) -> [Stack; 2] {
        let Batch { n, m, wide, tall } = self.batch;
        let wide_results = self.all(buffer).take(wide);
        let tall_results = Stack {
            address: wide_results.address + (wide * wide_results.matrix_bytes()) as u64,
            count: tall,
            rows: m,
            cols: n,
        };
        [wide_results, tall_results]
    }

    /// The products of a program, and the last one, in which wide and tall matrices are computed
    /// apart, the latter with transposed results.
    pub(super) fn steps(&self, program: &[Product]) -> (Vec<Step>, [Option<Step>; 2]) {
        let Batch { n, m, wide, .. } = self.batch;
        let full = Region::Full { rows: n, cols: m };
        let (last, others) = program.split_last().expect("an iteration has a step");
        let step = |product: &Product| {
            let (op, region) = if product.is_symmetric() {
                (Op::Symmetric, Region::Symmetric { n })
            } else {
                (Op::Apply, full)
            };
            Step {
                op,
                region,
                a: self.all(product.a),
                b: self.all(product.b),
                d: self.all(product.d),
                scalars: product.scalars,
            }
        };
        let (a, b) = (self.all(last.a), self.all(last.b));
        let [wide_results, tall_results] = self.results(last.d);
        let part = |op, a, b, d: Stack| {
            (d.count > 0).then_some(Step {
                op,
                region: full,
                a,
                b,
                d,
                scalars: last.scalars,
            })
        };
        let last = [
            part(Op::Apply, a.take(wide), b.take(wide), wide_results),
            part(
                Op::ApplyTransposed,
                a.skip(wide),
                b.skip(wide),
                tall_results,
            ),
        ];
        (others.iter().map(step).collect(), last)
    }
}
