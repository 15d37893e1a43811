//! candle's dtypes and partition's names for them.

use candle_core::DType;
use polarshard_partition::Wire;

/// The name of a dtype that can be trained, or travel.
pub(crate) fn wire(dtype: DType) -> Option<Wire> {
    match dtype {
        DType::F16 => Some(Wire::F16),
        DType::BF16 => Some(Wire::BF16),
        DType::F32 => Some(Wire::F32),
        _ => None,
    }
}

pub(crate) fn dtype(wire: Wire) -> DType {
    match wire {
        Wire::F16 => DType::F16,
        Wire::BF16 => DType::BF16,
        Wire::F32 => DType::F32,
        Wire::F64 => DType::F64,
    }
}
