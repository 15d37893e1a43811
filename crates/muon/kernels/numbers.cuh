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

// Elements of a thread: enough loads in flight to hide their latency.
constexpr u32 A_THREAD = 4;

// f(i) for each i < n, on blocks that cover n once (`blocks_of` in the launcher). Neighbouring threads have
// neighbouring elements.
template <class F> __device__ __forceinline__ void each(u64 n, F f) {
    const u64 first = static_cast<u64>(blockIdx.x) * blockDim.x * A_THREAD + threadIdx.x;
    if (first + (A_THREAD - 1) * blockDim.x < n) {
#pragma unroll
        for (u32 k = 0; k < A_THREAD; ++k) f(first + k * blockDim.x);
    } else {
        for (u64 i = first; i < n; i += blockDim.x) f(i);
    }
}
