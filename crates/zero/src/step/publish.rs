//! New weights to all ranks, in the model's dtype, block by block and window by window.

use candle_core::{Device, Tensor};
use polarshard_comm::{Pending, Request};
use polarshard_partition::{Block, Class, Plan, Span};

use crate::channel::Channel;
use crate::dtypes;
use crate::error::Result;
use crate::flat;
use crate::gradients::{Buffer, Buffers};
use crate::weights::Weight;

/// The staging buffers of the weights' all-gather: one window is gathered while the one before it is copied.
#[derive(Debug)]
pub(crate) struct Publisher {
    staging: Buffers,
}

/// A window whose gathering was started.
struct Gathering<'a> {
    block: &'a Block,
    window: Span,
    staging: Option<Buffer>,
    in_flight: Pending,
}

impl Publisher {
    pub(crate) fn new(plan: &Plan, world: usize, device: &Device) -> Self {
        let lens = plan.layout().block_ids().flat_map(|id| {
            let space = plan.layout().space(plan.layout().block(id).space);
            plan.windows(id)
                .into_iter()
                .map(move |window| (space, space.wire, world * window.len()))
        });
        Self {
            staging: Buffers::new(device.clone(), lens),
        }
    }

    /// Gathers every rank's masters and copies them into the model.
    pub(crate) fn publish(
        &mut self,
        channel: &mut Channel,
        plan: &Plan,
        masters: &[Tensor],
        weights: &[Weight],
    ) -> Result<()> {
        let world = channel.world().get();
        let mut gathering: Option<Gathering<'_>> = None;
        for (id, master) in plan.layout().block_ids().zip(masters) {
            let block = plan.layout().block(id);
            let space = plan.layout().space(block.space);
            for window in plan.windows(id) {
                let own = flat::view(master, window)?.to_dtype(dtypes::dtype(space.wire))?;
                // What one rank gathers is its own.
                let (gathered, staging) = if world == 1 {
                    (own, None)
                } else {
                    let staging = self.staging.take(space, world * window.len())?;
                    flat::write(&staging.used, channel.rank().0 * window.len(), &own)?;
                    (staging.used.clone(), Some(staging))
                };
                let request = Request::all_gather(Class::Weight, &gathered);
                let started = Gathering {
                    block,
                    window,
                    staging,
                    in_flight: channel.start(request)?,
                };
                if let Some(before) = gathering.replace(started) {
                    self.finish(before, world, weights)?;
                }
            }
        }
        gathering.map_or(Ok(()), |last| self.finish(last, world, weights))
    }

    fn finish(&mut self, gathering: Gathering<'_>, world: usize, weights: &[Weight]) -> Result<()> {
        let Gathering {
            block,
            window,
            staging,
            in_flight,
        } = gathering;
        let gathered = in_flight.wait()?;
        copy_out(block, world, window, &gathered, weights)?;
        if let Some(staging) = staging {
            self.staging.give_back(staging);
        }
        Ok(())
    }
}

/// Copies the gathered runs of a window into the model's tensors.
fn copy_out(
    block: &Block,
    world: usize,
    window: Span,
    gathered: &Tensor,
    weights: &[Weight],
) -> Result<()> {
    for rank in 0..world {
        let shard = rank * block.shard_len;
        let in_block = window.shift(shard);
        let first = block
            .runs
            .partition_point(|run| run.at + run.len <= in_block.start);
        for run in &block.runs[first..] {
            let Some(common) = Span::of_len(run.at, run.len).intersect(in_block) else {
                break;
            };
            let Some(source) = run.source else { continue };
            let at = rank * window.len() + (common.start - in_block.start);
            let values = flat::view(gathered, Span::of_len(at, common.len()))?;
            weights[source.param.index()].write(source.start + (common.start - run.at), &values)?;
        }
    }
    Ok(())
}
