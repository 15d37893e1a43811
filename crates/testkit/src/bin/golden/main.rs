//! Replays golden cases and prints how far the sharded optimizer is from DeepSpeed.

#[cfg(feature = "nccl")]
mod processes;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use candle_core::Device;
use clap::{Parser, ValueEnum};
use polarshard_muon::Precision;
use polarshard_testkit::golden::Golden;
use polarshard_testkit::replay::{Replay, Worst, replay};

/// Replays golden cases through the sharded optimizer and compares each step's change of each parameter with DeepSpeed's.
///
/// Exits with 1 if an error is over its tolerance or the layout differs, and with 2 if a file cannot be read or run.
#[derive(Debug, Clone, Parser)]
#[command(name = "golden")]
struct Arguments {
    /// Where tensors live.
    #[arg(long, value_enum, default_value_t)]
    device: Place,
    /// What joins the ranks.
    #[arg(long, value_enum, default_value_t)]
    backend: Backend,
    /// In what Newton-Schulz iterations are rounded, one run for each: auto, f32, f16 or bf16.
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    iterate: Vec<Precision>,
    /// Safetensors files of golden cases.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Place {
    /// In main memory.
    #[default]
    Cpu,
    /// On a GPU.
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Backend {
    /// Ranks are threads.
    #[default]
    Loopback,
    /// Ranks are processes, each with a GPU.
    Nccl,
}

/// How well it went; the worst of several counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Faithful,
    Unfaithful,
    /// A file could not be read or run.
    Unreadable,
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        Self::from(verdict as u8)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let verdict = match arguments.backend {
        Backend::Loopback => threads(&arguments),
        #[cfg(feature = "nccl")]
        Backend::Nccl => processes::run(&arguments),
        #[cfg(not(feature = "nccl"))]
        Backend::Nccl => Err(anyhow::anyhow!("`--backend nccl` needs the feature `nccl`")),
    };
    verdict
        .unwrap_or_else(|error| {
            eprintln!("error: {error:#}");
            Verdict::Unreadable
        })
        .into()
}

fn threads(arguments: &Arguments) -> Result<Verdict> {
    let device = match arguments.device {
        Place::Cpu => Device::Cpu,
        Place::Cuda => Device::new_cuda_with_stream(0)?,
    };
    Ok(judge(arguments, true, |file, iterate| {
        Ok(replay(&Golden::read(file)?, &device, iterate)?)
    }))
}

/// Replays each file in each precision, and prints what came of it, if nobody else does.
fn judge(
    arguments: &Arguments,
    speaks: bool,
    mut replay: impl FnMut(&Path, Precision) -> Result<Replay>,
) -> Verdict {
    let mut worst = Verdict::Faithful;
    for file in &arguments.files {
        for iterate in &arguments.iterate {
            let verdict = match replay(file, *iterate) {
                Ok(replay) => {
                    if speaks {
                        print(
                            &format!("{}, iterated in {iterate}", file.display()),
                            &replay,
                        );
                    }
                    if replay.is_faithful() {
                        Verdict::Faithful
                    } else {
                        Verdict::Unfaithful
                    }
                }
                Err(error) => {
                    eprintln!("error: {error:#}");
                    Verdict::Unreadable
                }
            };
            worst = worst.max(verdict);
        }
    }
    worst
}

fn print(run: &str, replay: &Replay) {
    println!("{run}");
    for (group, worst) in [("muon", &replay.muon), ("adamw", &replay.adamw)] {
        match worst {
            Some(worst) => println!("  {group:6}{}", line(worst)),
            None => println!("  {group:6}nothing to compare"),
        }
    }
    for difference in &replay.layout {
        println!("  layout: {difference}");
    }
}

fn line(worst: &Worst) -> String {
    let Worst {
        name,
        step,
        error,
        tolerance,
    } = worst;
    let verdict = if error <= tolerance { "ok" } else { "OVER" };
    format!(
        "error {error:.2e}  tolerance {tolerance:.1e}  ratio {:.3}  {verdict}  ({name}, step {step})",
        worst.ratio()
    )
}
