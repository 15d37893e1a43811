//! New weights to all ranks, in the model's dtype, block by block and window by window.

use candle_core::{Device, Tensor};
use polarshard_comm::Request;
use polarshard_partition::{Block, Class, Plan, Span};

use crate::channel::Channel;
use crate::error::Result;
use crate::flat;
use crate::gradients::{Buffer, Buffers};
use crate::weights::Weight;

/// The staging buffer of the weights' all-gather.
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

    /// Gathers every rank's masters and copies them into the model.
    pub(crate) fn publish(
        &mut self,
        channel: &mut Channel,
        plan: &Plan,
        masters: &[Tensor],
        weights: &[Weight],
    ) -> Result<()> {
        let world = channel.world().get();
        for (id, master) in plan.layout().block_ids().zip(masters) {
            let block = plan.layout().block(id);
            for window in plan.windows(id) {
                let staging = self
                    .staging
                    .take(plan.layout().space(block.space), world * window.len())?;
                let own = channel.rank().0 * window.len();
                flat::write(&staging.used, own, &flat::view(master, window)?)?;
                channel
                    .start(Request::all_gather(Class::Weight, &staging.used))?
                    .wait()?;
                copy_out(block, world, window, &staging, weights)?;
                self.staging.give_back(staging);
            }
        }
        Ok(())
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
