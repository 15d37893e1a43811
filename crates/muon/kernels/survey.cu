// Surveys of many tensors in one launch, in a fixed tree whatever the launch: [sum of squares, non-finite elements,
// elements other than zero, largest magnitude] of each, in f64. Sums over a tensor do not depend on its neighbours.
#include "many.cuh"

constexpr u32 CHUNK = 1 << 15;  // elements of a block, as src/cuda/survey.rs has it
constexpr u32 WARPS = THREADS / 32;

struct Findings {
    double squares, non_finite, non_zero, largest;

    __device__ __forceinline__ void join(const Findings& other) {
        squares += other.squares;
        non_finite += other.non_finite;
        non_zero += other.non_zero;
        largest = fmax(largest, other.largest);
    }
};

// The findings of all threads, in thread 0.
__device__ Findings join_block(Findings f) {
    __shared__ Findings warps[WARPS];
    for (u32 away = 16; away > 0; away /= 2) {
        f.join({__shfl_down_sync(~0u, f.squares, away), __shfl_down_sync(~0u, f.non_finite, away),
                __shfl_down_sync(~0u, f.non_zero, away), __shfl_down_sync(~0u, f.largest, away)});
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = f;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 warp = 1; warp < WARPS; ++warp) f.join(warps[warp]);
    }
    return f;
}

__device__ __forceinline__ double to_f64(double x) { return x; }
template <class T> __device__ __forceinline__ double to_f64(T x) { return to_f32(x); }

template <class T> __device__ __forceinline__ Findings scan(const T* __restrict__ x, u64 n) {
    double squares = 0.0, largest = 0.0;
    u32 non_finite = 0, non_zero = 0;
#pragma unroll 8
    for (u64 i = threadIdx.x; i < n; i += THREADS) {
        const double value = to_f64(x[i]);
        squares += value * value;
        largest = fmax(largest, fabs(value));
        non_finite += !isfinite(value);
        non_zero += value != 0.0;
    }
    return {squares, static_cast<double>(non_finite), static_cast<double>(non_zero), largest};
}

// A block surveys one chunk of one tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
    survey_chunks(const __grid_constant__ Addresses addresses, const __grid_constant__ Lengths lengths,
                  const __grid_constant__ Dtypes dtypes, const __grid_constant__ Firsts firsts, u32 count,
                  Findings* chunks) {
    const u32 tensor = tensor_of_block(firsts, count);
    const u64 start = static_cast<u64>(blockIdx.x - firsts.of[tensor]) * CHUNK;
    const u64 n = min(static_cast<u64>(CHUNK), lengths.of[tensor] - start);
    const u64 address = addresses.of[tensor];
    Findings found;
    switch (dtypes.of[tensor]) {
        case 0: found = scan(reinterpret_cast<const float*>(address) + start, n); break;
        case 1: found = scan(reinterpret_cast<const __half*>(address) + start, n); break;
        case 2: found = scan(reinterpret_cast<const __nv_bfloat16*>(address) + start, n); break;
        default: found = scan(reinterpret_cast<const double*>(address) + start, n); break;
    }
    found = join_block(found);
    if (threadIdx.x == 0) chunks[blockIdx.x] = found;
}

// A block joins the chunks of one tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
    survey_tensors(const __grid_constant__ Firsts firsts, const Findings* chunks, Findings* tensors) {
    Findings found = {0.0, 0.0, 0.0, 0.0};
    const u32 end = firsts.of[blockIdx.x + 1];
    for (u32 chunk = firsts.of[blockIdx.x] + threadIdx.x; chunk < end; chunk += THREADS) found.join(chunks[chunk]);
    found = join_block(found);
    if (threadIdx.x == 0) tensors[blockIdx.x] = found;
}
