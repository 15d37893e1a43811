//! The tests that every backend passes.

use std::error::Error;

use candle_core::Device;
use polarshard_partition::WorldSize;

use crate::{Communicator, ranks};

/// How a case ended on one rank.
pub type Verdict = Result<(), Box<dyn Error + Send + Sync>>;

/// One test, as one rank runs it: with a fresh world each, in a thread or a process.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// What it shows.
    pub name: &'static str,
    /// Runs it on one rank, with buffers on the device.
    pub run: fn(Box<dyn Communicator>, &Device) -> Verdict,
}

/// All cases.
pub const CASES: &[Case] = &[];

/// Runs all cases on fresh worlds of all sizes, ranks as threads, with buffers on the CPU.
///
/// # Panics
/// If a case fails, with its name, the world's size and the rank.
pub fn run_all(make: &dyn Fn(WorldSize) -> Vec<Box<dyn Communicator>>, worlds: &[usize]) {
    for &size in worlds {
        let world = WorldSize::new(size).expect("a world has a rank");
        for case in CASES {
            let outcomes = ranks::run(make(world), |comm| (case.run)(comm, &Device::Cpu));
            for (rank, outcome) in outcomes.into_iter().enumerate() {
                assert!(
                    outcome.is_done(),
                    "case {} on rank {rank} of {size}: {outcome:?}",
                    case.name
                );
            }
        }
    }
}
