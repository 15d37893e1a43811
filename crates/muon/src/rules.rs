use std::collections::BTreeSet;
use std::fmt;

use wildmatch::WildMatch;

use crate::{Decision, Error, MatrixShape, Reason, Routed, RoutingTable};

/// What to do with the parameters whose names match a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rule {
    /// Muon, with the matrices that the number of dimensions suggests: 2 is a matrix, 3 a stack of
    /// matrices, 4 and above a convolution.
    Muon,
    /// AdamW.
    AdamW,
    /// Muon on one matrix `(out, in · kernel…)`. For 3-D convolutions, taken for stacks otherwise.
    Convolution,
    /// Muon on each matrix of the last two dimensions.
    Stack,
    /// Muon on runs of rows of a matrix, of these lengths: fused Q, K and V, or gate and up.
    SplitRows(Vec<usize>),
    /// Muon on this many equal runs of rows of a matrix: its heads.
    Heads(usize),
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Muon => f.write_str("muon"),
            Self::AdamW => f.write_str("adamw"),
            Self::Convolution => f.write_str("a convolution"),
            Self::Stack => f.write_str("a stack of matrices"),
            Self::SplitRows(rows) => write!(f, "split into rows {rows:?}"),
            Self::Heads(heads) => write!(f, "split into {heads} heads"),
        }
    }
}

/// Decides which parameters Muon trains, and of which matrices they are made.
///
/// Without rules of one's own: two or more dimensions and a name without `embed` or `lm_head` is
/// Muon, everything else AdamW. A rule overrides this for the names that match its pattern, in
/// which `*` stands for any run of characters and `?` for one. Names are compared without case.
///
/// ```
/// use polarshard_muon::{Decision, Rule, Rules};
///
/// # fn main() -> Result<(), polarshard_muon::Error> {
/// let rules = Rules::new()
///     .with("*.qkv.weight", Rule::SplitRows(vec![64, 16, 16]))
///     .with("wte.weight", Rule::AdamW);
/// let table = rules.route(&[
///     ("wte.weight".to_owned(), vec![1000, 64]),
///     ("h.0.qkv.weight".to_owned(), vec![96, 64]),
///     ("h.0.qkv.bias".to_owned(), vec![96]),
/// ])?;
/// assert_eq!(table.entries()[0].decision, Decision::AdamW);
/// let Decision::Muon(matrices) = &table.entries()[1].decision else { panic!() };
/// assert_eq!(matrices.iter().map(|m| m.rows).collect::<Vec<_>>(), [64, 16, 16]);
/// assert_eq!(table.entries()[2].decision, Decision::AdamW);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules {
    overrides: Vec<(String, Rule)>,
}

/// Parts of names that the default rule leaves to AdamW.
const ADAMW_NAMES: [&str; 2] = ["embed", "lm_head"];

impl Rules {
    /// The default rule alone.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an override. Of those that match a name, the one that was added first holds.
    #[must_use]
    pub fn with(mut self, pattern: impl Into<String>, rule: Rule) -> Self {
        self.overrides.push((pattern.into(), rule));
        self
    }

    /// Routes parameters, given by name and shape.
    ///
    /// A parameter without elements has no matrix to train and is AdamW's.
    ///
    /// # Errors
    /// [`Error::UnusedRule`] for a pattern that matches no name, [`Error::DuplicateName`],
    /// [`Error::RuleShape`] for a rule that does not take the parameter's dimensions, and
    /// [`Error::BadSplit`] for a split that does not fit its rows.
    pub fn route(&self, params: &[(String, Vec<usize>)]) -> Result<RoutingTable, Error> {
        let patterns: Vec<_> = self
            .overrides
            .iter()
            .map(|(p, _)| WildMatch::new_case_insensitive(p))
            .collect();
        let unused = patterns
            .iter()
            .position(|p| !params.iter().any(|(name, _)| p.matches(name)));
        if let Some(unused) = unused {
            return Err(Error::UnusedRule {
                pattern: self.overrides[unused].0.clone(),
            });
        }
        let mut names = BTreeSet::new();
        let mut entries = Vec::with_capacity(params.len());
        for (name, shape) in params {
            if !names.insert(name) {
                return Err(Error::DuplicateName { name: name.clone() });
            }
            let rule = patterns.iter().position(|pattern| pattern.matches(name));
            entries.push(match rule {
                _ if shape.contains(&0) => empty(name, shape),
                Some(rule) => by_rule(name, shape, &self.overrides[rule])?,
                None => by_default(name, shape),
            });
        }
        Ok(RoutingTable::new(entries))
    }
}

/// The matrices that a shape suggests by its number of dimensions; none below two.
pub(crate) fn suggested_matrices(shape: &[usize]) -> Option<Vec<MatrixShape>> {
    match shape.len() {
        0 | 1 => None,
        2 | 3 => stack(shape),
        _ => convolution(shape),
    }
}

fn by_default(name: &str, shape: &[usize]) -> Routed {
    let lower = name.to_lowercase();
    let named = ADAMW_NAMES.into_iter().find(|part| lower.contains(part));
    let (decision, reason) = match (suggested_matrices(shape), named) {
        (None, _) => (Decision::AdamW, Reason::FewDimensions),
        (_, Some(part)) => (Decision::AdamW, Reason::Name(part)),
        (Some(matrices), None) => (Decision::Muon(matrices), Reason::Hidden),
    };
    let warning = match decision {
        Decision::Muon(_) => suspicious_part(&lower).map(|part| {
            format!(
                "{name:?} is in muon, but {part:?} suggests an embedding or an output head; \
                 a rule for it, muon or adamw, says which"
            )
        }),
        Decision::AdamW => None,
    };
    Routed {
        name: name.to_owned(),
        shape: shape.to_vec(),
        decision,
        reason,
        warning,
    }
}

/// Without a look at its matrices: there may be any number of those without elements.
fn empty(name: &str, shape: &[usize]) -> Routed {
    Routed {
        name: name.to_owned(),
        shape: shape.to_vec(),
        decision: Decision::AdamW,
        reason: Reason::Empty,
        warning: None,
    }
}

fn by_rule(name: &str, shape: &[usize], (pattern, rule): &(String, Rule)) -> Result<Routed, Error> {
    let matrices = match rule {
        Rule::AdamW => Some(Vec::new()),
        Rule::Muon => suggested_matrices(shape),
        Rule::Convolution => convolution(shape),
        Rule::Stack => stack(shape),
        Rule::SplitRows(rows) => split_rows(name, shape, rows)?,
        Rule::Heads(heads) => split_heads(name, shape, *heads)?,
    };
    let matrices = matrices.ok_or_else(|| Error::RuleShape {
        name: name.to_owned(),
        shape: shape.to_vec(),
        rule: rule.to_string(),
        expected: match rule {
            Rule::SplitRows(_) | Rule::Heads(_) => "two dimensions",
            _ => "two or more dimensions",
        },
    })?;
    let (decision, reason) = match rule {
        Rule::AdamW => (Decision::AdamW, Reason::Rule(pattern.clone())),
        _ => (Decision::Muon(matrices), Reason::Rule(pattern.clone())),
    };
    Ok(Routed {
        name: name.to_owned(),
        shape: shape.to_vec(),
        decision,
        reason,
        warning: None,
    })
}

/// Names of embeddings and heads that the default rule does not know: it takes them for hidden
/// matrices, which they may be.
fn suspicious_part(lower: &str) -> Option<&str> {
    let parts: Vec<_> = lower.split(['.', '/']).collect();
    let module = parts.iter().rev().nth(1).or(parts.last()).copied();
    let is_named =
        |part: &str| matches!(part, "wte" | "wpe" | "emb" | "head") || part.ends_with("_head");
    let named = parts.iter().copied().find(|part| is_named(part));
    // `output` in the middle of a name is a layer's own: `attention.output.dense`.
    named.or(module.filter(|&part| part == "output"))
}

fn convolution(shape: &[usize]) -> Option<Vec<MatrixShape>> {
    let (&rows, rest) = shape.split_first()?;
    if rest.is_empty() {
        return None;
    }
    Some(vec![MatrixShape {
        offset: 0,
        rows,
        cols: rest.iter().product(),
    }])
}

fn stack(shape: &[usize]) -> Option<Vec<MatrixShape>> {
    let (&[rows, cols], leading) = shape.split_last_chunk().map(|(rest, last)| (last, rest))?;
    let count: usize = leading.iter().product();
    let matrix = |index| MatrixShape {
        offset: index * rows * cols,
        rows,
        cols,
    };
    Some((0..count).map(matrix).collect())
}

fn split_rows(
    name: &str,
    shape: &[usize],
    split: &[usize],
) -> Result<Option<Vec<MatrixShape>>, Error> {
    let &[rows, cols] = shape else {
        return Ok(None);
    };
    let sum = split
        .iter()
        .try_fold(0usize, |sum, &rows| sum.checked_add(rows));
    if sum != Some(rows) || split.contains(&0) {
        let split = format!("rows {split:?}");
        return Err(Error::BadSplit {
            name: name.to_owned(),
            rows,
            split,
        });
    }
    let mut start = 0;
    let mut matrix = |&rows: &usize| {
        let offset = start * cols;
        start += rows;
        MatrixShape { offset, rows, cols }
    };
    Ok(Some(split.iter().map(&mut matrix).collect()))
}

fn split_heads(
    name: &str,
    shape: &[usize],
    heads: usize,
) -> Result<Option<Vec<MatrixShape>>, Error> {
    let &[rows, cols] = shape else {
        return Ok(None);
    };
    if heads == 0 || !rows.is_multiple_of(heads) {
        let split = format!("{heads} heads");
        return Err(Error::BadSplit {
            name: name.to_owned(),
            rows,
            split,
        });
    }
    Ok(stack(&[heads, rows / heads, cols]))
}
