// The dtypes of tensors, and loops over their elements.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using u32 = unsigned int;
using u64 = unsigned long long;

// Exact in float; f64 values are read by no kernel but the survey, as they are.
__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_f32(__nv_bfloat16 x) { return __bfloat162float(x); }

// To the nearest, ties to even.
template <class T> __device__ __forceinline__ T from_f32(float x);
template <> __device__ __forceinline__ float from_f32(float x) { return x; }
template <> __device__ __forceinline__ __half from_f32(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_f32(float x) { return __float2bfloat16_rn(x); }

// Neighbouring elements, in accesses of up to 16 bytes.
template <class T, u32 N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack { T of[N]; };

template <u32 N, class T> __device__ __forceinline__ Pack<T, N> load(const T* p, u64 i) {
    return *reinterpret_cast<const Pack<T, N>*>(p + i);
}
template <u32 N, class T> __device__ __forceinline__ void store(T* p, u64 i, const Pack<T, N>& values) {
    *reinterpret_cast<Pack<T, N>*>(p + i) = values;
}
template <u32 N, class T> __device__ __forceinline__ bool is_aligned(const T* p) {
    return reinterpret_cast<u64>(p) % alignof(Pack<T, N>) == 0;
}

template <u32 N> struct Width { static constexpr u32 value = N; };

// Elements of a thread: enough loads in flight to hide their latency.
constexpr u32 A_THREAD = 4;

// f(i) for each i < n, on blocks that cover n once (`over` in src/cuda/launch.rs). Neighbouring threads have neighbouring
// elements.
template <class F> __device__ __forceinline__ void each(u64 n, F f) {
    const u64 block = static_cast<u64>(blockIdx.x) * blockDim.x * A_THREAD;
#pragma unroll
    for (u32 k = 0; k < A_THREAD; ++k) {
        const u64 i = block + k * blockDim.x + threadIdx.x;
        if (i < n) f(i);
    }
}

// The same with f(i, Width<N>) for N elements from each i on: in packs where all pointers allow it, else one by one.
template <class F, class... T> __device__ __forceinline__ void each_pack(u64 n, F f, const T*... pointers) {
    const u64 block = static_cast<u64>(blockIdx.x) * blockDim.x * A_THREAD;
    if ((is_aligned<A_THREAD>(pointers) && ...) && block + blockDim.x * A_THREAD <= n) {
        f(block + threadIdx.x * A_THREAD, Width<A_THREAD>());
    } else {
        each(n, [&](u64 i) { f(i, Width<1>()); });
    }
}
