// The element-wise steps of the optimizers. Each operation is rounded by itself, in the order of the formulas in
// src/elementwise.rs, so that elements have the bits of the CPU: the intrinsics keep the compiler from contracting a
// product and a sum.
#include "numbers.cuh"

// What a gradient is multiplied with, one after the other.
struct Factors {
    float mean, clip;
    __device__ __forceinline__ float of(float g) const { return __fmul_rn(clip, __fmul_rn(mean, g)); }
};

// h = (1-beta) g, m <- beta m + h, and u = beta m + h with nesterov, else m.
extern "C" __global__ void momentum(float* __restrict__ m, const float* __restrict__ g, Factors factors,
                                    float* __restrict__ u, float beta, float complement, u32 nesterov, u64 n) {
    each(n, [&](u64 i) {
        const float h = __fmul_rn(complement, factors.of(g[i]));
        const float next = __fadd_rn(__fmul_rn(beta, m[i]), h);
        m[i] = next;
        u[i] = nesterov ? __fadd_rn(__fmul_rn(beta, next), h) : next;
    });
}

// p <- keep p - step o.
template <class T>
__device__ __forceinline__ void apply(float* __restrict__ p, const T* __restrict__ o, float keep, float step, u64 n) {
    each(n, [&](u64 i) { p[i] = __fsub_rn(__fmul_rn(keep, p[i]), __fmul_rn(step, to_f32(o[i]))); });
}

extern "C" __global__ void adamw(float* __restrict__ p, float* __restrict__ m, float* __restrict__ v,
                                 const float* __restrict__ g, Factors factors, float beta1, float complement1,
                                 float correction1, float beta2, float complement2, float correction2, float keep,
                                 float lr, float eps, u64 n) {
    each(n, [&](u64 i) {
        const float gradient = factors.of(g[i]);
        const float first = __fadd_rn(__fmul_rn(beta1, m[i]), __fmul_rn(complement1, gradient));
        const float second =
            __fadd_rn(__fmul_rn(beta2, v[i]), __fmul_rn(complement2, __fmul_rn(gradient, gradient)));
        const float root = __fadd_rn(__fsqrt_rn(__fdiv_rn(second, correction2)), eps);
        const float update = __fdiv_rn(__fdiv_rn(first, correction1), root);
        m[i] = first;
        v[i] = second;
        p[i] = __fsub_rn(__fmul_rn(keep, p[i]), __fmul_rn(lr, update));
    });
}

// s <- s + factor x.
template <class T>
__device__ __forceinline__ void accumulate(float* __restrict__ s, const T* __restrict__ x, float factor, u64 n) {
    each(n, [&](u64 i) { s[i] = __fadd_rn(s[i], __fmul_rn(factor, to_f32(x[i]))); });
}

#define FOR_DTYPE(T, suffix)                                                                                  \
    extern "C" __global__ void accumulate_##suffix(float* __restrict__ s, const T* __restrict__ x, float factor, \
                                                   u64 n) {                                                      \
        accumulate(s, x, factor, n);                                                                             \
    }                                                                                                            \
    extern "C" __global__ void apply_##suffix(float* __restrict__ p, const T* __restrict__ o, float keep,        \
                                              float step, u64 n) {                                               \
        apply(p, o, keep, step, n);                                                                              \
    }
FOR_DTYPE(float, f32)
FOR_DTYPE(__half, f16)
FOR_DTYPE(__nv_bfloat16, bf16)
