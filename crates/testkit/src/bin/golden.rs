//! Replays golden cases and prints how far the sharded optimizer is from DeepSpeed.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use polarshard_testkit::golden::Golden;
use polarshard_testkit::replay::{Replay, Worst, replay};

/// Replays golden cases through the sharded optimizer and compares each step's change of each parameter with DeepSpeed's.
///
/// Exits with 1 if an error is over its tolerance or the layout differs, and with 2 if a file cannot be read or run.
#[derive(Debug, Parser)]
#[command(name = "golden")]
struct Arguments {
    /// Safetensors files of golden cases.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

fn main() -> ExitCode {
    const UNFAITHFUL: u8 = 1;
    const UNREADABLE: u8 = 2;
    let mut code = 0;
    for file in Arguments::parse().files {
        match checked(&file) {
            Ok(replay) => {
                print(&file.display().to_string(), &replay);
                if !replay.is_faithful() {
                    code = code.max(UNFAITHFUL);
                }
            }
            Err(error) => {
                eprintln!("error: {error:#}");
                code = UNREADABLE;
            }
        }
    }
    ExitCode::from(code)
}

fn checked(file: &PathBuf) -> anyhow::Result<Replay> {
    let golden = Golden::read(file)?;
    Ok(replay(&golden)?)
}

fn print(file: &str, replay: &Replay) {
    println!("{file}");
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
