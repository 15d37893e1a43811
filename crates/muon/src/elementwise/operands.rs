//! What is asked of operands, before anything is written.

use candle_core::{DType, Storage, Tensor};

use crate::Error;

/// The buffer that a tensor is a view of, as a number.
fn buffer(x: &Tensor) -> usize {
    std::ptr::from_ref::<Storage>(&x.storage_and_layout().0).addr()
}

/// Whether two tensors are views of one buffer.
pub(crate) fn shares_storage(a: &Tensor, b: &Tensor) -> bool {
    // One guard at a time: two of the same lock could wait for each other.
    buffer(a) == buffer(b)
}

pub(super) type Operand<'a> = (&'static str, &'a Tensor);

/// The first `written` operands are f32, the others of any float dtype; all are placed as [`check_places`] asks.
pub(super) fn check_operands(operands: &[Operand<'_>], written: usize) -> Result<(), Error> {
    let (written, read) = operands.split_at(written);
    check_dtypes(written, &[DType::F32], "f32")?;
    check_floats(read)?;
    check_places(operands)
}

pub(super) fn check_floats(operands: &[Operand<'_>]) -> Result<(), Error> {
    const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
    check_dtypes(operands, &FLOATS, "f32, f16 or bf16")
}

fn check_dtypes(
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

/// The first operand is one that is written; the others are measured by it.
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

/// The devices that candle cannot compare, where an operation does not go through it.
pub(super) fn check_devices(operands: &[Operand<'_>], op: &'static str) -> Result<(), Error> {
    let first = operands[0].1.device();
    for (_, x) in operands {
        if !first.same_device(x.device()) {
            let (lhs, rhs) = (first.location(), x.device().location());
            return Err(candle_core::Error::DeviceMismatchBinaryOp { lhs, rhs, op }.into());
        }
    }
    Ok(())
}

/// Of contiguous tensors that are written, each from another one: no buffer is both read and written, and nothing is
/// written twice.
pub(super) fn check_written(
    pairs: &[(&Tensor, &Tensor)],
    [target, values]: [&'static str; 2],
) -> Result<(), Error> {
    let pairs = pairs.iter().filter(|(target, _)| target.elem_count() > 0);
    let mut written: Vec<_> = pairs.clone().map(|(target, _)| place(target)).collect();
    written.sort_unstable();
    let is_written = |x: &Tensor| {
        let read = buffer(x);
        let after = written.partition_point(|(other, ..)| *other < read);
        written.get(after).is_some_and(|(other, ..)| *other == read)
    };
    let overlap = |pair: &[(usize, usize, usize)]| pair[0].0 == pair[1].0 && pair[0].2 > pair[1].1;
    if pairs.clone().any(|(_, values)| is_written(values)) {
        return Err(Error::SharedStorage {
            first: target,
            second: values,
        });
    }
    if written.windows(2).any(overlap) {
        return Err(Error::Overlap { what: target });
    }
    Ok(())
}

/// The buffer of a contiguous tensor, and where it begins and ends there.
fn place(x: &Tensor) -> (usize, usize, usize) {
    let start = x.layout().start_offset();
    (buffer(x), start, start + x.elem_count())
}
