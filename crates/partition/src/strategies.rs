//! Strategies of proptest: models that shrink to small ones, and all that a plan is made of.

use std::num::NonZeroUsize;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use smallvec::SmallVec;

use crate::{
    Layout, Matrix, Param, Params, Placement, Plan, Policy, Route, Span, Stage, Terms, Wire,
    WorldSize,
};

/// Up to 12 parameters, empty ones and single elements among them: vectors, matrices of either
/// group, stacks, fused matrices and convolutions, in three element types.
pub fn params() -> impl Strategy<Value = Params> {
    vec((kind(), wire(), cost()), 1..=12).prop_map(|kinds| {
        let params = kinds
            .into_iter()
            .enumerate()
            .map(|(index, (kind, wire, cost))| {
                let (shape, sides) = kind.shape_and_matrices();
                param(format!("p{index}"), shape, wire, &sides, cost)
            });
        Params::new(params.collect()).expect("the names differ and the matrices tile")
    })
}

/// From 1 to 64 ranks: often more than a model has elements.
pub fn world() -> impl Strategy<Value = WorldSize> {
    (1..=64usize).prop_map(|n| WorldSize::new(n).expect("not 0"))
}

/// From 1 element, which puts every parameter in a bucket of its own, to more than a model has.
pub fn bucket_size() -> impl Strategy<Value = NonZeroUsize> {
    prop_oneof![1..=50usize, 50..=2000usize]
        .prop_map(|size| NonZeroUsize::new(size).expect("not 0"))
}

/// Any placement.
pub fn placement() -> impl Strategy<Value = Placement> {
    select(&Placement::ALL)
}

/// Any route.
pub fn route() -> impl Strategy<Value = Route> {
    select(&Route::ALL)
}

/// Any policy.
pub fn policy() -> impl Strategy<Value = Policy> {
    select(&Policy::ALL)
}

/// Parameters and a layout of them.
pub fn layout() -> impl Strategy<Value = (Params, Layout)> {
    (params(), world(), placement(), bucket_size()).prop_map(|(params, world, placement, size)| {
        let layout = Layout::new(&params, world, placement, size).expect("small");
        (params, layout)
    })
}

/// A plan of any parameters, layout, route and policy.
pub fn plan() -> impl Strategy<Value = Plan> {
    (layout(), route(), policy())
        .prop_map(|((params, layout), route, policy)| Plan::new(&params, layout, route, policy))
}

/// Terms of both stages, with up to 3 micro-batches.
pub fn terms() -> impl Strategy<Value = Terms> {
    (
        select(&Stage::ALL),
        1..=3usize,
        proptest::option::of(wire()),
        wire(),
        0..=40usize,
        any::<bool>(),
    )
        .prop_map(
            |(stage, accumulate, gradient_wire, result_wire, control_elems, overlap)| Terms {
                stage,
                accumulate: NonZeroUsize::new(accumulate).expect("not 0"),
                gradient_wire,
                result_wire,
                control_elems,
                overlap,
            },
        )
}

#[derive(Debug, Clone)]
enum Kind {
    /// AdamW, of any dimensions.
    Plain(Vec<usize>),
    Matrix {
        rows: usize,
        cols: usize,
    },
    Stack {
        count: usize,
        rows: usize,
        cols: usize,
    },
    /// Matrices of different numbers of rows, one below the other.
    Fused {
        rows: Vec<usize>,
        cols: usize,
    },
    Convolution {
        out: usize,
        rest: [usize; 3],
    },
}

impl Kind {
    /// The shape, and the sides of the matrices that tile it.
    fn shape_and_matrices(self) -> (Vec<usize>, Vec<(usize, usize)>) {
        match self {
            Self::Plain(shape) => (shape, Vec::new()),
            Self::Matrix { rows, cols } => (vec![rows, cols], vec![(rows, cols)]),
            Self::Stack { count, rows, cols } => {
                (vec![count, rows, cols], vec![(rows, cols); count])
            }
            Self::Fused { rows, cols } => (
                vec![rows.iter().sum(), cols],
                rows.into_iter().map(|rows| (rows, cols)).collect(),
            ),
            Self::Convolution {
                out,
                rest: [a, b, c],
            } => (vec![out, a, b, c], vec![(out, a * b * c)]),
        }
    }
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        2 => vec(0..=6usize, 0..=3).prop_map(Kind::Plain),
        1 => (0..=300usize).prop_map(|len| Kind::Plain(vec![len])),
        3 => (0..=12usize, 0..=12usize).prop_map(|(rows, cols)| Kind::Matrix { rows, cols }),
        1 => (13..=30usize, 13..=30usize).prop_map(|(rows, cols)| Kind::Matrix { rows, cols }),
        1 => (1..=5usize, 1..=6usize, 1..=6usize)
            .prop_map(|(count, rows, cols)| Kind::Stack { count, rows, cols }),
        1 => (vec(1..=6usize, 1..=4), 1..=8usize).prop_map(|(rows, cols)| Kind::Fused { rows, cols }),
        1 => (1..=6usize, [1..=3usize, 1..=3usize, 1..=3usize])
            .prop_map(|(out, rest)| Kind::Convolution { out, rest }),
    ]
}

fn wire() -> impl Strategy<Value = Wire> {
    prop_oneof![3 => Just(Wire::BF16), 1 => Just(Wire::F32), 1 => Just(Wire::F16)]
}

/// What an element costs, times the shorter side, as of a Newton-Schulz iteration; or of nothing
/// that has to do with elements, so that loads in costs and in elements part.
fn cost() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![3 => Just(None), 1 => (0..=5u64).prop_map(Some)]
}

fn param(
    name: String,
    shape: Vec<usize>,
    wire: Wire,
    sides: &[(usize, usize)],
    cost: Option<u64>,
) -> Param {
    let mut at = 0;
    let matrices = sides
        .iter()
        .filter(|(rows, cols)| rows * cols > 0)
        .map(|&(rows, cols)| {
            let span = Span::of_len(at, rows * cols);
            at = span.end;
            let cost = cost.unwrap_or((20 * rows * cols * rows.min(cols)) as u64);
            Matrix {
                span,
                rows,
                cols,
                cost,
            }
        });
    Param {
        name,
        matrices: matrices.collect(),
        shape: SmallVec::from_vec(shape),
        wire,
    }
}
