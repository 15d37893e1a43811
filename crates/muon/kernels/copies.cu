// Copies of many tensors in one launch, each cast to the dtype of its target: exactly where that holds it, else to the
// nearest, ties to even.
#include "many.cuh"

// As src/cuda/copies.rs has them.
constexpr u32 CHUNK = 1 << 13;  // elements of a block
constexpr u32 DTYPES = 3;

// Elements that a thread moves at once, in accesses of 16 bytes.
constexpr u32 WIDE = 8;
template <class T> struct alignas(16) Run { T of[WIDE]; };

template <class T, class S> struct Cast {
    static __device__ __forceinline__ T of(S x) { return from_f32<T>(to_f32(x)); }
};
// Bit by bit, whatever kind of NaN it is.
template <class T> struct Cast<T, T> {
    static __device__ __forceinline__ T of(T x) { return x; }
};

template <class T> __device__ __forceinline__ u32 to_aligned(const T* p) {
    return (16 - reinterpret_cast<u64>(p) % 16) % 16 / sizeof(T);
}

template <class T, class S> __device__ __forceinline__ void one_by_one(T* to, const S* from, u32 n) {
#pragma unroll 8
    for (u32 i = threadIdx.x; i < n; i += THREADS) to[i] = Cast<T, S>::of(from[i]);
}

template <class T, class S> __device__ void move(u64 target, u64 values, u64 start, u32 n) {
    T* __restrict__ to = reinterpret_cast<T*>(target) + start;
    const S* __restrict__ from = reinterpret_cast<const S*>(values) + start;
    const u32 head = min(n, max(to_aligned(to), to_aligned(from)));
    if (to_aligned(to + head) != 0 || to_aligned(from + head) != 0) return one_by_one(to, from, n);
    one_by_one(to, from, head);
    const u32 runs = (n - head) / WIDE;
    auto* wide_to = reinterpret_cast<Run<T>*>(to + head);
    const auto* wide_from = reinterpret_cast<const Run<S>*>(from + head);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < runs; i += THREADS) {
        const Run<S> run = wide_from[i];
        Run<T> cast;
#pragma unroll
        for (u32 k = 0; k < WIDE; ++k) cast.of[k] = Cast<T, S>::of(run.of[k]);
        wide_to[i] = cast;
    }
    const u32 done = head + runs * WIDE;
    one_by_one(to + done, from + done, n - done);
}

// A block copies one chunk of one tensor. A dtype is DTYPES times that of the target, and that of the values.
extern "C" __global__ void __launch_bounds__(THREADS)
    copies(const __grid_constant__ Addresses targets, const __grid_constant__ Addresses values,
           const __grid_constant__ Lengths lengths, const __grid_constant__ Dtypes dtypes,
           const __grid_constant__ Firsts firsts, u32 count) {
    const u32 copy = tensor_of_block(firsts, count);
    const u64 start = static_cast<u64>(blockIdx.x - firsts.of[copy]) * CHUNK;
    const u32 n = min(static_cast<u64>(CHUNK), lengths.of[copy] - start);
    const u64 to = targets.of[copy], from = values.of[copy];
    switch (dtypes.of[copy]) {
        case 0 * DTYPES + 0: return move<float, float>(to, from, start, n);
        case 0 * DTYPES + 1: return move<float, __half>(to, from, start, n);
        case 0 * DTYPES + 2: return move<float, __nv_bfloat16>(to, from, start, n);
        case 1 * DTYPES + 0: return move<__half, float>(to, from, start, n);
        case 1 * DTYPES + 1: return move<__half, __half>(to, from, start, n);
        case 1 * DTYPES + 2: return move<__half, __nv_bfloat16>(to, from, start, n);
        case 2 * DTYPES + 0: return move<__nv_bfloat16, float>(to, from, start, n);
        case 2 * DTYPES + 1: return move<__nv_bfloat16, __half>(to, from, start, n);
        case 2 * DTYPES + 2: return move<__nv_bfloat16, __nv_bfloat16>(to, from, start, n);
        default: __trap();
    }
}
