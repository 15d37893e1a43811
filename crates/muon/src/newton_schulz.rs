use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use crate::config::check;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::normalize::{normalize, widen_transposed};
use crate::{Coefficients, Error, Kernels, Method, Precision, iteration};

/// The default of [`NewtonSchulz::workspace_bytes`]: so much that a larger one gains nothing.
const WORKSPACE_BYTES: usize = 4 << 30;
/// With more, rounding makes `Gram` something else than `Standard`, and in the end infinite (tests below).
const MOST_GRAM_STEPS: usize = 7;

/// Newton-Schulz: takes the singular values of a matrix close to 1 and leaves its singular vectors.
///
/// Each matrix is first divided by its Frobenius norm, free of scale: by an exact power of two near
/// its largest magnitude, then by the norm of that, with nothing added and nothing flushed to zero.
/// So an input may be of any magnitude, a zero matrix gives exactly zero (but see [`Method::Gram`] for
/// more than seven steps), and one matrix of a stack has no influence on the others. A matrix with an
/// element that is not finite becomes NaN.
///
/// A matrix gives the same bits at every run. They are the same alone and in any stack, and under any
/// number of threads or bytes of workspace, on a CPU and by the kernels for Hopper; cuBLAS, which
/// computes on other CUDA devices, may take another kernel for another number of matrices.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use polarshard_muon::NewtonSchulz;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let x = Tensor::new(&[[3f32, 0., 0.], [0., -1e-30, 0.]], &Device::Cpu)?;
/// let single = x.narrow(0, 0, 1)?;
/// let o = NewtonSchulz::default().orthogonalize(&single)?.to_vec2::<f32>()?;
/// assert!((o[0][0] - 0.7).abs() < 0.01); // where these coefficients take 1
/// assert_eq!(o[0][1..], [0.0, 0.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct NewtonSchulz {
    /// The products it is made of.
    pub method: Method,
    /// The polynomials.
    pub coefficients: Coefficients,
    /// How many steps, from 1 to [`Self::MOST_STEPS`].
    pub steps: usize,
    /// The precision of the products' results; sums are in f32.
    pub iterate: Precision,
    /// What computes the products.
    pub kernels: Kernels,
    /// The most bytes of workspace that [`Kernels::Hopper`] takes for a batch, which is cut into
    /// smaller ones to fit; a single matrix takes what it needs. Each thread keeps the largest
    /// workspace it has needed. It does not change results.
    pub workspace_bytes: usize,
}

impl Default for NewtonSchulz {
    /// Five Keller Jordan steps in the device's precision, by the cheaper method.
    fn default() -> Self {
        Self {
            method: Method::default(),
            coefficients: Coefficients::default(),
            steps: 5,
            iterate: Precision::default(),
            kernels: Kernels::default(),
            workspace_bytes: WORKSPACE_BYTES,
        }
    }
}

impl NewtonSchulz {
    /// The most steps that are taken: many more than any are worth.
    pub const MOST_STEPS: usize = 99;

    /// Whether every field is in its range.
    ///
    /// # Errors
    /// [`Error::Config`] names the first field that is not, and its value.
    pub fn validate(&self) -> Result<(), Error> {
        self.check_steps("steps")
    }

    /// The same, by the name of the field in another configuration.
    pub(crate) fn check_steps(&self, field: &'static str) -> Result<(), Error> {
        check(
            field,
            self.steps as f64,
            (1..=Self::MOST_STEPS).contains(&self.steps),
            "from 1 to 99",
        )
    }

    /// Orthogonalizes a matrix `(rows, cols)` or each matrix of a stack `(batch, rows, cols)`, of
    /// dtype f32, f16 or bf16 and any strides. The result is a new contiguous f32 tensor of the
    /// same shape; the input is not modified.
    ///
    /// # Errors
    /// [`Error::NotAMatrix`] for another number of dimensions, [`Error::DType`] for another dtype,
    /// and as [`Self::validate`] and [`Self::check_device`].
    pub fn orthogonalize(&self, x: &Tensor) -> Result<Tensor, Error> {
        self.validate()?;
        let (rows, cols) = match *x.dims() {
            [rows, cols] | [_, rows, cols] => (rows, cols),
            _ => return Err(not_a_matrix("2 or 3 dimensions", x)),
        };
        self.check_operand(x)?;
        if x.elem_count() == 0 {
            return plain(x);
        }
        let matrices = x.detach().contiguous()?.reshape(((), rows, cols))?;
        let matrices = (0..matrices.dim(0)?)
            .map(|index| matrices.get(index))
            .collect::<Result<Vec<_>, _>>()?;
        let (wide, tall): (&[_], &[_]) = if rows > cols {
            (&[], &matrices)
        } else {
            (&matrices, &[])
        };
        let (wide, tall) = self.iterate(wide, tall, sides(rows, cols), DType::F32)?;
        let results = wide.or(tall).expect("there is at least one matrix");
        Ok(results.reshape(x.shape())?)
    }

    /// Orthogonalizes matrices `(rows, cols)` of any mix of shapes, in one batch for each shape and
    /// its transpose. Results are contiguous f32 tensors in the order of the inputs.
    ///
    /// # Errors
    /// As [`Self::orthogonalize`], before any work is done.
    pub fn orthogonalize_all(&self, matrices: &[Tensor]) -> Result<Vec<Tensor>, Error> {
        self.all(matrices, |_| DType::F32)
    }

    /// The same with results in the iteration's dtype, [`Precision::on`] their device: the values of
    /// [`Self::orthogonalize_all`], without the pass that makes them f32.
    ///
    /// # Errors
    /// As [`Self::orthogonalize`], before any work is done.
    pub fn orthogonalize_all_as_iterated(&self, matrices: &[Tensor]) -> Result<Vec<Tensor>, Error> {
        self.all(matrices, |device| self.iterate.on(device))
    }

    fn all(
        &self,
        matrices: &[Tensor],
        results_on: impl Fn(&Device) -> DType,
    ) -> Result<Vec<Tensor>, Error> {
        self.validate()?;
        for x in matrices {
            if x.rank() != 2 {
                return Err(not_a_matrix("2 dimensions", x));
            }
            self.check_operand(x)?;
        }
        let mut results: Vec<Option<Tensor>> = vec![None; matrices.len()];
        let mut groups: BTreeMap<(usize, usize), [Turned; 2]> = BTreeMap::new();
        for (index, x) in matrices.iter().enumerate() {
            let (rows, cols) = x.dims2()?;
            if x.elem_count() == 0 {
                results[index] = Some(plain(x)?.to_dtype(results_on(x.device()))?);
                continue;
            }
            let [wide, tall] = groups.entry(sides(rows, cols)).or_default();
            let turned = if rows > cols { tall } else { wide };
            turned.matrices.push(x.detach().contiguous()?);
            turned.indices.push(index);
        }
        for (sides, [wide, tall]) in groups {
            let (wide_first, tall_first) = (wide.matrices.first(), tall.matrices.first());
            let Some(first) = wide_first.or(tall_first) else {
                continue;
            };
            let to = results_on(first.device());
            let stacks = self.iterate(&wide.matrices, &tall.matrices, sides, to)?;
            for (stack, turned) in [(stacks.0, wide), (stacks.1, tall)] {
                for (place, index) in turned.indices.into_iter().enumerate() {
                    results[index] = stack.as_ref().map(|stack| stack.get(place)).transpose()?;
                }
            }
        }
        Ok(results
            .into_iter()
            .map(|x| x.expect("each input is in one group"))
            .collect())
    }

    /// The method that a matrix of `rows` × `cols` is orthogonalized by: `Standard` or `Gram`.
    #[must_use]
    pub fn chosen(&self, rows: usize, cols: usize) -> Method {
        let (n, m) = (rows.min(cols), rows.max(cols));
        let gram = match self.method {
            Method::Standard => false,
            Method::Gram => m > n,
            Method::Auto => {
                self.steps <= MOST_GRAM_STEPS && self.gram_flops(n, m) < self.standard_flops(n, m)
            }
        };
        if gram { Method::Gram } else { Method::Standard }
    }

    /// Floating-point operations to orthogonalize a matrix of `rows` × `cols` by the method chosen
    /// for it, a multiply-add counted as two, element-wise work left out.
    ///
    /// With n and m the short and the long side: a `Standard` step is 4n²m + 2n³. `Gram` is 4n²m,
    /// and as much again for a restart, and n³ times 2 a step, 2 a step that is not the first of
    /// all or after a restart, and 4 a step that is not the last of all or before a restart. For
    /// five steps these are 20n²m + 10n³ and 8n²m + 28n³.
    #[must_use]
    pub fn flops(&self, rows: usize, cols: usize) -> u64 {
        let (n, m) = (rows.min(cols), rows.max(cols));
        let flops = match self.chosen(rows, cols) {
            Method::Gram => self.gram_flops(n, m),
            Method::Auto | Method::Standard => self.standard_flops(n, m),
        };
        u64::try_from(flops).unwrap_or(u64::MAX)
    }

    fn standard_flops(&self, n: usize, m: usize) -> u128 {
        saturating_product([self.steps, 4, n, n, m])
            .saturating_add(saturating_product([self.steps, 2, n, n, n]))
    }

    fn gram_flops(&self, n: usize, m: usize) -> u128 {
        let segments = if self.steps > iteration::RESTART {
            2
        } else {
            1
        };
        let others = self.steps.saturating_sub(segments);
        let squares = saturating_product([self.steps, 2, n, n, n])
            .saturating_add(saturating_product([others, 2 + 4, n, n, n]));
        saturating_product([segments, 4, n, n, m]).saturating_add(squares)
    }

    /// Orthogonalizes contiguous matrices `wide`, n × m each with n ≤ m, and `tall`, m × n each, in one batch:
    /// `NS(Xᵀ) = NS(X)ᵀ`, and the products of the short side are the small ones. Gives a contiguous
    /// stack of each kind that there is, in `to`: f32, or the iteration's dtype.
    fn iterate(
        &self,
        wide: &[Tensor],
        tall: &[Tensor],
        (n, m): (usize, usize),
        to: DType,
    ) -> Result<(Option<Tensor>, Option<Tensor>), Error> {
        let Some(first) = wide.first().or(tall.first()) else {
            return Ok((None, None));
        };
        let dtype = self.iterate.on(first.device());
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = first.device() {
            let results =
                cuda::orthogonalize_on_hopper(self, device, (dtype, to), wide, tall, (n, m))?;
            if let Some(results) = results {
                return Ok(results);
            }
        }
        let all_plain = |xs: &[Tensor]| xs.iter().map(plain).collect::<Result<Vec<_>, _>>();
        let x = normalize(&all_plain(wide)?, &all_plain(tall)?, (n, m), dtype)?;
        let rows = self.coefficients.steps(self.steps);
        let x = match self.chosen(n, m) {
            Method::Gram => iteration::gram(x, &rows)?,
            Method::Auto | Method::Standard => iteration::standard(x, &rows)?,
        };
        let part = |start, len| -> Result<Option<Tensor>, Error> {
            Ok(if len > 0 {
                Some(x.narrow(0, start, len)?)
            } else {
                None
            })
        };
        let (wide, tall) = (part(0, wide.len())?, part(wide.len(), tall.len())?);
        let wide = wide.map(|x| x.to_dtype(to)).transpose()?;
        let turn = |x: Tensor| match to {
            DType::F32 => widen_transposed(&x),
            _ => x.t()?.contiguous(),
        };
        let tall = tall.map(turn).transpose()?;
        Ok((wide, tall))
    }

    fn check_operand(&self, x: &Tensor) -> Result<(), Error> {
        self.check_device(x.device())?;
        match x.dtype() {
            DType::F32 | DType::F16 | DType::BF16 => Ok(()),
            dtype => Err(Error::DType {
                what: "a matrix".to_owned(),
                dtype,
                expected: "f32, f16 or bf16",
            }),
        }
    }

    /// Whether `device` can iterate in the precision and with the kernels asked for. A CPU does so in f32 alone:
    /// candle's half-precision products there accumulate in f16 across the blocks of a long sum.
    ///
    /// # Errors
    /// [`Error::IterateDType`] or [`Error::NoKernels`] names what the device has not.
    pub fn check_device(&self, device: &Device) -> Result<(), Error> {
        let dtype = self.iterate.on(device);
        if device.is_cpu() && dtype != DType::F32 {
            let device = device.location();
            return Err(Error::IterateDType { dtype, device });
        }
        if !self.has_kernels(device)? {
            return Err(Error::NoKernels {
                kernels: self.kernels,
                dtype,
                device: device.location(),
            });
        }
        Ok(())
    }

    /// How a batch of `count` matrices of `rows` × `cols` is orthogonalized on a CUDA device; `None` where there is
    /// nothing to choose: on other devices, and without an element.
    ///
    /// # Errors
    /// As [`Self::validate`] and [`Self::check_device`], and those of the device.
    #[cfg(feature = "cuda")]
    pub fn choice(
        &self,
        device: &Device,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Option<crate::Choice>, Error> {
        self.validate()?;
        self.check_device(device)?;
        let Device::Cuda(cuda) = device else {
            return Ok(None);
        };
        if count * rows * cols == 0 {
            return Ok(None);
        }
        let dtype = self.iterate.on(device);
        Ok(Some(self.choose(
            cuda::gpu(cuda)?,
            dtype,
            count,
            rows,
            cols,
        )))
    }

    fn has_kernels(&self, device: &Device) -> Result<bool, Error> {
        Ok(match (self.kernels, device) {
            (Kernels::Auto, _) => true,
            #[cfg(feature = "cuda")]
            (Kernels::Cublas, Device::Cuda(_)) => true,
            #[cfg(feature = "cuda")]
            (Kernels::Hopper, Device::Cuda(cuda)) => {
                cuda::gpu(cuda)?.has_hopper_kernels(self.iterate.on(device))
            }
            _ => false,
        })
    }
}

/// Matrices of one shape, and where they were in a list.
#[derive(Default)]
struct Turned {
    matrices: Vec<Tensor>,
    indices: Vec<usize>,
}

/// The short and the long side.
fn sides(rows: usize, cols: usize) -> (usize, usize) {
    (rows.min(cols), rows.max(cols))
}

/// Contiguous f32 without a graph.
fn plain(x: &Tensor) -> Result<Tensor, Error> {
    Ok(x.detach().to_dtype(DType::F32)?.contiguous()?)
}

fn not_a_matrix(expected: &'static str, x: &Tensor) -> Error {
    Error::NotAMatrix {
        expected,
        shape: x.shape().clone(),
    }
}

/// The largest number where there is no such one: shapes that nobody has must not wrap around to small ones.
pub(crate) fn saturating_product<const COUNT: usize>(factors: [usize; COUNT]) -> u128 {
    let factors = factors.iter().map(|factor| *factor as u128);
    factors.fold(1, u128::saturating_mul)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(method: Method, steps: usize) -> NewtonSchulz {
        NewtonSchulz {
            method,
            steps,
            ..NewtonSchulz::default()
        }
    }

    #[test]
    fn flops_of_shapes_that_nobody_has_do_not_wrap() {
        let ns = NewtonSchulz::default();
        assert_eq!(ns.chosen(1_000_000, 10_000_000), Method::Gram);
        assert_eq!(ns.flops(usize::MAX, usize::MAX), u64::MAX);
        assert_eq!(with(Method::Gram, usize::MAX).flops(3, 7), u64::MAX);
    }

    #[test]
    fn flops_of_five_steps() {
        let (n, m) = (3u64, 7u64);
        let standard = 20 * n * n * m + 10 * n * n * n;
        let gram = 8 * n * n * m + 28 * n * n * n;
        assert_eq!(with(Method::Standard, 5).flops(3, 7), standard);
        assert_eq!(with(Method::Standard, 5).flops(7, 3), standard);
        assert_eq!(with(Method::Gram, 5).flops(7, 3), gram);
        assert_eq!(with(Method::Auto, 5).flops(7, 3), gram);
        assert_eq!(with(Method::Auto, 5).flops(0, 3), 0);
    }

    /// `Gram` has an update of infinities after 12 steps.
    #[test]
    fn many_steps_on_a_matrix_of_rank_one_are_those_of_standard() -> Result<(), Error> {
        let (rows, cols) = (64, 256);
        let x = Tensor::arange(0f32, rows as f32, &Device::Cpu)?.reshape((rows, 1))?;
        let y = Tensor::arange(1f32, 1.0 + cols as f32, &Device::Cpu)?.reshape((1, cols))?;
        let x = x.matmul(&y)?;
        for steps in [7, 8, 12, 20, 99] {
            let auto = with(Method::Auto, steps).orthogonalize(&x)?;
            let standard = with(Method::Standard, steps).orthogonalize(&x)?;
            let norm = |x: &Tensor| x.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
            let apart = norm(&(auto - &standard)?)? / norm(&standard)?;
            assert!(apart < 1e-2, "{steps} steps: {apart}");
        }
        Ok(())
    }

    /// Counted by hand from the products of the algorithm.
    #[test]
    fn gram_flops_of_fewer_steps() {
        let (n, m) = (3u64, 7u64);
        let by_hand = [(1, 4, 2), (2, 4, 10), (3, 8, 12), (4, 8, 20)];
        for (steps, rectangular, square) in by_hand {
            let expected = rectangular * n * n * m + square * n * n * n;
            assert_eq!(
                with(Method::Gram, steps).flops(3, 7),
                expected,
                "{steps} steps"
            );
        }
    }

    #[test]
    fn gram_wins_from_an_aspect_of_one_and_a_half() {
        let auto = NewtonSchulz::default();
        assert_eq!(auto.chosen(100, 150), Method::Standard);
        assert_eq!(auto.chosen(100, 151), Method::Gram);
        assert_eq!(auto.chosen(151, 100), Method::Gram);
        assert_eq!(with(Method::Gram, 5).chosen(100, 101), Method::Gram);
        assert_eq!(with(Method::Gram, 5).chosen(100, 100), Method::Standard);
        assert_eq!(with(Method::Standard, 5).chosen(1, 100), Method::Standard);
    }

    #[test]
    fn operands_are_checked() {
        let ns = NewtonSchulz::default();
        let cpu = &Device::Cpu;
        let vector = Tensor::ones(3, DType::F32, cpu).unwrap();
        assert!(matches!(
            ns.orthogonalize(&vector),
            Err(Error::NotAMatrix { .. })
        ));
        let stack = Tensor::ones((2, 3, 3), DType::F32, cpu).unwrap();
        assert!(matches!(
            ns.orthogonalize_all(&[stack]),
            Err(Error::NotAMatrix { .. })
        ));
        let integers = Tensor::ones((3, 3), DType::U32, cpu).unwrap();
        assert!(matches!(
            ns.orthogonalize(&integers),
            Err(Error::DType { .. })
        ));
        let half = NewtonSchulz {
            iterate: Precision::F16,
            ..ns
        };
        let matrix = Tensor::ones((3, 3), DType::F32, cpu).unwrap();
        let message = half.orthogonalize(&matrix).unwrap_err().to_string();
        assert!(
            message.contains("F16") && message.contains("Cpu"),
            "{message}"
        );
    }
}
