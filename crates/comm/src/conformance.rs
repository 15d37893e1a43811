//! The tests that every backend passes.
//!
//! A [`Case`] is what one rank does in a fresh world, so that a backend whose ranks are processes
//! can run the same cases as one whose ranks are threads ([`run_all`]). Values are small integers:
//! their sums are exact in every dtype and every order.

mod collectives;
mod exchange;
mod flight;

use std::error::Error;
use std::fmt;

use candle_core::{DType, Device, Tensor};
use polarshard_partition::{Class, Rank, Span, WorldSize};

use crate::{Communicator, Op, Request, ranks};

/// How a case ended on one rank.
pub type Verdict = Result<(), Box<dyn Error + Send + Sync>>;

/// One test, as one rank runs it.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// What it shows.
    pub name: &'static str,
    /// What one rank does in a fresh world, with buffers on the device.
    pub run: fn(Box<dyn Communicator>, &Device) -> Verdict,
}

/// All cases.
pub const CASES: &[Case] = &[
    case("all-reduce", collectives::all_reduce),
    case("reduce", collectives::reduce),
    case("reduce-scatter", collectives::reduce_scatter),
    case("all-gather", collectives::all_gather),
    case("broadcast", collectives::broadcast),
    case("views write through", collectives::views),
    case("group of every kind", exchange::group),
    case("ring of sends", exchange::ring),
    case("uneven exchange", exchange::uneven),
    case("exchange with idle ranks", exchange::idle),
    case("many outstanding", flight::many),
    case("dropped pending", flight::dropped),
    case("wait, poll and finish", flight::verbs),
    case("refused requests", flight::refused),
    case("pauses", flight::paused),
];

const fn case(name: &'static str, run: fn(Box<dyn Communicator>, &Device) -> Verdict) -> Case {
    Case { name, run }
}

/// Runs all cases on fresh worlds of all sizes, ranks as threads, with buffers on the CPU.
///
/// # Panics
/// If a case fails, with its name, the world's size, the rank and what it said.
pub fn run_all(make: &dyn Fn(WorldSize) -> Vec<Box<dyn Communicator>>, worlds: &[usize]) {
    for &size in worlds {
        let world = WorldSize::new(size).expect("worlds have ranks");
        for case in CASES {
            let outcomes = ranks::run(make(world), |comm| (case.run)(comm, &Device::Cpu));
            for (rank, outcome) in outcomes.iter().enumerate() {
                let name = case.name;
                assert!(
                    outcome.is_done(),
                    "{name}, on rank {rank} of {size}: {outcome:?}"
                );
            }
        }
    }
}

const DTYPES: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F64];

/// What no case computes: marks elements that are to be overwritten, or left alone.
const UNTOUCHED: f64 = -7.0;

/// One rank of a case.
struct Rig<'a> {
    comm: Box<dyn Communicator>,
    device: &'a Device,
}

impl Rig<'_> {
    fn rank(&self) -> usize {
        self.comm.rank().0
    }

    fn size(&self) -> usize {
        self.comm.world().get()
    }

    fn tensor(&self, dtype: DType, values: Vec<f64>) -> candle_core::Result<Tensor> {
        let len = values.len();
        // One element more: not every device has buffers of none.
        let longer: Vec<f64> = values.into_iter().chain([UNTOUCHED]).collect();
        Tensor::from_vec(longer, len + 1, &Device::Cpu)?
            .to_dtype(dtype)?
            .to_device(self.device)?
            .narrow(0, 0, len)
    }

    /// What `rank` has at `i` before a case.
    fn value(rank: usize, i: usize) -> f64 {
        ((3 * rank + 5 * i) % 11) as f64
    }

    /// What `rank` has in `span` before a case.
    fn values(rank: usize, span: Span) -> Vec<f64> {
        (span.start..span.end)
            .map(|i| Self::value(rank, i))
            .collect()
    }

    /// What all ranks have in `span` before a case, summed.
    fn sums(&self, span: Span) -> Vec<f64> {
        let sum = |i| (0..self.size()).map(|rank| Self::value(rank, i)).sum();
        (span.start..span.end).map(sum).collect()
    }

    /// This rank's values, `len` of them.
    fn mine(&self, dtype: DType, len: usize) -> candle_core::Result<Tensor> {
        self.tensor(dtype, Self::values(self.rank(), Span::of_len(0, len)))
    }

    /// Runs a group of operations on `buffer` to its end.
    fn run(&mut self, buffer: &Tensor, ops: Vec<Op>) -> Result<Tensor, crate::Error> {
        self.request(Request::new(Class::Control, buffer.clone(), ops))
    }

    fn request(&mut self, request: Request) -> Result<Tensor, crate::Error> {
        let deadline = self.comm.deadline();
        self.comm.start(request)?.finish(deadline)
    }

    fn shutdown(self) -> Verdict {
        Ok(self.comm.shutdown()?)
    }
}

fn ranks_of(size: usize) -> impl Iterator<Item = Rank> {
    (0..size).map(Rank)
}

/// Compares all elements, exactly.
fn expect(what: impl fmt::Display, got: &Tensor, want: &[f64]) -> Verdict {
    // On the host: not every device computes with every dtype, or with nothing.
    let got = got.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    let got = got.to_vec1::<f64>()?;
    if got == want {
        return Ok(());
    }
    Err(format!("{what}: got {got:?}, want {want:?}").into())
}

fn ensure(holds: bool, what: impl fmt::Display) -> Verdict {
    if holds {
        return Ok(());
    }
    Err(what.to_string().into())
}
