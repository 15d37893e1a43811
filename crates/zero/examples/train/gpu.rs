//! A rank's GPU, and its end of the world over NCCL.

use anyhow::Result;
use candle_core::Device;
use polarshard_comm::Communicator;
use polarshard_comm::launch::Launch;
use polarshard_partition::Digest;

/// Joins the other ranks of `launch`, which must have the same `digest`, with the GPU of this machine that is this
/// rank's. Where there are fewer GPUs than ranks, the ranks share them.
#[cfg(feature = "nccl")]
pub(crate) fn join(launch: &Launch, digest: Digest) -> Result<(Box<dyn Communicator>, Device)> {
    use anyhow::ensure;
    use polarshard_comm::{Nccl, nccl};

    let count = nccl::device_count()?;
    ensure!(count > 0, "this machine has no GPU");
    let device = nccl::device(launch.local_rank() % count)?;
    let comm = Nccl::connect(launch, &device, digest, crate::DEADLINE)?;
    Ok((Box::new(comm), device))
}

/// Without NCCL there is nothing to join; the options have been refused before.
#[cfg(not(feature = "nccl"))]
pub(crate) fn join(_: &Launch, _: Digest) -> Result<(Box<dyn Communicator>, Device)> {
    anyhow::bail!("`train` was built without the feature `nccl`")
}
