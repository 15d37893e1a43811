//! Sets up a communicator, together with all ranks.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use candle_core::Device;
use cudarc::driver::CudaStream;
use cudarc::driver::result::stream::get_priority_range;
use polarshard_partition::Rank;

use super::device;
use super::marks::Marks;
use super::memory::Staging;
use super::raw::{Id, Raw};
use super::sys::Library;
use crate::SetupError;
use crate::tether::Tether;

/// How often the set-up is looked after.
const POLL: Duration = Duration::from_millis(1);

/// What a world of NCCL is made of.
pub(super) struct Parts {
    pub(super) raw: Raw,
    /// candle's stream.
    pub(super) compute: Arc<CudaStream>,
    pub(super) marks: Arc<Marks>,
    /// The communicator's.
    pub(super) stream: Arc<CudaStream>,
    pub(super) staging: Staging,
}

impl Parts {
    pub(super) fn make(
        tether: &Tether,
        device: &Device,
        deadline: Duration,
    ) -> Result<Self, SetupError> {
        let begun = Instant::now();
        let rank = tether.rank();
        let failed = |e: &dyn std::fmt::Display| SetupError::Backend {
            rank,
            message: e.to_string(),
        };
        let library = Library::get()?;
        let compute = device::stream_of(device)?;
        let context = compute.context();
        context.bind_to_thread().map_err(|e| failed(&e))?;
        // Communication goes first where it competes: others wait for it.
        let (_, greatest) = get_priority_range().map_err(|e| failed(&e))?;
        let stream = context.new_stream_with_priority(greatest);
        let stream = stream.map_err(|e| failed(&e))?;
        let side = context.new_stream().map_err(|e| failed(&e))?;
        let marks = Marks::new(context);
        let there = marks.take().map_err(|e| failed(&e))?;

        let mine = match rank {
            Rank(0) => Some(Id::new(library).map_err(|e| failed(&e))?.to_bytes()),
            _ => None,
        };
        let id = tether.hand_out(mine, deadline)?;
        let id = Id::from_bytes(&id).ok_or_else(|| failed(&"rank 0's id is none of NCCL's"))?;
        let raw = Raw::init(library, id, rank, tether.world()).map_err(|e| failed(&e))?;
        while !raw.poll().map_err(|e| failed(&e))? {
            if let Some(error) = tether.link().setup_failure() {
                return Err(error);
            }
            if begun.elapsed() >= deadline {
                return Err(failed(&format_args!(
                    "ncclCommInitRankConfig is not done within {deadline:?}"
                )));
            }
            thread::sleep(POLL);
        }
        Ok(Self {
            raw,
            compute,
            marks,
            stream,
            staging: Staging::new(side, there),
        })
    }
}
