//! What can be wrong with the numbers.

use crate::Span;

/// What can be wrong with the numbers that a layout or a plan is built from.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A world needs a rank.
    #[error("a world of 0 ranks")]
    EmptyWorld,
    /// A parameter list needs a parameter.
    #[error("an empty parameter list")]
    NoParameters,
    /// Names identify parameters, so each has one.
    #[error("parameter {index} has an empty name")]
    EmptyName {
        /// Its place in registration order.
        index: usize,
    },
    /// Names identify parameters, so no two share one.
    #[error("two parameters are named {name}")]
    DuplicateName {
        /// The shared name.
        name: String,
    },
    /// A matrix's sides do not multiply to its length.
    #[error("a matrix of {name} at {span} is {rows} x {cols}, which is not {} elements", span.len())]
    MatrixSides {
        /// The parameter.
        name: String,
        /// The matrix's elements in it.
        span: Span,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
    },
    /// The matrices of a Muon parameter must tile it, in ascending order.
    #[error(
        "the matrices of {name} do not tile its {elems} elements: expected one at {expected}, found {found}"
    )]
    Tiling {
        /// The parameter.
        name: String,
        /// Its elements.
        elems: usize,
        /// Where the next matrix, or the end, was expected.
        expected: usize,
        /// Where it is.
        found: usize,
    },
    /// A count does not fit the machine's word.
    #[error("{what} has more elements than fit in {} bits", usize::BITS)]
    TooLarge {
        /// A parameter's name, "the model" or "the layout".
        what: String,
    },
    /// A word that names none of the choices.
    #[error("unknown {what} `{given}`; choose one of {choices}")]
    UnknownChoice {
        /// What was to be chosen.
        what: &'static str,
        /// The unknown word.
        given: String,
        /// The known ones.
        choices: String,
    },
    /// A cost of the planner that no time can be computed with.
    #[error("{what} of {value} is not a positive number")]
    Cost {
        /// Which one.
        what: &'static str,
        /// Its value, as written.
        value: String,
    },
    /// No candidate of the planner fits.
    #[error("every plan needs more than {limit} bytes a rank: the least is {least}")]
    MemoryLimit {
        /// The limit, in bytes.
        limit: u64,
        /// What the most frugal candidate needs, in bytes.
        least: u64,
    },
}
