use std::fmt;
use std::str::FromStr;

use crate::Error;

/// Which implementation of its products [`NewtonSchulz`](crate::NewtonSchulz) takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kernels {
    /// On a CPU candle's products; on a CUDA device `Hopper` where it can, else `Cublas`.
    #[default]
    Auto,
    /// Kernels of this crate for compute capability 9.0, in f16 or bf16. They compute a half of each
    /// symmetric product, and a matrix has the same bits alone and in any batch.
    Hopper,
    /// cuBLAS, on any CUDA device and in any precision.
    Cublas,
}

impl fmt::Display for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Hopper => "hopper",
            Self::Cublas => "cublas",
        })
    }
}

impl FromStr for Kernels {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => Ok(Self::Auto),
            "hopper" => Ok(Self::Hopper),
            "cublas" => Ok(Self::Cublas),
            _ => Err(Error::Unknown {
                what: "newton-schulz kernels",
                text: text.to_owned(),
                expected: "auto, hopper, cublas",
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for kernels in [Kernels::Auto, Kernels::Hopper, Kernels::Cublas] {
            assert_eq!(kernels.to_string().parse::<Kernels>().unwrap(), kernels);
        }
        assert!("Hopper".parse::<Kernels>().is_err());
    }
}
