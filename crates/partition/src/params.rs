//! The list of all parameters, checked.

use std::sync::Arc;

use crate::{Digest, DigestWriter, Error, Matrix, MatrixId, Param, ParamId, Span};

/// The trained parameters in registration order, known to be consistent. Cheap to clone.
///
/// ```
/// use polarshard_partition::{Matrix, Param, Params, Span, Wire};
/// let matrix = Matrix { span: Span::new(0, 6), rows: 2, cols: 3, cost: 100 };
/// let params = Params::new(vec![
///     Param { name: "w".into(), shape: [2, 3].into_iter().collect(), wire: Wire::F32, matrices: vec![matrix] },
///     Param { name: "b".into(), shape: [2].into_iter().collect(), wire: Wire::F32, matrices: vec![] },
/// ])?;
/// assert_eq!(params.id("b").map(|id| id.index()), Some(1));
/// # Ok::<(), polarshard_partition::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Params(Arc<Inner>);

#[derive(Debug, PartialEq, Eq)]
struct Inner {
    params: Vec<Param>,
    /// By name, for look-up.
    by_name: Vec<ParamId>,
    /// The first matrix of each parameter, and the number of matrices at the end.
    first_matrix: Vec<usize>,
    /// The parameter of each matrix.
    param_of: Vec<ParamId>,
    digest: Digest,
}

impl Params {
    /// The parameters of a model, in registration order.
    ///
    /// Parameters without elements are kept here and are in no layout.
    ///
    /// # Errors
    /// An empty list; an empty or duplicate name; matrices that do not tile their parameter in
    /// ascending order, or whose sides do not multiply to their length; more elements than a
    /// `usize` counts.
    pub fn new(params: Vec<Param>) -> Result<Self, Error> {
        if params.is_empty() {
            return Err(Error::NoParameters);
        }
        let mut total = 0usize;
        let mut first_matrix = Vec::with_capacity(params.len() + 1);
        let mut param_of = Vec::new();
        for (index, param) in params.iter().enumerate() {
            let elems = checked_elems(index, param)?;
            check_matrices(param, elems)?;
            total = total.checked_add(elems).ok_or_else(|| Error::TooLarge {
                what: "the model".into(),
            })?;
            first_matrix.push(param_of.len());
            param_of.extend(param.matrices.iter().map(|_| ParamId(index)));
        }
        first_matrix.push(param_of.len());
        let by_name = sorted_names(&params)?;
        let digest = digest(&params);
        Ok(Self(Arc::new(Inner {
            params,
            by_name,
            first_matrix,
            param_of,
            digest,
        })))
    }

    /// Every parameter, in registration order.
    pub fn iter(
        &self,
    ) -> impl DoubleEndedIterator<Item = (ParamId, &Param)> + ExactSizeIterator + Clone {
        self.0
            .params
            .iter()
            .enumerate()
            .map(|(index, param)| (ParamId(index), param))
    }

    /// One parameter.
    ///
    /// # Panics
    /// If `id` is of a longer list.
    pub fn get(&self, id: ParamId) -> &Param {
        &self.0.params[id.0]
    }

    /// How many parameters; at least one.
    #[expect(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> usize {
        self.0.params.len()
    }

    /// The parameter of a name.
    pub fn id(&self, name: &str) -> Option<ParamId> {
        let found = self
            .0
            .by_name
            .binary_search_by(|id| self.get(*id).name.as_str().cmp(name));
        found.ok().map(|at| self.0.by_name[at])
    }

    /// Every matrix, in registration order.
    pub fn matrices(&self) -> impl ExactSizeIterator<Item = (MatrixId, ParamId, &Matrix)> + Clone {
        self.0.param_of.iter().enumerate().map(|(index, param)| {
            let (_, matrix) = self.matrix(MatrixId(index));
            (MatrixId(index), *param, matrix)
        })
    }

    /// One matrix and its parameter.
    ///
    /// # Panics
    /// If `id` is of a longer list.
    pub fn matrix(&self, id: MatrixId) -> (ParamId, &Matrix) {
        let param = self.0.param_of[id.0];
        (
            param,
            &self.get(param).matrices[id.0 - self.0.first_matrix[param.0]],
        )
    }

    /// The matrices of a parameter, ascending.
    ///
    /// # Panics
    /// If `id` is of a longer list.
    pub fn matrices_of(
        &self,
        id: ParamId,
    ) -> impl DoubleEndedIterator<Item = MatrixId> + ExactSizeIterator + Clone + use<> {
        (self.0.first_matrix[id.0]..self.0.first_matrix[id.0 + 1]).map(MatrixId)
    }

    /// The matrices of a parameter that have an element in `span` of it, ascending.
    ///
    /// # Panics
    /// If `id` is of a longer list.
    pub fn matrices_touching(
        &self,
        id: ParamId,
        span: Span,
    ) -> impl Iterator<Item = (MatrixId, &Matrix)> {
        let matrices = &self.get(id).matrices;
        let from = matrices.partition_point(|matrix| matrix.span.end <= span.start);
        let touching = matrices[from..]
            .iter()
            .take_while(move |matrix| matrix.span.start < span.end);
        touching
            .zip(self.0.first_matrix[id.0] + from..)
            .map(|(matrix, index)| (MatrixId(index), matrix))
    }

    /// Every parameter in plan order: reversed registration order, about the order in which
    /// backward produces gradients, and the same on all ranks.
    pub fn plan_order(&self) -> impl ExactSizeIterator<Item = ParamId> + Clone + use<> {
        (0..self.len()).rev().map(ParamId)
    }

    /// A digest of names, shapes, element types and matrices with their costs.
    pub fn digest(&self) -> Digest {
        self.0.digest
    }
}

fn checked_elems(index: usize, param: &Param) -> Result<usize, Error> {
    if param.name.is_empty() {
        return Err(Error::EmptyName { index });
    }
    if param.shape.contains(&0) {
        return Ok(0);
    }
    let product = param
        .shape
        .iter()
        .try_fold(1usize, |product, dim| product.checked_mul(*dim));
    product.ok_or_else(|| Error::TooLarge {
        what: param.name.clone(),
    })
}

fn check_matrices(param: &Param, elems: usize) -> Result<(), Error> {
    let tiling = |expected, found| Error::Tiling {
        name: param.name.clone(),
        elems,
        expected,
        found,
    };
    let mut at = 0;
    for &Matrix {
        span, rows, cols, ..
    } in &param.matrices
    {
        if span.start != at || span.is_empty() {
            return Err(tiling(at, span.start));
        }
        if rows.checked_mul(cols) != Some(span.len()) {
            return Err(Error::MatrixSides {
                name: param.name.clone(),
                span,
                rows,
                cols,
            });
        }
        at = span.end;
    }
    if param.matrices.is_empty() || at == elems {
        Ok(())
    } else {
        Err(tiling(elems, at))
    }
}

fn sorted_names(params: &[Param]) -> Result<Vec<ParamId>, Error> {
    let name = |id: &ParamId| params[id.0].name.as_str();
    let mut by_name: Vec<_> = (0..params.len()).map(ParamId).collect();
    by_name.sort_by_key(name);
    match by_name
        .windows(2)
        .find(|pair| name(&pair[0]) == name(&pair[1]))
    {
        Some(pair) => Err(Error::DuplicateName {
            name: name(&pair[0]).to_owned(),
        }),
        None => Ok(by_name),
    }
}

/// Costs are in it: they decide which rank computes what, so ranks must agree on them. Spans are
/// not: the sides of tiling matrices give them.
fn digest(params: &[Param]) -> Digest {
    let mut writer = DigestWriter::new().u64(params.len() as u64);
    for param in params {
        writer = writer
            .str(&param.name)
            .u64(param.wire as u64)
            .u64(param.shape.len() as u64);
        writer = param
            .shape
            .iter()
            .fold(writer, |writer, dim| writer.u64(*dim as u64));
        writer = writer.u64(param.matrices.len() as u64);
        for matrix in &param.matrices {
            writer = writer
                .u64(matrix.rows as u64)
                .u64(matrix.cols as u64)
                .u64(matrix.cost);
        }
    }
    writer.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{UpdateGroup, Wire};

    fn param(name: &str, shape: &[usize], matrices: &[(usize, usize, usize)]) -> Param {
        let matrix = |&(at, rows, cols): &(usize, usize, usize)| Matrix {
            span: Span::of_len(at, rows * cols),
            rows,
            cols,
            cost: 1,
        };
        Param {
            name: name.into(),
            shape: shape.into(),
            wire: Wire::F32,
            matrices: matrices.iter().map(matrix).collect(),
        }
    }

    fn error(params: Vec<Param>) -> String {
        Params::new(params).unwrap_err().to_string()
    }

    #[test]
    fn ids_follow_registration() {
        let params = Params::new(vec![
            param("z", &[2, 2, 3], &[(0, 2, 3), (6, 2, 3)]),
            param("b", &[5], &[]),
            param("empty", &[0, 7], &[]),
            param("a", &[4, 1], &[(0, 4, 1)]),
        ])
        .unwrap();
        assert_eq!(params.len(), 4);
        assert_eq!(
            params
                .iter()
                .map(|(id, param)| (id.index(), param.elems()))
                .collect::<Vec<_>>(),
            [(0, 12), (1, 5), (2, 0), (3, 4)]
        );
        assert_eq!(
            params.plan_order().map(ParamId::index).collect::<Vec<_>>(),
            [3, 2, 1, 0]
        );
        assert_eq!(params.id("a"), Some(ParamId(3)));
        assert_eq!(params.id("c"), None);
        let owners: Vec<_> = params
            .matrices()
            .map(|(id, param, matrix)| (id.index(), param.index(), matrix.span.start))
            .collect();
        assert_eq!(owners, [(0, 0, 0), (1, 0, 6), (2, 3, 0)]);
        assert_eq!(params.matrix(MatrixId(1)).1.span, Span::new(6, 12));
        assert_eq!(
            params.matrices_of(ParamId(0)).collect::<Vec<_>>(),
            [MatrixId(0), MatrixId(1)]
        );
        assert_eq!(params.matrices_of(ParamId(1)).len(), 0);
        assert_eq!(params.get(ParamId(0)).group(), UpdateGroup::Muon);
        assert_eq!(params.get(ParamId(1)).group(), UpdateGroup::AdamW);
        assert_eq!(
            [UpdateGroup::Muon, UpdateGroup::AdamW].map(|group| group.to_string()),
            ["muon", "adamw"]
        );
    }

    #[test]
    fn inconsistent_lists_are_refused() {
        assert_eq!(error(vec![]), "an empty parameter list");
        assert_eq!(
            error(vec![param("a", &[1], &[]), param("", &[1], &[])]),
            "parameter 1 has an empty name"
        );
        assert_eq!(
            error(vec![
                param("a", &[1], &[]),
                param("b", &[1], &[]),
                param("a", &[2], &[])
            ]),
            "two parameters are named a"
        );
        let huge = usize::MAX / 2;
        assert_eq!(
            error(vec![param("a", &[huge, 3], &[])]),
            "a has more elements than fit in 64 bits"
        );
        let thrice = ["a", "b", "c"].map(|name| param(name, &[huge], &[]));
        assert_eq!(
            error(thrice.into()),
            "the model has more elements than fit in 64 bits"
        );
        assert!(Params::new(vec![param("a", &[huge, 3, 0], &[])]).is_ok());
    }

    #[test]
    fn matrices_must_tile() {
        let tile = |matrices| error(vec![param("a", &[4, 3], matrices)]);
        assert_eq!(
            tile(&[(0, 2, 3)]),
            "the matrices of a do not tile its 12 elements: expected one at 12, found 6"
        );
        assert_eq!(
            tile(&[(6, 2, 3), (0, 2, 3)]),
            "the matrices of a do not tile its 12 elements: expected one at 0, found 6"
        );
        assert_eq!(
            tile(&[(0, 4, 3), (12, 0, 3)]),
            "the matrices of a do not tile its 12 elements: expected one at 12, found 12"
        );
        assert_eq!(
            tile(&[(0, 2, 3), (6, 2, 4)]),
            "the matrices of a do not tile its 12 elements: expected one at 12, found 14"
        );
        let mut wrong = param("a", &[4, 3], &[(0, 4, 3)]);
        wrong.matrices[0].cols = 4;
        assert_eq!(
            error(vec![wrong]),
            "a matrix of a at [0, 12) is 4 x 4, which is not 12 elements"
        );
        assert!(matches!(
            Params::new(vec![param("a", &[0, 3], &[(0, 0, 3)])]),
            Err(Error::Tiling { .. })
        ));
        let mut backwards = param("a", &[4, 3], &[(0, 2, 3), (6, 2, 3)]);
        backwards.matrices[1].span.end = 5;
        assert_eq!(
            error(vec![backwards]),
            "the matrices of a do not tile its 12 elements: expected one at 6, found 6"
        );
    }

    #[test]
    fn the_digest_sees_everything() {
        let base = || {
            vec![
                param("a", &[4, 3], &[(0, 2, 3), (6, 2, 3)]),
                param("b", &[4], &[]),
            ]
        };
        let digest = |change: fn(&mut Vec<Param>)| {
            let mut params = base();
            change(&mut params);
            Params::new(params).unwrap().digest()
        };
        let digests = [
            digest(|_| {}),
            digest(|params| params[0].name = "c".into()),
            digest(|params| params[0].shape = [3, 4].into_iter().collect()),
            digest(|params| params[1].shape = [4, 1].into_iter().collect()),
            digest(|params| params[0].wire = Wire::BF16),
            digest(|params| params[0].matrices = param("a", &[4, 3], &[(0, 4, 3)]).matrices),
            digest(|params| {
                params[0].matrices = param("a", &[4, 3], &[(0, 3, 2), (6, 2, 3)]).matrices;
            }),
            digest(|params| params[0].matrices[1].cost = 2),
            digest(|params| params.swap(0, 1)),
            digest(|params| params.truncate(1)),
        ];
        let distinct: std::collections::BTreeSet<_> = digests.iter().collect();
        assert_eq!(distinct.len(), digests.len());
        assert_eq!(digest(|_| {}), digests[0]);
    }
}
