//! Steps whose gradients come from a backward pass, with which their reduction overlaps.

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use polarshard_comm::Communicator;
use polarshard_partition::Class;
use polarshard_zero::{Config, Outcome, ParamStore, Roles, ZeroOptimizer};

use crate::model::{Model, Network};
use crate::split::{Split, median};
use crate::timed::{Asked, At, Timed};
use crate::{COUNTED, WARM, config, replay, say};

/// In a micro-batch of one rank.
const TOKENS: usize = 2048;

/// Prints the time of a training step.
pub(crate) fn measure(comm: &mut Timed, model: &Model, device: &Device) -> Result<()> {
    let inputs = model.inputs(TOKENS, device)?;
    let alone = compute_alone(comm, model, &inputs, device)?;
    let (asked, overlapped) = Trainer::measured(comm, model, &inputs, true, device)?;
    let reduction = replay::alone(comm, &asked, Class::Gradient, device)?;
    say(
        comm,
        format_args!(
            "{TOKENS} tokens a rank: {alone:.2} ms forward and backward alone, {:.2} with the step; reductions \
             take {reduction:.2} alone, of which {:.2} are waited for",
            overlapped.total, overlapped.waited
        ),
    );
    Ok(())
}

/// Prints how long passes take beside reductions that are delayed until they take as long alone: as the longer of both,
/// not as their sum.
pub(crate) fn slow(comm: &mut Timed, model: &Model, device: &Device) -> Result<()> {
    const SAMPLE: usize = 50;
    if comm.world().get() == 1 {
        return Ok(());
    }
    let inputs = model.inputs(TOKENS, device)?;
    let (asked, before) = Trainer::measured(comm, model, &inputs, true, device)?;
    let alone = |comm: &mut Timed, delay| {
        comm.delay(delay);
        replay::alone(comm, &asked, Class::Gradient, device)
    };
    let bare = alone(comm, 0)?;
    let one = (alone(comm, SAMPLE)? - bare) / SAMPLE as f64;
    // All ranks must delay alike.
    let delay = comm.mean((before.pass - bare) / one)?.round() as usize;
    let reductions = alone(comm, delay)?;
    let (_, overlapped) = Trainer::measured(comm, model, &inputs, true, device)?;
    let (_, in_turn) = Trainer::measured(comm, model, &inputs, false, device)?;
    comm.delay(0);
    say(
        comm,
        format_args!(
            "reductions delayed by {delay} small ones each: {:.2} ms of passes and {reductions:.2} of reductions take \
             {:.2} together, {:.2} without overlap",
            before.pass, overlapped.pass, in_turn.pass
        ),
    );
    Ok(())
}

/// A forward and a backward pass without an optimizer.
fn compute_alone(comm: &mut Timed, model: &Model, inputs: &Tensor, device: &Device) -> Result<f64> {
    let network = model.on_variables(device)?;
    let mut events = Vec::with_capacity(WARM + COUNTED);
    for _ in 0..WARM + COUNTED {
        network.loss(inputs)?.backward()?;
        events.push(comm.clock.event()?);
    }
    device.synchronize()?;
    let pairs = events[WARM - 1..].windows(2);
    let times = pairs.map(|pair| Ok(f64::from(pair[0].elapsed_ms(&pair[1])?)));
    Ok(median(times.collect::<Result<_>>()?))
}

/// A model in training.
struct Trainer {
    network: Network,
    optimizer: ZeroOptimizer,
}

/// Medians, in milliseconds.
struct Training {
    /// Of a step, passes included.
    total: f64,
    /// From the begin of the forward pass until all reductions are done.
    pass: f64,
    /// What candle's stream waited for reductions.
    waited: f64,
}

impl Trainer {
    fn measured(
        comm: &mut Timed,
        model: &Model,
        inputs: &Tensor,
        overlap: bool,
        device: &Device,
    ) -> Result<(Vec<Asked>, Training)> {
        let store = ParamStore::new(0, Roles::default());
        let network = model.on_store(&store, device)?;
        let config = Config {
            overlap,
            ..config(model)
        };
        let optimizer = store.optimizer(Box::new(comm.clone()), config)?;
        let mut trainer = Self { network, optimizer };
        for _ in 0..WARM {
            trainer.step(comm, inputs)?;
        }
        let mut notes = Vec::with_capacity(COUNTED);
        for _ in 0..COUNTED {
            comm.clock.begin();
            trainer.step(comm, inputs)?;
            notes.push(comm.clock.end()?);
        }
        trainer.optimizer.shutdown()?;
        let of = |from: At, to: At| {
            let time = |at| notes.iter().map(move |notes| notes.first(at));
            let times = time(from).zip(time(to));
            let times = times.map(|(from, to)| Ok(f64::from(from?.elapsed_ms(to?)?)));
            Ok::<_, anyhow::Error>(median(times.collect::<Result<_>>()?))
        };
        let splits = notes.iter().map(|notes| Split::of(&notes.marks));
        let split = Split::median(&splits.collect::<Result<Vec<_>>>()?);
        let training = Training {
            total: of(At::Begin, At::End)?,
            pass: of(At::Begin, At::HandedIn)?,
            waited: split.waited(Class::Gradient),
        };
        let asked = notes.pop().map(|notes| notes.asked).unwrap_or_default();
        Ok((asked, training))
    }

    fn step(&mut self, comm: &Timed, inputs: &Tensor) -> Result<()> {
        self.optimizer.backward(&self.network.loss(inputs)?)?;
        comm.clock.mark(At::HandedIn);
        let report = self.optimizer.step()?;
        ensure!(report.outcome == Outcome::Applied, "{report:?}");
        Ok(())
    }
}
