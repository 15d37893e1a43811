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
__device__ __forceinline__ Findings join_block(Findings f) {
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

// What one thread finds. Counts and the largest magnitude are exact in the tensor's own type, where they cost less.
template <class T> struct Tally {
    double squares = 0.0;
    T largest = 0;
    u32 non_finite = 0, non_zero = 0;

    __device__ __forceinline__ void take(T x) {
        const double value = x;
        squares += value * value;
        largest = max(largest, abs(x));
        non_finite += !isfinite(x);
        non_zero += x != 0;
    }
};

__device__ __forceinline__ double widened(double x) { return x; }
template <class T> __device__ __forceinline__ float widened(T x) { return to_f32(x); }

// Elements of a thread at once.
constexpr u32 GROUP = 8;

// Threads go over groups of neighbours: the order of the sum does not depend on how `group_at` reads them.
template <class T, class F> __device__ __forceinline__ void take_groups(Tally<T>& found, u32 groups, F group_at) {
#pragma unroll 2
    for (u32 group = threadIdx.x; group < groups; group += THREADS) {
        const auto elements = group_at(group * GROUP);
#pragma unroll
        for (u32 k = 0; k < GROUP; ++k) found.take(widened(elements.of[k]));
    }
}

template <class T> __device__ __forceinline__ Findings scan(const Addresses& addresses, const Chunk& chunk) {
    const T* __restrict__ x = chunk.of<T>(addresses);
    Tally<decltype(widened(T()))> found;
    const u32 groups = chunk.n / GROUP;
    if (is_aligned<GROUP>(x)) {
        take_groups(found, groups, [&](u32 i) { return load<GROUP>(x, i); });
    } else {
        take_groups(found, groups, [&](u32 i) {
            Pack<T, GROUP> elements;
#pragma unroll
            for (u32 k = 0; k < GROUP; ++k) elements.of[k] = x[i + k];
            return elements;
        });
    }
    if (threadIdx.x == groups % THREADS) {
        for (u32 i = groups * GROUP; i < chunk.n; ++i) found.take(widened(x[i]));
    }
    return {found.squares, static_cast<double>(found.non_finite), static_cast<double>(found.non_zero),
            static_cast<double>(found.largest)};
}

// A block surveys one chunk of one tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
    survey_chunks(const __grid_constant__ Addresses addresses, const __grid_constant__ Dtypes dtypes,
                  const __grid_constant__ Chunks cut, Findings* partial) {
    const Chunk chunk(cut);
    Findings found;
    switch (dtypes.of[chunk.tensor]) {
        case 0: found = scan<float>(addresses, chunk); break;
        case 1: found = scan<__half>(addresses, chunk); break;
        case 2: found = scan<__nv_bfloat16>(addresses, chunk); break;
        default: found = scan<double>(addresses, chunk); break;
    }
    found = join_block(found);
    if (threadIdx.x == 0) partial[blockIdx.x] = found;
}

// A block joins the chunks of one tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
    survey_tensors(const __grid_constant__ Chunks cut, const Findings* partial, Findings* tensors) {
    Findings found = {0.0, 0.0, 0.0, 0.0};
    const u32 end = cut.firsts[blockIdx.x + 1];
    for (u32 chunk = cut.firsts[blockIdx.x] + threadIdx.x; chunk < end; chunk += THREADS) found.join(partial[chunk]);
    found = join_block(found);
    if (threadIdx.x == 0) tensors[blockIdx.x] = found;
}
