//! A kernel with its arguments, and how it is put on a stream.

use std::ffi::c_void;
use std::slice;

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchConfig, cuLaunchKernelEx,
};
use cudarc::driver::{CudaFunction, CudaStream};

/// The size of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grid {
    pub(super) blocks: (u32, u32),
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
    /// Whether all blocks run at once, so that they may wait for each other.
    pub(super) together: bool,
}

/// What is passed to a kernel as it lies in memory.
///
/// # Safety
/// Without padding, and laid out as the kernel's parameter.
pub(super) unsafe trait Plain: Copy {}

// SAFETY: numbers have no padding.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for i64 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// A kernel to be launched. It starts before the one ahead of it has ended, and waits for that itself.
pub(super) struct Kernel {
    function: CudaFunction,
    grid: Grid,
    arguments: Vec<Argument>,
}

/// In whole words, so that it is aligned.
#[derive(PartialEq)]
struct Argument {
    words: Box<[u64]>,
    bytes: usize,
}

impl Argument {
    fn as_bytes(&self) -> &[u8] {
        // SAFETY: there are as many in the words.
        unsafe { slice::from_raw_parts(self.words.as_ptr().cast(), self.bytes) }
    }
}

impl Kernel {
    pub(super) fn new(function: &CudaFunction, grid: Grid) -> Self {
        Self {
            function: function.clone(),
            grid,
            arguments: Vec::new(),
        }
    }

    /// With one argument more.
    pub(super) fn with<T: Plain>(mut self, argument: T) -> Self {
        let bytes = size_of::<T>();
        let mut words = vec![0u64; bytes.div_ceil(8)].into_boxed_slice();
        // SAFETY: there is room for so many bytes, and all of them are initialized.
        unsafe {
            let from = (&raw const argument).cast::<u8>();
            from.copy_to_nonoverlapping(words.as_mut_ptr().cast(), bytes);
        }
        self.arguments.push(Argument { words, bytes });
        self
    }

    /// Whether it is the same kernel in a launch of the same size.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.function.cu_function() == other.function.cu_function() && self.grid == other.grid
    }

    pub(super) fn has_arguments_of(&self, other: &Self) -> bool {
        self.arguments == other.arguments
    }

    /// Whether it is what a node of a graph launches.
    ///
    /// # Safety
    /// The node lives, and this kernel has the arguments of its function, in number and size.
    pub(super) unsafe fn is_of_node(&self, node: &CUDA_KERNEL_NODE_PARAMS) -> bool {
        self.function.cu_function() == node.func
            && self.arguments.iter().enumerate().all(|(i, argument)| {
                // SAFETY: the node has the arguments of this function, of these sizes.
                let of_node = unsafe {
                    let at = *node.kernelParams.add(i);
                    slice::from_raw_parts(at.cast_const().cast::<u8>(), argument.bytes)
                };
                argument.as_bytes() == of_node
            })
    }

    /// Calls a function with the addresses of the arguments, which it only reads.
    pub(super) fn with_arguments<R>(&self, call: impl FnOnce(*mut *mut c_void) -> R) -> R {
        let arguments = self.arguments.iter();
        let address = |argument: &Argument| argument.words.as_ptr().cast_mut().cast();
        let mut addresses: Vec<*mut c_void> = arguments.map(address).collect();
        call(addresses.as_mut_ptr())
    }

    /// Puts it on a stream.
    ///
    /// # Safety
    /// The arguments are those of the kernel, in number, order and type; it stays within the memory
    /// that they are of, and waits for its predecessors before it touches what the last of them writes, and
    /// before it lets the next kernel start. The stream's context is bound to the thread.
    pub(super) unsafe fn launch(&self, stream: &CudaStream) -> Result<()> {
        let mut early =
            attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
        early.value.programmaticStreamSerializationAllowed = 1;
        let mut together = attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
        together.value.cooperative = i32::from(self.grid.together);
        let mut attributes = [early, together];
        let config = CUlaunchConfig {
            gridDimX: self.grid.blocks.0,
            gridDimY: self.grid.blocks.1,
            gridDimZ: 1,
            blockDimX: self.grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.grid.shared_bytes,
            hStream: stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let launched = self.with_arguments(|arguments| {
            // SAFETY: as the caller promises; the configuration and the arguments are read before the
            // call returns.
            unsafe {
                cuLaunchKernelEx(
                    &raw const config,
                    self.function.cu_function(),
                    arguments,
                    std::ptr::null_mut(),
                )
            }
        });
        launched.result().w()
    }
}

fn attribute(id: CUlaunchAttributeID) -> CUlaunchAttribute {
    CUlaunchAttribute {
        id,
        pad: [0; 4],
        value: CUlaunchAttributeValue { pad: [0; 64] },
    }
}
