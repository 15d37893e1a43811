// Copies of many tensors in one launch, each cast to the dtype of its target: exactly where that holds it, else to the
// nearest, ties to even.
#include "many.cuh"

constexpr u32 DTYPES = 3;  // as src/cuda/copies.rs has them

template <class T, class S> struct Cast {
    static __device__ __forceinline__ T of(S x) { return from_f32<T>(to_f32(x)); }
};
// Bit by bit, whatever kind of NaN it is.
template <class T> struct Cast<T, T> {
    static __device__ __forceinline__ T of(T x) { return x; }
};

template <class T, class S>
__device__ __forceinline__ void move(const Addresses& targets, const Addresses& values, const Chunk& chunk) {
    T* __restrict__ to = chunk.of<T>(targets);
    const S* __restrict__ from = chunk.of<S>(values);
    const auto take = [&](u32 i, auto width) {
        constexpr u32 N = decltype(width)::value;
        const auto read = load<N>(from, i);
        Pack<T, N> cast;
#pragma unroll
        for (u32 k = 0; k < N; ++k) cast.of[k] = Cast<T, S>::of(read.of[k]);
        store(to, i, cast);
    };
    // 16 bytes of a half, twice as many of a float.
    chunk.each<8>(take, to, from);
}

// A block copies one chunk of one tensor. A dtype is DTYPES times that of the target, and that of the values.
extern "C" __global__ void __launch_bounds__(THREADS)
    copies(const __grid_constant__ Addresses targets, const __grid_constant__ Addresses values,
           const __grid_constant__ Dtypes dtypes, const __grid_constant__ Chunks chunks) {
    const Chunk chunk(chunks);
    switch (dtypes.of[chunk.tensor]) {
        case 0 * DTYPES + 0: return move<float, float>(targets, values, chunk);
        case 0 * DTYPES + 1: return move<float, __half>(targets, values, chunk);
        case 0 * DTYPES + 2: return move<float, __nv_bfloat16>(targets, values, chunk);
        case 1 * DTYPES + 0: return move<__half, float>(targets, values, chunk);
        case 1 * DTYPES + 1: return move<__half, __half>(targets, values, chunk);
        case 1 * DTYPES + 2: return move<__half, __nv_bfloat16>(targets, values, chunk);
        case 2 * DTYPES + 0: return move<__nv_bfloat16, float>(targets, values, chunk);
        case 2 * DTYPES + 1: return move<__nv_bfloat16, __half>(targets, values, chunk);
        case 2 * DTYPES + 2: return move<__nv_bfloat16, __nv_bfloat16>(targets, values, chunk);
        default: __trap();
    }
}
