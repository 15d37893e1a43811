//! Collectives on flat candle tensors over interchangeable backends.
//!
//! A [`Communicator`] is one rank's end of a world. A [`Request`], a group of operations on spans
//! of one flat buffer, is started and gives a [`Pending`], which gives the buffer back when the
//! values are there. With the feature `nccl`, `Nccl` is the backend of many processes, started by the
//! launchers that [`launch`] knows, or by [`launch::spawn`], and held together by a [`tether`].
//! [`Loopback`] is the backend of one process, where ranks are threads:
//!
//! ```
//! use std::time::Duration;
//!
//! use candle_core::{Device, Tensor};
//! use polarshard_comm::{Communicator, Error, Loopback, Request, ranks};
//! use polarshard_partition::{Class, WorldSize};
//!
//! let deadline = Duration::from_secs(10);
//! let world = Loopback::world(WorldSize::new(4)?, deadline);
//! let sums = ranks::run(world, |mut comm| {
//!     let mine = Tensor::new(&[1f32, comm.rank().0 as f32], &Device::Cpu).expect("a tensor of two elements");
//!     let pending = comm.start(Request::all_reduce(Class::Control, &mine))?;
//!     // Other work goes here; it overlaps with the communication.
//!     let sum = pending.finish(deadline)?;
//!     Box::new(comm).shutdown()?;
//!     Ok::<_, Error>(sum)
//! });
//! for sum in sums {
//!     assert_eq!(sum.unwrap().to_vec1::<f32>()?, [4.0, 6.0]);
//! }
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! # What can go wrong
//!
//! Nothing hangs. What is wrong with a request by itself is refused before anything is sent
//! ([`Error::Invalid`]). A rank that panics, returns early, calls something else or never comes makes
//! every other rank's call return an [`Error`] that names it, within the deadline; after that the
//! world has ended, and every later call returns an error that carries the first one. Long work of
//! one rank stops the deadlines with [`Communicator::pause`].
//!
//! # Wrappers and backends
//!
//! [`Recording`] notes down every call, [`Faulty`] goes wrong on purpose, [`Shared`] lets several
//! optimizers use one world. All wrap any communicator, and others can be written outside: implement [`Communicator`], and [`Completion`] for what happens
//! at the end of a request. [`conformance`] holds the tests that every backend passes. [`ranks::run`]
//! runs ranks as threads. [`rendezvous`] is where the ranks of Loopback meet; it knows no tensors.

mod agree;
mod clock;
mod communicator;
pub mod conformance;
mod error;
mod faulty;
pub mod launch;
mod loopback;
#[cfg(feature = "nccl")]
#[expect(
    unsafe_code,
    reason = "NCCL and what it needs of the driver are C interfaces"
)]
pub mod nccl;
mod parts;
mod pending;
pub mod ranks;
mod recording;
pub mod rendezvous;
mod request;
mod setup;
mod shared;
pub mod sync;
pub mod tether;

pub use agree::disagreement;
pub use communicator::{Communicator, Pause};
pub use error::{Called, Departure, Error, Invalid, Started};
pub use faulty::{Fault, Faulty};
pub use loopback::Loopback;
#[cfg(feature = "nccl")]
pub use nccl::Nccl;
pub use pending::{Completion, Pending};
pub use recording::{CallLog, Recording};
pub use request::{Op, Request};
pub use setup::{Aspect, Introduction, SetupError, Stranger};
pub use shared::Shared;
