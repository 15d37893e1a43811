use candle_core::{DType, DeviceLocation, Shape};

use crate::{AdamWConfig, Kernels};

/// What can go wrong in this crate; each message carries the values that explain it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A hyper-parameter is outside its range.
    #[error("{field} = {value} must be {requirement}")]
    Config {
        /// The field, as written in the configuration.
        field: &'static str,
        /// What it was set to.
        value: f64,
        /// The range that it must lie in.
        requirement: &'static str,
    },
    /// A set of coefficients without a step.
    #[error("custom coefficients have no step; at least one is needed")]
    NoCoefficients,
    /// A coefficient is infinite or not a number.
    #[error("custom coefficients of step {step} are not all finite: {row:?}")]
    NonFiniteCoefficients {
        /// The step, counted from 0.
        step: usize,
        /// Its coefficients.
        row: [f64; 3],
    },
    /// A text names none of the choices.
    #[error("unknown {what} {text:?}; expected one of {expected}")]
    Unknown {
        /// What was parsed.
        what: &'static str,
        /// The text.
        text: String,
        /// All the names there are.
        expected: &'static str,
    },
    /// Newton-Schulz cannot iterate in this precision on this device.
    #[error("newton-schulz cannot iterate in {dtype:?} on {device:?}; use f32")]
    IterateDType {
        /// The precision asked for.
        dtype: DType,
        /// The device of the matrices.
        device: DeviceLocation,
    },
    /// Newton-Schulz was told to take kernels that this device has not, or not in this precision.
    #[error("newton-schulz has no {kernels} kernels for {dtype:?} on {device:?}; use auto")]
    NoKernels {
        /// The kernels asked for.
        kernels: Kernels,
        /// The precision of the iteration.
        dtype: DType,
        /// The device of the matrices.
        device: DeviceLocation,
    },
    /// Newton-Schulz was given something that is not a matrix or a stack of matrices.
    #[error("newton-schulz needs {expected}, got shape {shape:?}")]
    NotAMatrix {
        /// What the called function takes.
        expected: &'static str,
        /// What it got.
        shape: Shape,
    },
    /// A tensor has a dtype that the operation does not take.
    #[error("{what} has dtype {dtype:?}; expected {expected}")]
    DType {
        /// The operand or parameter.
        what: String,
        /// Its dtype.
        dtype: DType,
        /// The dtypes that are taken.
        expected: &'static str,
    },
    /// An operand of an element-wise step, or a variable, is not contiguous.
    #[error("{what} is not contiguous")]
    NotContiguous {
        /// The operand or parameter.
        what: String,
    },
    /// Two operands of an element-wise step differ in length.
    #[error("{what} has {found} elements; expected {expected}")]
    Length {
        /// The operand.
        what: String,
        /// Its elements.
        found: usize,
        /// The elements of the operand that is written.
        expected: usize,
    },
    /// Two operands of an element-wise step are views of the same buffer.
    #[error("{first} and {second} share storage")]
    SharedStorage {
        /// One operand.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// Two tensors that are written in one call have elements in common.
    #[error("two of {what} overlap")]
    Overlap {
        /// The operands.
        what: &'static str,
    },
    /// A routing rule matched no parameter.
    #[error("rule {pattern:?} matches no parameter")]
    UnusedRule {
        /// The rule's pattern.
        pattern: String,
    },
    /// A name was given to two parameters.
    #[error("parameter {name:?} is listed twice")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A rule needs another number of dimensions.
    #[error("parameter {name:?} of shape {shape:?} cannot be {rule}: it needs {expected}")]
    RuleShape {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The rule in words.
        rule: String,
        /// The dimensions that the rule takes.
        expected: &'static str,
    },
    /// A split does not fit the rows of its parameter.
    #[error("parameter {name:?} has {rows} rows, which cannot be split into {split}")]
    BadSplit {
        /// The parameter.
        name: String,
        /// Its rows.
        rows: usize,
        /// The split as declared.
        split: String,
    },
    /// A variable was given to Muon that has no matrix in it.
    #[error("{name} of shape {shape:?} is no matrix; give it to adamw")]
    NotForMuon {
        /// The variable.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// One variable was listed twice.
    #[error("{second} is the same variable as {first}")]
    SharedVariable {
        /// Where it was first.
        first: String,
        /// Where it was again.
        second: String,
    },
    /// A variable was given to the optimizer that is in neither group.
    #[error("{name} of shape {shape:?} is in neither group")]
    NotInAGroup {
        /// The variable.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A group lists a variable that was not given to the optimizer.
    #[error("{name} of shape {shape:?} is in a group, but was not given to the optimizer")]
    NotGiven {
        /// The variable.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A gradient has another shape than its parameter.
    #[error("the gradient of {name} has shape {gradient:?}; the parameter has {parameter:?}")]
    GradientShape {
        /// The parameter.
        name: String,
        /// The gradient's shape.
        gradient: Shape,
        /// The parameter's shape.
        parameter: Shape,
    },
    /// A gradient has infinite elements, or ones that are not numbers.
    #[error("the gradient of {name} has {count} elements that are not finite")]
    NonFiniteGradient {
        /// The parameter.
        name: String,
        /// How many.
        count: u64,
    },
    /// The gradients of AdamW's parameters are so large that a second moment could be infinite, and would stay so.
    #[error(
        "the gradients of adamw's parameters have norm {norm:e}; it must be less than {:e}",
        AdamWConfig::LARGEST_NORM
    )]
    GradientNorm {
        /// The norm over all of them.
        norm: f64,
    },
    /// candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl From<Error> for candle_core::Error {
    /// For traits of candle, such as `Optimizer`, that know its own error alone.
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(inner) => inner,
            other => Self::wrap(other),
        }
    }
}
