// Surveys of many tensors in one launch, in a fixed tree whatever the launch: [sum of squares, non-finite elements,
// elements other than zero, largest magnitude] of each, in f64. Sums over a tensor do not depend on its neighbours.
#include "many.cuh"

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

// Threads go over groups of neighbours, read in one access or not: the order of the sum does not depend on that.
template <class T> __device__ __forceinline__ Findings scan(const Addresses& addresses, const Chunk& chunk) {
    constexpr u32 N = 4;
    const T* __restrict__ x = chunk.of<T>(addresses);
    double squares = 0.0, largest = 0.0;
    u32 non_finite = 0, non_zero = 0;
    const auto take = [&](T element) {
        const double value = to_f64(element);
        squares += value * value;
        largest = fmax(largest, fabs(value));
        non_finite += !isfinite(value);
        non_zero += value != 0.0;
    };
    const bool is_wide = is_aligned<N>(x);
#pragma unroll 4
    for (u32 i = threadIdx.x * N; i < chunk.n; i += THREADS * N) {
        if (is_wide && i + N <= chunk.n) {
            const auto group = load<N>(x, i);
#pragma unroll
            for (u32 k = 0; k < N; ++k) take(group.of[k]);
        } else {
            for (u32 k = i; k < min(i + N, chunk.n); ++k) take(x[k]);
        }
    }
    return {squares, static_cast<double>(non_finite), static_cast<double>(non_zero), largest};
}

// A block surveys one chunk of one tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
    survey_chunks(const __grid_constant__ Addresses addresses, const __grid_constant__ Dtypes dtypes,
                  const __grid_constant__ Chunks cut, Findings* chunks) {
    const Chunk chunk(cut);
    Findings found;
    switch (dtypes.of[chunk.tensor]) {
        case 0: found = scan<float>(addresses, chunk); break;
        case 1: found = scan<__half>(addresses, chunk); break;
        case 2: found = scan<__nv_bfloat16>(addresses, chunk); break;
        default: found = scan<double>(addresses, chunk); break;
    }
    found = join_block(found);
    if (threadIdx.x == 0) chunks[blockIdx.x] = found;
}

// A block joins the chunks of one tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
    survey_tensors(const __grid_constant__ Chunks cut, const Findings* chunks, Findings* tensors) {
    Findings found = {0.0, 0.0, 0.0, 0.0};
    const u32 end = cut.firsts[blockIdx.x + 1];
    for (u32 chunk = cut.firsts[blockIdx.x] + threadIdx.x; chunk < end; chunk += THREADS) found.join(chunks[chunk]);
    found = join_block(found);
    if (threadIdx.x == 0) tensors[blockIdx.x] = found;
}
