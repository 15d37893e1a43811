use std::fmt;
use std::str::FromStr;

use candle_core::{DType, Device};

use crate::Error;

/// In what the products of the iteration are rounded. Their sums are always in f32, without TF32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// f16 on a CUDA device, f32 elsewhere.
    #[default]
    Auto,
    /// 24 bits. The only one on a CPU, where half precision would save nothing.
    F32,
    /// 11 bits, for numbers of up to 65504. After normalization there are no large ones.
    F16,
    /// 8 bits, for numbers of any size.
    BF16,
}

impl Precision {
    const NAMES: &str = "auto, f32, f16, bf16";

    /// The dtype that this means on a device.
    #[must_use]
    pub fn on(self, device: &Device) -> DType {
        match self {
            Self::Auto if device.is_cuda() => DType::F16,
            Self::Auto | Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::BF16 => DType::BF16,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        })
    }
}

impl FromStr for Precision {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => Ok(Self::Auto),
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::BF16),
            _ => Err(Error::Unknown {
                what: "precision",
                text: text.to_owned(),
                expected: Self::NAMES,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in Precision::NAMES.split(", ") {
            assert_eq!(name.parse::<Precision>().unwrap().to_string(), name);
        }
        assert!("half".parse::<Precision>().is_err());
    }

    #[test]
    fn a_cpu_iterates_in_f32_unless_told_otherwise() {
        assert_eq!(Precision::default().on(&Device::Cpu), DType::F32);
        assert_eq!(Precision::BF16.on(&Device::Cpu), DType::BF16);
    }
}
