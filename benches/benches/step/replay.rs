//! The requests of a step again, without anything in between: what communication takes alone.

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use polarshard_comm::{Communicator, Op, Request};
use polarshard_partition::{Class, Span};

use crate::split::median;
use crate::timed::{Asked, Timed};

const RUNS: usize = 7;

/// Milliseconds that the requests of a class take one behind the other, slowed down as the communicator is set to.
pub(crate) fn alone(
    comm: &mut Timed,
    asked: &[Asked],
    class: Class,
    device: &Device,
) -> Result<f64> {
    let asked: Vec<&Asked> = asked.iter().filter(|one| one.class == class).collect();
    if asked.iter().all(|one| one.ops.is_empty()) {
        return Ok(0.0);
    }
    // Requests are done in order, so those of one dtype can have one buffer.
    let mut buffers: Vec<Tensor> = Vec::new();
    for one in &asked {
        let longest = asked.iter().filter(|other| other.dtype == one.dtype);
        let longest = longest.map(|other| other.len).max().context("itself")?;
        if buffers.iter().all(|buffer| buffer.dtype() != one.dtype) {
            buffers.push(Tensor::zeros(longest.max(1), one.dtype, device)?);
        }
    }
    let mut times = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        device.synchronize()?;
        comm.mean(0.0)?;
        let begin = comm.clock.event()?;
        let mut started = Vec::with_capacity(asked.len());
        for one in &asked {
            let mut buffers = buffers.iter();
            let buffer = buffers.find(|buffer| buffer.dtype() == one.dtype);
            let buffer = buffer.context("made above")?.narrow(0, 0, one.len)?;
            started.push(comm.start(Request::new(class, buffer, one.ops.clone()))?);
        }
        for pending in started {
            pending.wait()?;
        }
        times.push(f64::from(begin.elapsed_ms(&comm.clock.event()?)?));
    }
    Ok(median(times))
}

/// Bytes a second that a rank sends in a long reduce-scatter, as a plan counts them.
pub(crate) fn link_speed(comm: &mut Timed, device: &Device) -> Result<f64> {
    let world = comm.world().get();
    if world == 1 {
        // Nothing is sent.
        return Ok(f64::MAX);
    }
    let len = (1 << 25) * world;
    let asked = Asked {
        class: Class::Gradient,
        dtype: DType::BF16,
        len,
        ops: vec![Op::ReduceScatter(Span::of_len(0, len))],
    };
    let milliseconds = alone(comm, &[asked], Class::Gradient, device)?;
    let sent = 2 * len * (world - 1) / world;
    comm.mean(sent as f64 / (milliseconds * 1e-3))
}
