//! New weights to all ranks, in the model's dtype, block by block and window by window.

use candle_core::{Device, Tensor};
use polarshard_comm::{Pending, Request};
use polarshard_partition::{Block, Class, Plan, Span};

use crate::channel::Channel;
use crate::error::Result;
use crate::flat;
use crate::gradients::{Buffer, Buffers};
use crate::weights::Weight;

/// The staging buffers of the weights' all-gather, two at most.
#[derive(Debug)]
pub(crate) struct Publisher {
    staging: Buffers,
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

    /// Gathers every rank's masters and copies them into the model: one window while the next is gathered.
    pub(crate) fn publish(
        &mut self,
        channel: &mut Channel,
        plan: &Plan,
        masters: &[Tensor],
        weights: &[Weight],
    ) -> Result<()> {
        let world = channel.world().get();
        let mut in_flight: Option<InFlight<'_>> = None;
        for (id, master) in plan.layout().block_ids().zip(masters) {
            let block = plan.layout().block(id);
            let space = plan.layout().space(block.space);
            for window in plan.windows(id) {
                let staging = self.staging.take(space, world * window.len())?;
                let own = channel.rank().0 * window.len();
                flat::write(&staging.used, own, &flat::view(master, window)?)?;
                let pending = channel.start(Request::all_gather(Class::Weight, &staging.used))?;
                let before = in_flight.replace(InFlight {
                    block,
                    window,
                    staging,
                    pending,
                });
                if let Some(before) = before {
                    self.staging.give_back(before.land(world, weights)?);
                }
            }
        }
        if let Some(last) = in_flight {
            self.staging.give_back(last.land(world, weights)?);
        }
        Ok(())
    }
}

/// A window on its way.
struct InFlight<'a> {
    block: &'a Block,
    window: Span,
    staging: Buffer,
    pending: Pending,
}

impl InFlight<'_> {
    /// Waits for the window and copies it into the model. Returns the buffer.
    fn land(self, world: usize, weights: &[Weight]) -> Result<Buffer> {
        self.pending.wait()?;
        copy_out(self.block, world, self.window, &self.staging, weights)?;
        Ok(self.staging)
    }
}

/// Copies the gathered runs of a window into the model's tensors.
fn copy_out(
    block: &Block,
    world: usize,
    window: Span,
    staging: &Buffer,
    weights: &[Weight],
) -> Result<()> {
    for rank in 0..world {
        let shard = rank * block.shard_len;
        let gathered = window.shift(shard);
        let first = block
            .runs
            .partition_point(|run| run.at + run.len <= gathered.start);
        for run in &block.runs[first..] {
            let Some(common) = Span::of_len(run.at, run.len).intersect(gathered) else {
                break;
            };
            let Some(source) = run.source else { continue };
            let in_staging = rank * window.len() + (common.start - gathered.start);
            let values = flat::view(&staging.used, Span::of_len(in_staging, common.len()))?;
            weights[source.param.index()].write(source.start + (common.start - run.at), &values)?;
        }
    }
    Ok(())
}
