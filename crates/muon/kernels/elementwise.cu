// The element-wise steps of the optimizers. Each operation is rounded by itself, in the order of the formulas in
// src/elementwise/mod.rs, so that elements have the bits of the CPU: the intrinsics keep the compiler from contracting a
// product and a sum.
#include "many.cuh"

// What a gradient is multiplied with, one after the other.
struct GradientFactors {
    float mean, clip;
    template <class T> __device__ __forceinline__ float of(T g) const {
        return __fmul_rn(clip, __fmul_rn(mean, to_f32(g)));
    }
};

// h = (1-beta) g, m <- beta m + h, and u = beta m + h with nesterov, else m.
template <class T>
__device__ __forceinline__ void momentum(float* __restrict__ m, const T* __restrict__ g, GradientFactors factors,
                                         float* __restrict__ u, float beta, float complement, u32 nesterov, u64 n) {
    const auto take = [&](u64 i, auto width) {
        constexpr u32 N = decltype(width)::value;
        auto momenta = load<N>(m, i);
        const auto gradients = load<N>(g, i);
        Pack<float, N> updates;
#pragma unroll
        for (u32 k = 0; k < N; ++k) {
            const float h = __fmul_rn(complement, factors.of(gradients.of[k]));
            const float next = __fadd_rn(__fmul_rn(beta, momenta.of[k]), h);
            momenta.of[k] = next;
            updates.of[k] = nesterov ? __fadd_rn(__fmul_rn(beta, next), h) : next;
        }
        store(m, i, momenta);
        store(u, i, updates);
    };
    each_pack(n, take, m, g, u);
}

// The scalars of a step.
struct AdamWFactors {
    float beta1, complement1, correction1, beta2, complement2, correction2, keep, lr, eps;
};

template <class T>
__device__ __forceinline__ void adamw(float* __restrict__ p, float* __restrict__ m, float* __restrict__ v,
                                      const T* __restrict__ g, GradientFactors factors, const AdamWFactors& a, u64 n) {
    const auto take = [&](u64 i, auto width) {
        constexpr u32 N = decltype(width)::value;
        auto weights = load<N>(p, i);
        auto firsts = load<N>(m, i), seconds = load<N>(v, i);
        const auto gradients = load<N>(g, i);
#pragma unroll
        for (u32 k = 0; k < N; ++k) {
            const float gradient = factors.of(gradients.of[k]);
            const float first = __fadd_rn(__fmul_rn(a.beta1, firsts.of[k]), __fmul_rn(a.complement1, gradient));
            const float second = __fadd_rn(__fmul_rn(a.beta2, seconds.of[k]),
                                           __fmul_rn(a.complement2, __fmul_rn(gradient, gradient)));
            const float root = __fadd_rn(__fsqrt_rn(__fdiv_rn(second, a.correction2)), a.eps);
            const float update = __fdiv_rn(__fdiv_rn(first, a.correction1), root);
            firsts.of[k] = first;
            seconds.of[k] = second;
            weights.of[k] = __fsub_rn(__fmul_rn(a.keep, weights.of[k]), __fmul_rn(a.lr, update));
        }
        store(m, i, firsts);
        store(v, i, seconds);
        store(p, i, weights);
    };
    each_pack(n, take, p, m, v, g);
}

// s <- s + factor x.
template <class T>
__device__ __forceinline__ void accumulate(float* __restrict__ s, const T* __restrict__ x, float factor, u64 n) {
    const auto take = [&](u64 i, auto width) {
        constexpr u32 N = decltype(width)::value;
        auto sums = load<N>(s, i);
        const auto values = load<N>(x, i);
#pragma unroll
        for (u32 k = 0; k < N; ++k) sums.of[k] = __fadd_rn(sums.of[k], __fmul_rn(factor, to_f32(values.of[k])));
        store(s, i, sums);
    };
    each_pack(n, take, s, x);
}

// Of many tensors, p <- keep p - step o, with a step for each. A block updates one chunk of one tensor.
template <class T>
__device__ __forceinline__ void apply(const Addresses& weights, const Addresses& updates, const Scalars& steps,
                                      float keep, const Chunks& chunks) {
    const Chunk chunk(chunks);
    float* __restrict__ p = chunk.of<float>(weights);
    const T* __restrict__ o = chunk.of<T>(updates);
    const float s = steps.of[chunk.tensor];
    const auto take = [&](u32 i, auto width) {
        constexpr u32 N = decltype(width)::value;
        auto values = load<N>(p, i);
        const auto update = load<N>(o, i);
#pragma unroll
        for (u32 k = 0; k < N; ++k) {
            values.of[k] = __fsub_rn(__fmul_rn(keep, values.of[k]), __fmul_rn(s, to_f32(update.of[k])));
        }
        store(p, i, values);
    };
    chunk.each<4>(take, p, o);
}

#define FOR_DTYPE(T, suffix)                                                                                           \
    extern "C" __global__ void momentum_##suffix(float* __restrict__ m, const T* __restrict__ g, GradientFactors factors,      \
                                                 float* __restrict__ u, float beta, float complement, u32 nesterov,    \
                                                 u64 n) {                                                              \
        momentum(m, g, factors, u, beta, complement, nesterov, n);                                                     \
    }                                                                                                                  \
    extern "C" __global__ void adamw_##suffix(float* __restrict__ p, float* __restrict__ m, float* __restrict__ v,     \
                                              const T* __restrict__ g, GradientFactors factors, AdamWFactors scalars, u64 n) {        \
        adamw(p, m, v, g, factors, scalars, n);                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void accumulate_##suffix(float* __restrict__ s, const T* __restrict__ x, float factor,       \
                                                   u64 n) {                                                            \
        accumulate(s, x, factor, n);                                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        apply_##suffix(const __grid_constant__ Addresses weights, const __grid_constant__ Addresses updates,           \
                       const __grid_constant__ Scalars steps, float keep, const __grid_constant__ Chunks chunks) {     \
        apply<T>(weights, updates, steps, keep, chunks);                                                               \
    }
FOR_DTYPE(float, f32)
FOR_DTYPE(__half, f16)
FOR_DTYPE(__nv_bfloat16, bf16)
