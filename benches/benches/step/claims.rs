//! Properties of a step, shown on the device: the host waits for it only for the decision, and does not take more memory
//! with every step; all ranks end with the same bits.

use anyhow::{Context, Result, ensure};
use candle_core::Device;

use crate::hand_in::Job;
use crate::model::{Model, drawn};
use crate::timed::{Stall, Timed};
use crate::{config, say, used};

/// A side of the matrices whose products hold the device up, and how many there are: some 30 ms on an H200.
const SIDE: usize = 8192;
const PRODUCTS: usize = 24;

/// Prints what is shown.
pub(crate) fn measure(comm: &mut Timed, model: &Model, device: &Device) -> Result<()> {
    let mut job = Job::new(comm, model, config(model), device)?;
    host_runs_ahead(comm, &mut job, device)?;
    memory_is_constant(comm, &mut job, device)?;
    job.optimizer.verify_replicas()?;
    say(comm, "the weights of all ranks have the same bits");
    Ok(job.optimizer.shutdown()?)
}

/// Holds the device up before the hand-in, and again after the decision: in both halves of a step the host must be done
/// before the device is done with that.
fn host_runs_ahead(comm: &mut Timed, job: &mut Job, device: &Device) -> Result<()> {
    job.step(comm)?;
    device.synchronize()?;
    let stall = || {
        Ok::<_, anyhow::Error>(Stall {
            factor: drawn(1e-3, &[SIDE, SIDE], device)?,
            times: PRODUCTS,
            over: None,
        })
    };
    let mut before = stall()?;
    before.give(&comm.clock)?;
    job.hand_in()?;
    let over = before.over.as_ref().context("it was given")?;
    let handed_in_first = !over.is_complete();
    comm.stall_after_decision(Some(stall()?));
    job.finish()?;
    let stalled = comm.stall_after_decision(None).context("it was set")?;
    let over = stalled.over.as_ref().context("there was a decision")?;
    let stepped_first = !over.is_complete();
    ensure!(
        handed_in_first,
        "the hand-in waits for the device to do what it was given before"
    );
    ensure!(
        stepped_first,
        "a step waits for the device to do what it was given after the decision"
    );
    say(
        comm,
        "with the device held up, hand-in returns before the device begins with it, and the step before the device begins \
         with what follows the decision",
    );
    Ok(())
}

/// Compares the device memory in use after a few steps and after many.
fn memory_is_constant(comm: &mut Timed, job: &mut Job, device: &Device) -> Result<()> {
    const FEW: usize = 3;
    const MANY: usize = 100;
    let mut in_use = [0; 2];
    let mut steps = 0;
    for (until, in_use) in [FEW, MANY].into_iter().zip(&mut in_use) {
        while steps < until {
            job.step(comm)?;
            steps += 1;
        }
        // Others may share the device.
        comm.mean(0.0)?;
        *in_use = used(device)?;
    }
    let [few, many] = in_use;
    say(
        comm,
        format_args!("bytes of the device in use after {FEW} steps: {few}, after {MANY}: {many}"),
    );
    Ok(())
}
