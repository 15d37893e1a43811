//! The one decision of a step, from one sum over ranks.
//!
//! Every rank contributes a [`Census`]; their sum is the same everywhere, so all ranks decide alike.

use polarshard_partition::Rank;

use crate::channel::exact;

/// A value that no state's hash takes: the rank met an error.
const FAILED: f64 = -1.0;

/// What one rank says at the boundary.
#[derive(Debug, Clone)]
pub(crate) struct Census {
    /// Σg² over the elements this rank owns, loss scale and weights included.
    pub(crate) sum_of_squares: f64,
    /// Those of them that are of AdamW's parameters.
    pub(crate) squares_of_adamw: f64,
    /// Elements it owns that are infinite or no number.
    pub(crate) non_finite: u64,
    /// The weights of its micro-batches.
    pub(crate) weight: f64,
    /// By matrix: whether an element of its slices is not zero.
    pub(crate) non_zero: Vec<bool>,
    /// By parameter: whether a gradient came in any micro-batch.
    pub(crate) present: Vec<bool>,
    /// A hash of all that ranks must agree on; `None` after an error.
    pub(crate) state: Option<u64>,
}

/// What all ranks do.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Decision {
    /// The micro-batches are dropped: these ranks met an error.
    Drop(Vec<Rank>),
    /// The step is refused: these ranks do not agree with this one.
    Refuse(Vec<Rank>),
    /// The step is skipped: so many elements are not finite.
    Skip(u64),
    /// The step is taken.
    Apply(Verdict),
}

/// What the ranks found out together about the gradients of a step that is taken.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Verdict {
    /// Σg² over all elements, loss scale and weights included.
    pub(crate) sum_of_squares: f64,
    /// Those of AdamW's parameters.
    pub(crate) squares_of_adamw: f64,
    /// The weights of all micro-batches of all ranks.
    pub(crate) weight: f64,
    /// By matrix: whether its whole gradient is zero.
    pub(crate) zero: Vec<bool>,
    /// By parameter: whether no rank had a gradient.
    pub(crate) absent: Vec<bool>,
}

impl Census {
    /// Elements of the encoded form.
    pub(crate) fn len(matrices: usize, parameters: usize, world: usize) -> usize {
        4 + matrices + parameters + world
    }

    /// `[Σg², Σg² of AdamW's, non-finite, weight, one a matrix, one a parameter, one a rank]`.
    pub(crate) fn encode(&self, rank: Rank, world: usize) -> Vec<f64> {
        let flag = |set: &bool| f64::from(u8::from(*set));
        let mut values = vec![
            self.sum_of_squares,
            self.squares_of_adamw,
            self.non_finite as f64,
            self.weight,
        ];
        values.extend(self.non_zero.iter().map(flag));
        values.extend(self.present.iter().map(flag));
        let slots = values.len();
        values.resize(slots + world, 0.0);
        values[slots + rank.0] = self.state.map_or(FAILED, exact);
        values
    }

    /// Reads the sum of all ranks' encodings.
    pub(crate) fn decide(&self, sums: &[f64], rank: Rank) -> Decision {
        let (head, rest) = sums.split_at(4);
        let (matrices, rest) = rest.split_at(self.non_zero.len());
        let (parameters, slots) = rest.split_at(self.present.len());
        let those = |test: &dyn Fn(f64) -> bool| -> Vec<Rank> {
            slots
                .iter()
                .enumerate()
                .filter(|(_, value)| test(**value))
                .map(|(rank, _)| Rank(rank))
                .collect()
        };
        let failed = those(&|value| value == FAILED);
        if !failed.is_empty() {
            return Decision::Drop(failed);
        }
        let drifted = those(&|value| value != slots[rank.0]);
        if !drifted.is_empty() {
            return Decision::Refuse(drifted);
        }
        if head[2] > 0.0 {
            return Decision::Skip(head[2] as u64);
        }
        Decision::Apply(Verdict {
            sum_of_squares: head[0],
            squares_of_adamw: head[1],
            weight: head[3],
            zero: matrices.iter().map(|count| *count == 0.0).collect(),
            absent: parameters.iter().map(|count| *count == 0.0).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn census() -> Census {
        Census {
            sum_of_squares: 2.0,
            squares_of_adamw: 0.5,
            non_finite: 0,
            weight: 1.0,
            non_zero: vec![false, true],
            present: vec![true],
            state: Some(u64::MAX),
        }
    }

    fn decide(all: &[Census], rank: usize) -> Decision {
        let mut sums = vec![0.0; Census::len(2, 1, all.len())];
        for (rank, census) in all.iter().enumerate() {
            for (sum, value) in sums.iter_mut().zip(census.encode(Rank(rank), all.len())) {
                *sum += value;
            }
        }
        all[rank].decide(&sums, Rank(rank))
    }

    #[test]
    fn a_matrix_is_zero_only_if_it_is_zero_on_all_owners() {
        let other = Census {
            non_zero: vec![false, false],
            present: vec![false],
            ..census()
        };
        let expected = Verdict {
            sum_of_squares: 4.0,
            squares_of_adamw: 1.0,
            weight: 2.0,
            zero: vec![true, false],
            absent: vec![false],
        };
        assert_eq!(decide(&[census(), other], 1), Decision::Apply(expected));
    }

    #[test]
    fn an_error_comes_before_all_else_and_is_named() {
        let failed = Census {
            state: None,
            ..census()
        };
        let infinite = Census {
            non_finite: 3,
            ..census()
        };
        let all = [infinite.clone(), census(), failed];
        for rank in 0..3 {
            assert_eq!(decide(&all, rank), Decision::Drop(vec![Rank(2)]));
        }
        assert_eq!(decide(&[infinite, census()], 0), Decision::Skip(3));
    }

    #[test]
    fn a_rank_that_drifted_is_named_by_the_others() {
        let drifted = Census {
            state: Some(u64::MAX - (1 << 12)),
            ..census()
        };
        let all = [census(), drifted, census()];
        assert_eq!(decide(&all, 0), Decision::Refuse(vec![Rank(1)]));
        assert_eq!(decide(&all, 1), Decision::Refuse(vec![Rank(0), Rank(2)]));
    }
}
