//! Why a file is refused.

use std::path::PathBuf;

use safetensors::Dtype;

/// Why a file is no golden case, or not one that can be reproduced. All name the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be read.
    #[error("{}: it cannot be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not in the safetensors format.
    #[error("{}: not a safetensors file", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Why.
        source: safetensors::SafeTensorError,
    },
    /// Something is not there.
    #[error("{}: there is no {what} `{key}`", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// `metadata` or `tensor`.
        what: &'static str,
        /// Its key.
        key: String,
    },
    /// The value of a key of the metadata is not what it should be.
    #[error("{}: metadata `{key}` is not as it should be", path.display())]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// Why.
        source: serde_json::Error,
    },
    /// A setting that is not reproduced, or has no meaning.
    #[error("{}: `{key}` is {value}, expected {expected}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The setting.
        key: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// A tensor has another dtype than F32.
    #[error("{}: tensor `{key}` is {dtype:?}, expected F32", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        key: String,
        /// Its dtype.
        dtype: Dtype,
    },
    /// A tensor has another shape than its parameter.
    #[error("{}: tensor `{key}` has shape {found:?}, its parameter has {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        key: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape of `init/NAME`.
        expected: Vec<usize>,
    },
    /// A tensor cannot be made.
    #[error("{}: tensor `{key}` cannot be made", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        key: String,
        /// Why.
        source: Box<candle_core::Error>,
    },
}
