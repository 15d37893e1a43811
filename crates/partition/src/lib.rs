//! Layouts, shards, buckets, routes and policies of sharded optimizers, as integer arithmetic.
//!
//! ZeRO cuts optimizer state into one shard a rank, and a cut can fall inside a matrix that an
//! optimizer such as Muon needs whole. This crate says where every element lies, who owns it, how
//! its gradient gets there, what ranks swap so that each matrix is whole where it is computed, and
//! what all of it costs in bytes, FLOPs and memory. Its functions are pure: they know no tensors,
//! devices, threads or I/O.
//!
//! [`Params`] is what a model has. [`Layout`] is where it lies. [`Plan`] is what happens to it in a
//! step. [`plan_best`] compares the plans.

mod block;
mod bucket;
mod bucket_plan;
mod buffers;
mod call;
mod choice;
mod compute;
mod digest;
mod error;
mod exchange;
mod kept;
mod layout;
mod lpt;
mod memory;
mod param;
mod params;
mod plan;
mod planner;
mod predict;
mod rank;
mod slices;
mod span;
#[cfg(feature = "proptest")]
pub mod strategies;
mod tiling;
mod traffic;
mod turns;
mod whole;

pub use block::{Block, BlockId, Run, Source, Space, SpaceId};
pub use bucket::{Bucket, BucketId};
pub use bucket_plan::{BucketPlan, Piece, Reduction, Segment};
pub use call::{Call, Class, Collective, Wire};
pub use choice::{Placement, Policy, Route, Stage};
pub use digest::{Digest, DigestWriter};
pub use error::Error;
pub use exchange::{ExchangeKind, Parcel, RankExchange};
pub use kept::{Kept, Place};
pub use layout::Layout;
pub use memory::{Bytes, Memory};
pub use param::{Matrix, MatrixId, Param, ParamId, UpdateGroup};
pub use params::Params;
pub use plan::Plan;
pub use planner::{Candidate, Costs, plan_best};
pub use predict::{Prediction, Terms};
pub use rank::{Rank, Ranks, WorldSize};
pub use slices::Slice;
pub use span::Span;
pub use traffic::{Tally, Traffic};
