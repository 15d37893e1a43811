//! How many threads candle computes with.

use std::process::{Command, ExitCode};
use std::{env, thread};

use anyhow::{Context, Result};

/// What candle sizes its pools by, at their first use.
const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Runs this program again with the cores shared out among the ranks, unless the variable says already how many threads
/// there should be; then `None`.
///
/// Ranks are threads, and each of them waits for all threads of candle's pool in most operations: with a pool as large as
/// the machine, the run took more than three times as long. A program cannot safely set its own variables.
pub(crate) fn share_cores(world: usize) -> Result<Option<ExitCode>> {
    if env::var_os(VARIABLE).is_some() {
        return Ok(None);
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = (cores / world).max(1);
    let program = env::current_exe().context("this program cannot find itself")?;
    let mut again = Command::new(program);
    let status = again
        .args(env::args_os().skip(1))
        .env(VARIABLE, threads.to_string())
        .status();
    let code = status
        .context("this program cannot start itself")?
        .code()
        .and_then(|code| u8::try_from(code).ok());
    Ok(Some(ExitCode::from(code.unwrap_or(1))))
}
