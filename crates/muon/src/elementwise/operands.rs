//! What is asked of operands, before anything is written.

use candle_core::{DType, Storage, Tensor};

use crate::Error;

/// The buffer that a tensor is a view of, as a number.
pub(super) fn storage(x: &Tensor) -> usize {
    std::ptr::from_ref::<Storage>(&x.storage_and_layout().0).addr()
}

/// Whether two tensors are views of one buffer.
pub(crate) fn shares_storage(a: &Tensor, b: &Tensor) -> bool {
    // One guard at a time: two of the same lock could wait for each other.
    storage(a) == storage(b)
}

pub(super) type Operand<'a> = (&'static str, &'a Tensor);

pub(super) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The first operand is one that is written; the others are measured by it.
pub(super) fn check_operands(operands: &[Operand<'_>]) -> Result<(), Error> {
    check_dtypes(operands, &[DType::F32], "f32")?;
    check_places(operands)
}

pub(super) fn check_dtypes(
    operands: &[Operand<'_>],
    taken: &[DType],
    expected: &'static str,
) -> Result<(), Error> {
    match operands.iter().find(|(_, x)| !taken.contains(&x.dtype())) {
        None => Ok(()),
        Some((what, x)) => Err(Error::DType {
            what: (*what).to_owned(),
            dtype: x.dtype(),
            expected,
        }),
    }
}

pub(super) fn check_places(operands: &[Operand<'_>]) -> Result<(), Error> {
    let expected = operands[0].1.elem_count();
    for (i, &(what, x)) in operands.iter().enumerate() {
        if !x.is_contiguous() {
            return Err(Error::NotContiguous {
                what: what.to_owned(),
            });
        }
        let found = x.elem_count();
        if found != expected {
            return Err(Error::Length {
                what: what.to_owned(),
                found,
                expected,
            });
        }
        if let Some(&(first, _)) = operands[..i].iter().find(|(_, y)| shares_storage(x, y)) {
            return Err(Error::SharedStorage {
                first,
                second: what,
            });
        }
    }
    Ok(())
}
