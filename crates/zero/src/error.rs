//! What can go wrong, in words that name the parameter, the rank and the sizes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, DeviceLocation};
use polarshard_muon::AdamWConfig;
use polarshard_partition::{Rank, UpdateGroup};

/// An error of the sharded optimizer.
///
/// Unless [`is_fatal`](Self::is_fatal) says otherwise, the weights, the momentum and the step count are as they
/// were before the call, and training can go on.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing to train.
    #[error(
        "there is no parameter to train: the list is empty, or every parameter is frozen or a buffer"
    )]
    NoParameters,
    /// Two variables were given under one name.
    #[error("the name `{name}` is given to two parameters")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// One variable was given under two names.
    #[error("`{first}` and `{second}` are one variable: give it once, a tied weight has one name")]
    SharedVariable {
        /// The name that came first.
        first: String,
        /// The name that came second.
        second: String,
    },
    /// A weight has a dtype in which it cannot be trained.
    #[error("parameter `{name}` has dtype {dtype:?}; f32, f16 and bf16 can be trained")]
    UnsupportedDtype {
        /// The parameter.
        name: String,
        /// Its dtype.
        dtype: DType,
    },
    /// Parameters of one optimizer lie on different devices.
    #[error("parameter `{name}` is on {found:?}, the parameters before it are on {expected:?}")]
    MixedDevices {
        /// The parameter.
        name: String,
        /// The device of the parameters before it.
        expected: DeviceLocation,
        /// Its own.
        found: DeviceLocation,
    },
    /// A role was given to a pattern that matches no parameter.
    #[error("the pattern `{pattern}`, declared {role}, matches no parameter")]
    UnmatchedPattern {
        /// The pattern.
        pattern: String,
        /// The role that it was to give.
        role: &'static str,
    },
    /// The optimizer's state was asked to live on another device than the weights.
    #[error(
        "optimizer offload is not supported: the weights are on {weights:?} and the optimizer was asked to be on \
         {optimizer:?}; leave `optimizer_device` unset"
    )]
    Offload {
        /// Where the weights are.
        weights: DeviceLocation,
        /// Where the optimizer's state was asked to be.
        optimizer: DeviceLocation,
    },
    /// A setting has a value that makes no sense.
    #[error("{field} is {value}, it must be {wanted}")]
    InvalidConfig {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        wanted: &'static str,
    },
    /// A weight was asked for under a known name with another shape or dtype.
    #[error("`{name}` is registered as {registered} and was asked for as {requested}")]
    Reregistered {
        /// The parameter.
        name: String,
        /// Shape and dtype under which it is known.
        registered: String,
        /// Shape and dtype that were asked for.
        requested: String,
    },
    /// A new weight was asked for, or a trained one set, after the optimizer had been made.
    #[error(
        "`{name}` was asked for or set after the optimizer had been made: build the model and set its weights first"
    )]
    Sealed {
        /// The parameter.
        name: String,
    },
    /// A second optimizer was asked for: a store has one for life, also when that has ended.
    #[error("this `ParamStore` has an optimizer already")]
    HasOptimizer,
    /// A name is not in the store.
    #[error("there is no parameter `{name}`")]
    UnknownName {
        /// The name.
        name: String,
    },
    /// Parameters never received a gradient in the micro-batches of a step.
    #[error(
        "rank {rank}: no gradient reached {}; declare a parameter optional if that is meant. candle's fused `layer_norm`, \
         `rms_norm`, `softmax_last_dim` and `rope` cut gradients: use `layer_norm_slow`, `rms_norm_slow`, `softmax` and \
         `rope_slow`",
        list(names)
    )]
    MissingGradient {
        /// This rank.
        rank: Rank,
        /// The parameters.
        names: Vec<String>,
    },
    /// A second gradient of one parameter came in one micro-batch.
    #[error("rank {rank}: a second gradient of `{name}` came in one micro-batch")]
    RepeatedGradient {
        /// This rank.
        rank: Rank,
        /// The parameter.
        name: String,
    },
    /// A gradient does not have the shape of its parameter.
    #[error(
        "rank {rank}: the gradient of `{name}` has shape {found:?}, the parameter has {expected:?}"
    )]
    GradientShape {
        /// This rank.
        rank: Rank,
        /// The parameter.
        name: String,
        /// The parameter's shape.
        expected: Vec<usize>,
        /// The gradient's.
        found: Vec<usize>,
    },
    /// A gradient does not have the dtype of its parameter.
    #[error(
        "rank {rank}: the gradient of `{name}` has dtype {found:?}, the parameter has {expected:?}"
    )]
    GradientDtype {
        /// This rank.
        rank: Rank,
        /// The parameter.
        name: String,
        /// The parameter's dtype.
        expected: DType,
        /// The gradient's.
        found: DType,
    },
    /// A gradient is on another device than its parameter.
    #[error(
        "rank {rank}: the gradient of `{name}` is on {found:?}, the parameter is on {expected:?}"
    )]
    GradientDevice {
        /// This rank.
        rank: Rank,
        /// The parameter.
        name: String,
        /// The parameter's device.
        expected: DeviceLocation,
        /// The gradient's.
        found: DeviceLocation,
    },
    /// `loss.backward()` was called on a model of a `ParamStore`, or `backward` of another optimizer on a loss that reaches
    /// it.
    #[error(
        "a gradient of `{name}` came outside `backward` of its optimizer: call `optimizer.backward(&loss)`; a loss that \
         reaches the weights of another optimizer's model, too, cannot be differentiated"
    )]
    OutsideBackward {
        /// The parameter.
        name: String,
    },
    /// `backward` of an optimizer without a store, whose gradients must be handed in.
    #[error(
        "this optimizer was made from variables: call `loss.backward()` and hand the gradients in"
    )]
    NoStore,
    /// `hand_in` of an optimizer with a store, whose gradients arrive during `backward`.
    #[error(
        "this optimizer was made from a `ParamStore`: call `backward(&loss)`, there is nothing to hand in"
    )]
    HandInWithStore,
    /// A tensor that a model made from a weight at construction is used in the loss.
    #[error(
        "a tensor of shape {shape:?} was computed from a weight before the last step and is used after it: it does not \
         see the new values; compute it in every forward pass"
    )]
    Stale {
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A micro-batch after the last one of a step.
    #[error("rank {rank}: {accumulate} micro-batches are complete, call `step` first")]
    StepDue {
        /// This rank.
        rank: Rank,
        /// Micro-batches in a step.
        accumulate: usize,
    },
    /// A step before its last micro-batch.
    #[error(
        "rank {rank}: {done} of {accumulate} micro-batches are complete; `step_partial` steps on fewer"
    )]
    StepTooEarly {
        /// This rank.
        rank: Rank,
        /// Micro-batches done.
        done: usize,
        /// Micro-batches in a step.
        accumulate: usize,
    },
    /// Some ranks met an error in a micro-batch, so that all ranks dropped the step's micro-batches.
    #[error(
        "rank {rank}: the micro-batches of step {step} were dropped on all ranks, for an error on {}",
        ranks_text(failed)
    )]
    Dropped {
        /// This rank.
        rank: Rank,
        /// The step that was to come.
        step: u64,
        /// The ranks in error.
        failed: Vec<Rank>,
        /// The first error of this rank, if it is one of them.
        #[source]
        cause: Option<Arc<Self>>,
    },
    /// The mean gradient of a step cannot be computed in f32, or that of AdamW's parameters is larger than
    /// [`AdamWConfig::LARGEST_NORM`](polarshard_muon::AdamWConfig::LARGEST_NORM) once it is clipped, on any rank.
    #[error(
        "rank {rank}: step {step} was not taken on any rank: f32 cannot hold the mean gradient, whose norm is {norm:e}, \
         or AdamW's part of it, whose norm is {adamw_norm:e} once it is clipped, is not below {most:e}: gradients are divided by {divisor:e}, the weights of all micro-batches times the loss scale, \
         and multiplied by {clip_factor:e} for clipping",
        most = AdamWConfig::LARGEST_NORM
    )]
    MeanOutOfRange {
        /// This rank.
        rank: Rank,
        /// The step that was to come.
        step: u64,
        /// The global norm of the mean gradient before clipping.
        norm: f64,
        /// The norm over AdamW's parameters after it.
        adamw_norm: f64,
        /// The weights of all micro-batches times the loss scale.
        divisor: f64,
        /// What the mean gradient was to be multiplied with.
        clip_factor: f64,
    },
    /// Ranks disagree on the step, the hyper-parameters, the loss scale or the collectives issued.
    #[error(
        "rank {rank}: step {step} was refused, {} disagree(s) with it on the step, the hyper-parameters, the loss scale \
         or the number of collectives issued",
        ranks_text(drifted)
    )]
    Drifted {
        /// This rank.
        rank: Rank,
        /// The step that was to come.
        step: u64,
        /// The ranks that disagree with this one.
        drifted: Vec<Rank>,
    },
    /// Ranks have used several optimizers of one world in different orders. Nothing was done.
    #[error(
        "rank {rank}: {} used the optimizers of this world in another order",
        ranks_text(differing)
    )]
    OtherOrder {
        /// This rank.
        rank: Rank,
        /// The ranks whose order is not this one's.
        differing: Vec<Rank>,
    },
    /// Ranks were built differently.
    #[error("rank {rank} and rank {other} differ in {what}: {mine:#x} here, {theirs:#x} there")]
    Disagreement {
        /// This rank.
        rank: Rank,
        /// The first rank that differs from it.
        other: Rank,
        /// In what they differ.
        what: &'static str,
        /// This rank's digest of it.
        mine: u64,
        /// The other's.
        theirs: u64,
    },
    /// The weights of one parameter differ between ranks.
    #[error(
        "rank {rank}: the weights of `{name}` differ on {} from those of rank 0 (at the start, `broadcast_from` makes them equal)",
        ranks_text(differing)
    )]
    ReplicasDiffer {
        /// This rank.
        rank: Rank,
        /// The first parameter that differs, in registration order.
        name: String,
        /// The ranks whose weights differ from those of rank 0.
        differing: Vec<Rank>,
    },
    /// A loss of several elements, of which candle would differentiate the sum.
    #[error(
        "rank {rank}: the loss has shape {shape:?}, it must have one element, such as the mean"
    )]
    LossShape {
        /// This rank.
        rank: Rank,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// candle's backward pass failed.
    #[error("rank {rank}: the backward pass failed")]
    Backward {
        /// This rank.
        rank: Rank,
        /// Why.
        source: Arc<candle_core::Error>,
    },
    /// candle's backward pass panicked.
    #[error("rank {rank}: the backward pass panicked: {message}")]
    BackwardPanic {
        /// This rank.
        rank: Rank,
        /// What the panic said.
        message: String,
    },
    /// A weight of a micro-batch that is no positive number, or none in f32.
    #[error("rank {rank}: a micro-batch weighs {weight}, it must be positive and finite as f32")]
    MicroBatchWeight {
        /// This rank.
        rank: Rank,
        /// The weight.
        weight: f64,
    },
    /// What belongs between steps was asked for within a step.
    #[error(
        "rank {rank}: {done} micro-batches of a step are under way; save, load and set the loss scale between steps"
    )]
    WithinStep {
        /// This rank.
        rank: Rank,
        /// Micro-batches done.
        done: usize,
    },
    /// A file of a checkpoint cannot be written, read or understood.
    #[error("the checkpoint file `{}`: {source}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A checkpoint failed on other ranks, and so on all.
    #[error("rank {rank}: the checkpoint failed on {}", ranks_text(failed))]
    CheckpointFailed {
        /// This rank.
        rank: Rank,
        /// The ranks that know why.
        failed: Vec<Rank>,
    },
    /// Ranks found different checkpoints: their folders are not one, or some see an older state of it.
    #[error(
        "rank {rank}: {} found another checkpoint than the one in `{}`",
        ranks_text(differing),
        folder.display()
    )]
    OtherCheckpoint {
        /// This rank.
        rank: Rank,
        /// The ranks whose checkpoint is not this one's.
        differing: Vec<Rank>,
        /// This rank's.
        folder: PathBuf,
    },
    /// The model has a parameter that the checkpoint has not.
    #[error("the checkpoint in `{}` has no parameter `{name}`", folder.display())]
    NotInCheckpoint {
        /// The parameter.
        name: String,
        /// The checkpoint.
        folder: PathBuf,
    },
    /// The checkpoint has a parameter that the model has not.
    #[error("the checkpoint in `{}` has a parameter `{name}`, the model has none", folder.display())]
    NotInModel {
        /// The parameter.
        name: String,
        /// The checkpoint.
        folder: PathBuf,
    },
    /// A parameter has another shape in the checkpoint.
    #[error(
        "parameter `{name}` has shape {model:?} in the model and {checkpoint:?} in the checkpoint"
    )]
    CheckpointShape {
        /// The parameter.
        name: String,
        /// Its shape in the model.
        model: Vec<usize>,
        /// Its shape in the checkpoint.
        checkpoint: Vec<usize>,
    },
    /// A parameter was in the other group when the checkpoint was saved.
    #[error(
        "parameter `{name}` is {model}'s in the model and the other group's in the checkpoint: route it as then"
    )]
    CheckpointGroup {
        /// The parameter.
        name: String,
        /// Its group in the model.
        model: UpdateGroup,
    },
    /// An error has ended this optimizer.
    #[error("the optimizer has ended: no step and no save are possible any more")]
    Poisoned {
        /// The error that ended it.
        #[source]
        first: Arc<Self>,
    },
    /// A tensor operation failed.
    #[error("a tensor operation failed: {0}")]
    Tensor(Arc<candle_core::Error>),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] polarshard_comm::Error),
    /// No layout can be built.
    #[error(transparent)]
    Partition(#[from] polarshard_partition::Error),
    /// A rule or a hyper-parameter is wrong.
    #[error(transparent)]
    Muon(Arc<polarshard_muon::Error>),
}

impl Error {
    pub(crate) fn checkpoint(
        path: &Path,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self::Checkpoint {
            path: path.to_path_buf(),
            source: Arc::new(source),
        }
    }

    /// The same error where it ends the optimizer.
    pub(crate) fn ending(self) -> Self {
        if self.is_fatal() {
            self
        } else {
            Self::Poisoned {
                first: Arc::new(self),
            }
        }
    }

    /// Whether the optimizer has ended with this error: every later call returns it again.
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Poisoned { .. } => true,
            Self::Comm(error) => error.is_fatal(),
            _ => false,
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Tensor(Arc::new(error))
    }
}

impl From<polarshard_muon::Error> for Error {
    fn from(error: polarshard_muon::Error) -> Self {
        Self::Muon(Arc::new(error))
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        Self::wrap(error)
    }
}

/// A `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

fn list(names: &[String]) -> String {
    names
        .iter()
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ")
}

fn ranks_text(ranks: &[Rank]) -> String {
    let numbers: Vec<_> = ranks.iter().map(ToString::to_string).collect();
    format!("rank(s) {}", numbers.join(", "))
}
