#[cfg(feature = "cuda")]
use candle_core::Device;
use candle_core::{
    CpuStorage, CustomOp1, DType, Layout, Result as CandleResult, Shape, Tensor, bail,
};

use crate::Error;
#[cfg(feature = "cuda")]
use crate::cuda;

/// What one pass over a tensor finds out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Survey {
    /// Σx² in f64, summed in the order of the elements on a CPU, in a fixed tree on a CUDA device;
    /// not finite if an element is not.
    pub sum_of_squares: f64,
    /// How many elements are infinite or not a number.
    pub non_finite: u64,
    /// Whether any element differs from zero.
    pub non_zero: bool,
}

/// Surveys a tensor of dtype f32, f16, bf16 or f64 and any shape.
///
/// # Errors
/// [`Error::DType`] for another dtype.
pub fn survey(x: &Tensor) -> Result<Survey, Error> {
    Ok(survey_all(std::slice::from_ref(x))?.swap_remove(0))
}

/// Surveys tensors, as [`survey()`] each by itself. The host waits for a device once, however many
/// of its tensors there are.
///
/// # Errors
/// [`Error::DType`] for the first tensor of another dtype, before any work is done.
pub fn survey_all(tensors: &[Tensor]) -> Result<Vec<Survey>, Error> {
    if let Some(other) = tensors.iter().find(|x| !is_float(x.dtype())) {
        return Err(Error::DType {
            what: "the surveyed tensor".to_owned(),
            dtype: other.dtype(),
            expected: "f32, f16, bf16 or f64",
        });
    }
    let tensors = tensors
        .iter()
        .map(|x| x.detach().contiguous())
        .collect::<CandleResult<Vec<_>>>()?;
    let mut found = Vec::with_capacity(tensors.len());
    for on_one_device in tensors.chunk_by(|a, b| a.device().same_device(b.device())) {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = on_one_device[0].device() {
            found.extend(cuda::survey(device, on_one_device)?);
            continue;
        }
        for x in on_one_device {
            found.push(survey_one(x)?);
        }
    }
    Ok(found)
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::F64)
}

fn survey_one(x: &Tensor) -> Result<Survey, Error> {
    let found = x.apply_op1_no_bwd(&SurveyOp)?.to_vec1::<f64>()?;
    let [sum_of_squares, non_finite, non_zero] = found[..] else {
        unreachable!("the operation yields three numbers");
    };
    Ok(Survey {
        sum_of_squares,
        non_finite: non_finite as u64,
        non_zero: non_zero > 0.0,
    })
}

/// Yields `[Σx², non-finite, non-zero]` in f64: the counts are exact up to 2⁵³.
struct SurveyOp;

impl CustomOp1 for SurveyOp {
    fn name(&self) -> &'static str {
        "survey"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> CandleResult<(CpuStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("{}: expected a contiguous tensor", self.name());
        };
        let found = match storage {
            CpuStorage::F32(x) => scan(x[start..end].iter().map(|&x| f64::from(x))),
            CpuStorage::F16(x) => scan(x[start..end].iter().map(|x| x.to_f64())),
            CpuStorage::BF16(x) => scan(x[start..end].iter().map(|x| x.to_f64())),
            CpuStorage::F64(x) => scan(x[start..end].iter().copied()),
            _ => bail!("{}: expected floating point", self.name()),
        };
        Ok((CpuStorage::F64(found.to_vec()), Shape::from(3)))
    }
}

fn scan(elements: impl Iterator<Item = f64>) -> [f64; 3] {
    let (mut squares, mut non_finite, mut non_zero) = (0f64, 0u64, 0u64);
    for x in elements {
        squares += x * x;
        non_finite += u64::from(!x.is_finite());
        non_zero += u64::from(x != 0.0);
    }
    [squares, non_finite as f64, non_zero as f64]
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn every_float_dtype_is_surveyed() {
        let x = Tensor::new(&[3.0f64, 0.0, -4.0], &Device::Cpu).unwrap();
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let found = survey(&x.to_dtype(dtype).unwrap()).unwrap();
            let expected = Survey {
                sum_of_squares: 25.0,
                non_finite: 0,
                non_zero: true,
            };
            assert_eq!(found, expected, "{dtype:?}");
        }
        assert!(matches!(
            survey(&x.to_dtype(DType::U8).unwrap()),
            Err(Error::DType { .. })
        ));
    }

    #[test]
    fn a_view_is_surveyed_by_itself() {
        let x = Tensor::new(&[f32::NAN, 1.0, 2.0, f32::INFINITY], &Device::Cpu).unwrap();
        assert_eq!(survey(&x).unwrap().non_finite, 2);
        let inner = survey(&x.narrow(0, 1, 2).unwrap()).unwrap();
        assert_eq!(
            inner,
            Survey {
                sum_of_squares: 5.0,
                non_finite: 0,
                non_zero: true
            }
        );
    }

    #[test]
    fn all_are_surveyed_in_order_or_none() {
        let tensors: Vec<_> = [1.0f32, 0.0, 3.0]
            .map(|x| Tensor::new(&[x], &Device::Cpu).unwrap())
            .into();
        let found = survey_all(&tensors).unwrap();
        let squares: Vec<_> = found.iter().map(|found| found.sum_of_squares).collect();
        assert_eq!(squares, [1.0, 0.0, 9.0]);
        assert!(survey_all(&[]).unwrap().is_empty());
        let integers = Tensor::new(&[1u32], &Device::Cpu).unwrap();
        let mixed = [tensors[0].clone(), integers];
        assert!(matches!(survey_all(&mixed), Err(Error::DType { .. })));
    }

    #[test]
    fn zeros_subnormals_and_nothing() {
        let zeros = Tensor::new(&[0f32, -0.0], &Device::Cpu).unwrap();
        assert!(!survey(&zeros).unwrap().non_zero);
        let tiny = Tensor::new(&[f32::from_bits(1)], &Device::Cpu).unwrap();
        let found = survey(&tiny).unwrap();
        assert!(found.non_zero);
        assert_eq!(found.sum_of_squares, 2f64.powi(-298));
        let nothing = Tensor::zeros(0, DType::F32, &Device::Cpu).unwrap();
        let expected = Survey {
            sum_of_squares: 0.0,
            non_finite: 0,
            non_zero: false,
        };
        assert_eq!(survey(&nothing).unwrap(), expected);
    }
}
