//! New weights to all ranks, in the model's dtype, block by block and window by window.

use candle_core::{Device, Tensor};
use polarshard_comm::{Pending, Request};
use polarshard_partition::{Block, BlockId, Class, Plan, Span};

use crate::channel::Channel;
use crate::error::Result;
use crate::flat::{self, Write};
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
    staging: Buffer,
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

    /// Gathers every rank's masters and copies them into the model. Each block gets its `update` first, while the block
    /// before it travels.
    pub(crate) fn publish(
        &mut self,
        channel: &mut Channel,
        plan: &Plan,
        masters: &[Tensor],
        weights: &[Weight],
        update: impl Fn(BlockId) -> Result<()>,
    ) -> Result<()> {
        let world = channel.world().get();
        let mut gathering: Option<Gathering<'_>> = None;
        for (id, master) in plan.layout().block_ids().zip(masters) {
            update(id)?;
            let block = plan.layout().block(id);
            if world == 1 {
                let all = Span::of_len(0, block.shard_len);
                copy_runs(block, world, all, master, weights)?;
                continue;
            }
            let space = plan.layout().space(block.space);
            for window in plan.windows(id) {
                let own = flat::view(master, window)?;
                let staging = self.staging.take(space, world * window.len())?;
                flat::write(&staging.used, channel.rank().0 * window.len(), &own)?;
                let request = Request::all_gather(Class::Weight, &staging.used);
                let started = Gathering {
                    block,
                    window,
                    staging,
                    in_flight: channel.start(request)?,
                };
                if let Some(before) = gathering.replace(started) {
                    self.copy_out(before, world, weights)?;
                }
            }
        }
        gathering.map_or(Ok(()), |last| self.copy_out(last, world, weights))
    }

    fn copy_out(
        &mut self,
        gathering: Gathering<'_>,
        world: usize,
        weights: &[Weight],
    ) -> Result<()> {
        let Gathering {
            block,
            window,
            staging,
            in_flight,
        } = gathering;
        let gathered = in_flight.wait()?;
        copy_runs(block, world, window, &gathered, weights)?;
        self.staging.give_back(staging);
        Ok(())
    }
}

/// Copies the runs of a window, which every rank has a part of in `gathered`, into the model's tensors.
fn copy_runs(
    block: &Block,
    world: usize,
    window: Span,
    gathered: &Tensor,
    weights: &[Weight],
) -> Result<()> {
    let mut writes = Vec::new();
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
            writes.push(Write {
                flat: weights[source.param.index()].values(),
                at: source.start + (common.start - run.at),
                values,
            });
        }
    }
    Ok(flat::write_all(&writes)?)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::time::Duration;

    use candle_core::DType;
    use polarshard_comm::{Loopback, ranks};
    use polarshard_partition::{Placement, WorldSize};

    use super::*;
    use crate::config::Config;
    use crate::setup::{Setup, terms};

    /// What a rank stages after two rounds, and what was predicted.
    fn staged(comm: Loopback, config: Config) -> Result<[u64; 2]> {
        let shapes: [(&[usize], _); 4] = [
            (&[7, 5], DType::BF16),
            (&[30], DType::F32),
            (&[6, 6], DType::BF16),
            (&[9], DType::F32),
        ];
        let weights = shapes.iter().enumerate().map(|(index, (shape, dtype))| {
            let values = Tensor::zeros(*shape, *dtype, &Device::Cpu)?;
            Weight::new(index.to_string(), &values, false)
        });
        let weights = weights.collect::<Result<Vec<_>>>()?;
        let mut channel = Channel::new(Box::new(comm));
        let setup = Setup::new(&mut channel, &weights, config)?;
        let (plan, device) = (&setup.plan, &setup.device);
        let (rank, world) = (channel.rank(), channel.world());
        let terms = terms(plan.params(), world, &setup.config, device);
        let predicted = plan.predict(rank, &terms).memory.staging.0;
        let blocks = plan.layout().blocks().iter();
        let masters = blocks.map(|block| flat::zeros(block.shard_len, DType::F32, device));
        let masters = masters.collect::<candle_core::Result<Vec<_>>>()?;
        let mut publisher = Publisher::new(plan, world.get(), device);
        for _ in 0..2 {
            publisher.publish(&mut channel, plan, &masters, &weights, |_| Ok(()))?;
        }
        Ok([publisher.staging.free_bytes() as u64, predicted])
    }

    #[test]
    fn what_is_staged_was_predicted() -> Result<()> {
        for placement in Placement::ALL {
            // In windows that tile a block and in ones that do not, or block by block.
            for (ranks, bucket_size) in [(1, 40), (2, 40), (3, 16), (3, 1000)] {
                let config = Config {
                    placement,
                    bucket_size: NonZeroUsize::new(bucket_size).expect("not zero"),
                    ..Config::default()
                };
                let world = Loopback::world(WorldSize::new(ranks)?, Duration::from_secs(10));
                let staged = ranks::run(world, |comm| staged(comm, config.clone()));
                for outcome in staged {
                    let [held, predicted] = outcome.unwrap();
                    assert_eq!(held, predicted, "{placement}, {ranks} ranks, {bucket_size}");
                }
            }
        }
        Ok(())
    }
}
