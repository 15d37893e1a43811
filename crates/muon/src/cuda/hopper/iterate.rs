//! The launches that compute the products of an iteration.

use std::rc::Rc;

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result};
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, DevicePtr};

use super::kernel::{Grid, Kernel, Plain};
use super::modules::Modules;
use super::steps::{Factors, Maps, Step, Task};
use crate::hopper::program::Product;
use crate::hopper::schedule::{Early, Launch, Schedule};
use crate::hopper::tiles::Tile;
use crate::hopper::triangle::near;

/// What the kernel works off, laid out as `Work` in `kernels/hopper/tasks.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Work {
    products: u64,
    product_count: i32,
    near: i32,
    tasks: u64,
    rest: u64,
    /// 0 where each launch waits for the one before.
    left: u64,
}

// SAFETY: it is laid out as the kernels' struct, without padding.
unsafe impl Plain for Work {}
const _: () = assert!(size_of::<Work>() == 40);

/// The products of a kind of batch.
pub(super) struct Iterate {
    /// All launches but the last, which stores the results.
    others: Vec<Rc<Kernel>>,
    last: WithoutMaps,
    counts: Counts,
    /// What the kernels' arguments point to.
    _products: CudaSlice<Factors>,
    _tasks: CudaSlice<Task>,
    _rest: CudaSlice<i32>,
    _parts: CudaSlice<u32>,
    _left: CudaSlice<u32>,
}

/// Addresses of the parts of tiles that products have, and have left, `products` of each matrix: none
/// where each launch waits for the one before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counts {
    pub(super) parts: u64,
    pub(super) left: u64,
    pub(super) products: i32,
}

impl Iterate {
    pub(super) fn new(
        device: &CudaDevice,
        modules: &Modules,
        dtype: DType,
        program: &[Product],
        steps: &[Step],
        schedule: &Schedule,
        maps: &Maps,
    ) -> Result<Self> {
        let product_count = steps.len() as i32;
        let is_counted = schedule.launches.len() == 1;
        let factors: Vec<_> = steps.iter().map(|step| step.factors).collect();
        let step = |tile: &Tile| &steps[usize::from(tile.product)];
        let near = near(program, schedule);
        let tiles = schedule.tiles.iter().zip(schedule.early(program));
        let task = |(tile, early): (&Tile, Early)| step(tile).task(*tile, near, early);
        let products = device.clone_htod(&factors)?;
        let tasks = device.clone_htod(&tiles.map(task).collect::<Vec<_>>())?;
        let rest = device.clone_htod(&schedule.rest)?;
        let parts = device.clone_htod(&schedule.parts)?;
        let left = device.clone_htod(&schedule.parts)?;
        let stream = device.cuda_stream();
        let counts = Counts {
            parts: start(&parts, &stream),
            left: start(&left, &stream),
            products: if is_counted { product_count } else { 0 },
        };
        let left_of_all = if is_counted { counts.left } else { 0 };
        let [all_products, all_tasks, all_rest] = [
            start(&products, &stream),
            start(&tasks, &stream),
            start(&rest, &stream),
        ];
        let without_maps = |launch: &Launch| -> Result<_> {
            let (function, grid) =
                modules.product(dtype, launch.stage, launch.clusters, is_counted)?;
            let work = Work {
                products: all_products,
                product_count,
                near: near as i32,
                tasks: all_tasks + (launch.tiles_from * size_of::<Task>()) as u64,
                rest: all_rest + (launch.rest_from * size_of::<i32>()) as u64,
                left: left_of_all,
            };
            Ok(WithoutMaps {
                function,
                grid,
                work,
            })
        };
        let launches = schedule.launches.iter().map(without_maps);
        let mut launches = launches.collect::<Result<Vec<_>>>()?;
        let last = launches.pop().expect("a schedule has a launch");
        let others = launches.iter().map(|launch| Rc::new(launch.kernel(maps)));
        Ok(Self {
            others: others.collect(),
            last,
            counts,
            _products: products,
            _tasks: tasks,
            _rest: rest,
            _parts: parts,
            _left: left,
        })
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// The kernels of the products, in their order; the counts must be set before. The maps are of the same
    /// workspace, and of results of the same size, as at first.
    pub(super) fn kernels(&self, maps: &Maps) -> Vec<Rc<Kernel>> {
        let last = Rc::new(self.last.kernel(maps));
        self.others.iter().cloned().chain([last]).collect()
    }
}

/// One of the launches.
struct WithoutMaps {
    function: CudaFunction,
    grid: Grid,
    work: Work,
}

impl WithoutMaps {
    /// `newton_schulz_iterate_*(maps, work)`. `work.rest` has an entry more than there are clusters, which all
    /// have a pair of tasks, and the kernel stores within the maps and takes from the counts.
    fn kernel(&self, maps: &Maps) -> Kernel {
        Kernel::new(&self.function, self.grid)
            .with(*maps)
            .with(self.work)
    }
}

/// The address of a slice, which stands for as long as the slice does.
pub(super) fn start<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> u64 {
    let (address, _read) = slice.device_ptr(stream);
    address
}
