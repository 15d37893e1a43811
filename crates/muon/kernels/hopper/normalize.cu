// Around the products of Newton-Schulz. Before them, each matrix, at an address of its own, is
// divided by its Frobenius norm, at any scale, and rounded into a stack of the iteration's type with
// the pitch that its products need; after them, a stack loses its padding.
//
//   measure:            a part of a matrix a block → e, near log2 of the largest |x|, and
//                       s = sum of (x / 2^e)²; it also sets the counts that products wait for
//   divide:             y = 16 (x / 2^e) / sqrt(s), with e and s of the whole matrix: the scale that
//                       the products reckon with
//   divide_transposed:  the transpose of that, for a matrix with more rows than columns
//   normalize:          measure and divide at once, for matrices that the blocks can hold
//   unpad:              a stack with a pitch → a contiguous one in its type or in f32
//
// All in f32. Powers of two are exact, so neither overflow nor underflow comes in before the last
// rounding. Sums are hierarchical (thread, warp, block, matrix) in an order that depends on the
// shape of the matrix alone. A zero matrix stays zero; one that is not finite becomes NaN.

#include <cfloat>

#include "hopper.cuh"

namespace {

using namespace hopper;

constexpr int kThreads = 256;
constexpr int kVector = 8;          // elements that a thread takes at once
constexpr int kMaxParts = 512;      // of a matrix
constexpr int kInFlight = 4;        // vectors that a thread loads before it divides them
constexpr int kMeasured = 8;        // and before it measures them
constexpr int kNoExponent = -1000;  // of a zero sum
constexpr int kMatrices = 128;      // of a launch

// Where contiguous matrices lie, by value: 1 KiB of a kernel's arguments.
struct Addresses {
  uint64_t of[kMatrices];
};

template <class T>
__device__ __forceinline__ const T* matrix_at(const Addresses& from, int index, bool* aligned) {
  const uint64_t address = from.of[index];
  *aligned = address % 16 == 0;
  return reinterpret_cast<const T*>(address);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Eight elements, kept as they lie in memory until they are used, so that a thread has many loads
// under way at once.
template <class T>
struct Vector {
  static constexpr int kWords = kVector * sizeof(T) / 16;
  union {
    uint4 words[kWords];
    T elements[kVector];
  };

  __device__ Vector() {}
  __device__ __forceinline__ float operator[](int i) const { return to_float(elements[i]); }

  // From an address that is a multiple of 16, or zeros: without a branch.
  __device__ __forceinline__ void load(const T* from, bool is_there) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = make_uint4(0, 0, 0, 0);
      if (is_there) words[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  }
  // From any address, zeros from the `count`-th on.
  __device__ __forceinline__ void load_some(const T* from, int64_t count) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) elements[i] = i < count ? from[i] : T(0.0f);
  }
};

// sum · 4^exponent
struct Squares {
  int exponent;
  float sum;
};

__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// x · 2^exponent, where neither half of the exponent leaves the normal range.
__device__ __forceinline__ float times_power(float x, int exponent) {
  const int half = exponent / 2;
  return x * power_of_two(half) * power_of_two(exponent - half);
}

__device__ __forceinline__ Squares operator+(Squares a, Squares b) {
  if (a.exponent < b.exponent) {
    const Squares swap = a;
    a = b;
    b = swap;
  }
  const int difference = max(b.exponent - a.exponent, -100);  // beyond it the term is lost anyway
  return {a.exponent, a.sum + times_power(b.sum, 2 * difference)};
}

// Of all elements.
template <class T, int kCount>
__device__ __forceinline__ Squares squares(const Vector<T> (&vectors)[kCount]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) largest = fmaxf(largest, fabsf(vectors[i][j]));
  }
  // What is no number is not seen here, but stays in the sum.
  const int exponent = largest > 0 ? ilogbf(fminf(largest, FLT_MAX)) : 0;
  const float half = power_of_two(-exponent / 2), rest = power_of_two(-exponent - -exponent / 2);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float scaled = vectors[i][j] * half * rest;
      sum = fmaf(scaled, scaled, sum);
    }
  }
  return {largest > 0 ? exponent : kNoExponent, isfinite(sum) ? sum : NAN};
}

// The sum over the block's threads, in all of them.
__device__ Squares sum_over_block(Squares mine) {
  __shared__ Squares of_warps[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) {
    mine = mine + Squares{__shfl_xor_sync(~0u, mine.exponent, distance),
                          __shfl_xor_sync(~0u, mine.sum, distance)};
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();
  Squares total = of_warps[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) total = total + of_warps[warp];
  return total;
}

// Stores this block's part of a matrix's sum, and, in its first block, the counts that its products take
// from.
__device__ __forceinline__ void store_part(Squares total, Squares* parts, uint32_t* left,
                                           const uint32_t* all, int products) {
  if (blockIdx.x == 0) {
    const int64_t of_matrix = int64_t{blockIdx.y} * products;
    for (int i = threadIdx.x; i < products; i += kThreads) left[of_matrix + i] = all[of_matrix + i];
  }
  if (threadIdx.x == 0) parts[blockIdx.y * gridDim.x + blockIdx.x] = total;
}

// Grid: (parts of a matrix, at most 512 and chosen by its shape alone; matrices).
template <class T>
__device__ __forceinline__ void measure(const Addresses& from, Squares* parts, int64_t elements,
                                        uint32_t* left, const uint32_t* all, int products) {
  bool aligned;
  const T* matrix = matrix_at<T>(from, blockIdx.y, &aligned);
  const int64_t stride = int64_t{gridDim.x} * kThreads * kVector;
  Squares mine{kNoExponent, 0};
  // At once: the kernel before may still write these matrices, or read the counts that are set here.
  take_turn();
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector; i < elements;
       i += kMeasured * stride) {
    Vector<T> vectors[kMeasured];
#pragma unroll
    for (int j = 0; j < kMeasured; ++j) {
      const bool is_whole = elements - i - j * stride >= kVector;
      vectors[j].load(matrix + i + j * stride, aligned && is_whole);
    }
#pragma unroll
    for (int j = 0; j < kMeasured; ++j) {
      const int64_t count = elements - i - j * stride;
      if (count > 0 && (!aligned || count < kVector)) {
        vectors[j].load_some(matrix + i + j * stride, count);
      }
    }
    mine = mine + squares(vectors);
  }
  store_part(sum_over_block(mine), parts, left, all, products);
}

constexpr float kScale = 16;  // of X while it is iterated

// x ↦ kScale (x / 2^e) / norm
struct Normalizer {
  float half, rest, norm, reciprocal;

  __device__ explicit Normalizer(Squares total) {
    const int exponent = total.sum == 0 ? 0 : -total.exponent;
    half = power_of_two(exponent / 2);
    rest = power_of_two(exponent - exponent / 2);
    norm = total.sum == 0 ? 1.0f : sqrtf(total.sum);
    reciprocal = 1.0f / norm;
  }
  // The division is rounded once (Markstein), where nothing over- or underflows: the norm is from 1
  // to 2^19, and a quotient so small that its remainder is lost is zero in 16 bits.
  __device__ __forceinline__ float operator()(float x) const {
    const float scaled = x * half * rest, q = scaled * reciprocal;
    return kScale * fmaf(fmaf(-q, norm, scaled), reciprocal, q);
  }
};

// Eight elements, divided and rounded to U.
template <class U, class T>
__device__ __forceinline__ uint4 divided(const Vector<T>& x, const Normalizer& normalized) {
  uint4 packed;
  uint32_t* pairs = reinterpret_cast<uint32_t*>(&packed);
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    pairs[i] = pack(normalized(x[2 * i]), normalized(x[2 * i + 1]), U{});
  }
  return packed;
}

// The sum of the parts of a matrix, which other blocks may have written just now.
__device__ __forceinline__ Squares sum_of_parts(const Squares* parts, int parts_of_matrix,
                                                int index) {
  Squares mine{kNoExponent, 0};
#pragma unroll
  for (int i = 0; i < kMaxParts / kThreads; ++i) {
    const int part = i * kThreads + threadIdx.x;
    if (part >= parts_of_matrix) continue;
    const int2 bits = __ldcg(reinterpret_cast<const int2*>(parts) + index * parts_of_matrix + part);
    mine = mine + Squares{bits.x, __int_as_float(bits.y)};
  }
  return sum_over_block(mine);
}

// Grid: (anything, matrices). `pitch` is in elements, a multiple of 8; padding is zeroed. What was
// measured last is divided first: it may be in the L2.
template <class T, class U>
__device__ __forceinline__ void divide(const Addresses& from, U* out, const Squares* parts,
                                       int parts_of_matrix, int rows, int cols, int pitch) {
  const int index = gridDim.y - 1 - blockIdx.y;
  bool aligned;
  const T* matrix = matrix_at<T>(from, index, &aligned);
  // Then rows follow each other without padding.
  const bool whole = aligned && cols % kVector == 0;
  U* to = out + int64_t{index} * rows * pitch;
  const uint32_t vectors_of_row = pitch / kVector;
  const uint32_t vectors = rows * vectors_of_row;  // a matrix has less than 2^34 elements
  const uint32_t stride = gridDim.x * kThreads;
  const uint32_t step = kInFlight * stride;
  uint32_t v = (vectors - 1) / step * step + blockIdx.x * kThreads + threadIdx.x;
  Vector<T> loaded[kInFlight];
  const auto load = [&] {
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const uint32_t at = v + j * stride;
      loaded[j].load(matrix + int64_t{at} * kVector, whole && at < vectors);
    }
  };
  load();  // `measure` lets this start once what went before it has ended, so the matrices are there
  take_turn();
  const Normalizer normalized(sum_of_parts(parts, parts_of_matrix, index));
  while (true) {
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const uint32_t at = v + j * stride;
      if (at >= vectors) continue;
      Vector<T>& x = loaded[j];
      if (!whole) {
        const uint32_t row = at / vectors_of_row;
        const int column = (at - row * vectors_of_row) * kVector;
        x.load_some(matrix + int64_t{row} * cols + column, cols - column);
      }
      // Rows follow each other as vectors do.
      *reinterpret_cast<uint4*>(to + int64_t{at} * kVector) = divided<U>(x, normalized);
    }
    if (v < step) break;
    v -= step;
    load();
  }
}

// Waits for all blocks of a matrix; what they wrote is seen then. `arrived` counts on from launch to
// launch.
__device__ __forceinline__ void wait_for_blocks(unsigned long long* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const unsigned long long mine = atomicAdd(arrived, 1ull);
    wait_for_count(arrived, (mine / gridDim.x + 1) * gridDim.x);
  }
  __syncthreads();
}

// Grid, at once: as that of `measure`, so that sums are the same, with at most 8 vectors a thread. Of
// matrices at multiples of 16 bytes, without padding.
template <class T, class U>
__device__ __forceinline__ void normalize(const Addresses& from, U* out, Squares* parts,
                                          int64_t elements, unsigned long long* arrived,
                                          uint32_t* left, const uint32_t* all, int products) {
  const T* matrix = reinterpret_cast<const T*>(from.of[blockIdx.y]);
  U* to = out + int64_t{blockIdx.y} * elements;
  const int64_t stride = int64_t{gridDim.x} * kThreads * kVector;
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  Vector<T> vectors[kMeasured];
  take_turn();
#pragma unroll
  for (int j = 0; j < kMeasured; ++j) {
    const int64_t i = first + j * stride;
    vectors[j].load(matrix + i, i < elements);
  }
  const Squares total = sum_over_block(Squares{kNoExponent, 0} + squares(vectors));
  store_part(total, parts, left, all, products);
  wait_for_blocks(arrived + blockIdx.y);
  const Normalizer normalized(sum_of_parts(parts, gridDim.x, blockIdx.y));
#pragma unroll
  for (int j = 0; j < kMeasured; ++j) {
    const int64_t i = first + j * stride;
    if (i < elements) *reinterpret_cast<uint4*>(to + i) = divided<U>(vectors[j], normalized);
  }
}

// `divide` with a transposed result, cols × rows, through tiles of 64 × 64. `pitch` is at least
// `rows`.
template <class T, class U>
__device__ __forceinline__ void divide_transposed(const Addresses& from, U* out,
                                                  const Squares* parts, int parts_of_matrix,
                                                  int rows, int cols, int pitch) {
  constexpr int kSide = 64, kPitch = kSide + 2;  // one word more a row keeps columns off one bank
  __shared__ U tile[kSide * kPitch];
  take_turn();
  const Normalizer normalized(sum_of_parts(parts, parts_of_matrix, blockIdx.y));

  bool aligned;
  const T* matrix = matrix_at<T>(from, blockIdx.y, &aligned);
  aligned = aligned && cols % kVector == 0;
  U* to = out + int64_t{blockIdx.y} * cols * pitch;
  const int tiles_across = (cols + kSide - 1) / kSide;
  const int tiles = (pitch + kSide - 1) / kSide * tiles_across;
  for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int row = t / tiles_across * kSide, column = t % tiles_across * kSide;
    __syncthreads();  // the last tile has been read
#pragma unroll
    for (int v = threadIdx.x; v < kSide * kSide / kVector; v += kThreads) {
      const int r = v / (kSide / kVector), c = v % (kSide / kVector) * kVector;
      const T* at = matrix + int64_t{row + r} * cols + column + c;
      const int count = row + r < rows ? cols - column - c : 0;
      Vector<T> x;
      if (aligned && count >= kVector) {
        x.load(at, true);
      } else {
        x.load_some(at, count);
      }
#pragma unroll
      for (int i = 0; i < kVector; i += 2) {
        *reinterpret_cast<uint32_t*>(tile + r * kPitch + c + i) =
            pack(normalized(x[i]), normalized(x[i + 1]), U{});
      }
    }
    __syncthreads();
#pragma unroll
    for (int v = threadIdx.x; v < kSide * kSide / kVector; v += kThreads) {
      const int c = v / (kSide / kVector), r = v % (kSide / kVector) * kVector;
      alignas(16) U along[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) along[i] = tile[(r + i) * kPitch + c];
      if (column + c < cols && row + r < pitch) {
        *reinterpret_cast<uint4*>(to + int64_t{column + c} * pitch + row + r) =
            *reinterpret_cast<uint4*>(along);
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void store_vector(float* to, const Vector<T>& x) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

template <class T, class U>
__device__ __forceinline__ void store_vector(U* to, const Vector<T>& x) {
  uint4 packed;
  uint32_t* pairs = reinterpret_cast<uint32_t*>(&packed);
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) pairs[i] = pack(x[2 * i], x[2 * i + 1], U{});
  *reinterpret_cast<uint4*>(to) = packed;
}

// Grid: (anything, matrices). `stack` has rows of `pitch` elements, a multiple of 8. Every value of
// T is one of U.
template <class T, class U>
__device__ __forceinline__ void unpad(const T* stack, U* out, int rows, int cols, int pitch) {
  take_turn();
  const T* from = stack + int64_t{blockIdx.y} * rows * pitch;
  U* to = out + int64_t{blockIdx.y} * rows * cols;
  const uint32_t vectors_of_row = pitch / kVector;
  const uint32_t vectors = rows * vectors_of_row;
  const bool aligned = cols % kVector == 0;
  const uint32_t stride = gridDim.x * kThreads;
  for (uint32_t v = blockIdx.x * kThreads + threadIdx.x; v < vectors; v += stride) {
    const uint32_t row = v / vectors_of_row;
    const int column = (v - row * vectors_of_row) * kVector;
    Vector<T> x;
    x.load(from + int64_t{v} * kVector, true);
    U* at = to + int64_t{row} * cols + column;
    if (aligned) {
      store_vector(at, x);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (column + i < cols) at[i] = U(x[i]);
      }
    }
  }
}

}  // namespace

#define MEASURE_KERNEL(name, type)                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads, sizeof(type) == 2 ? 3 : 2)            \
      name(const __grid_constant__ Addresses from, Squares* __restrict__ parts,                \
           int64_t elements, uint32_t* __restrict__ left, const uint32_t* __restrict__ all,    \
           int products) {                                                                     \
    measure<type>(from, parts, elements, left, all, products);                                 \
  }
#define DIVIDE_KERNEL(name, type, out_type)                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads)                                       \
      name(const __grid_constant__ Addresses from, out_type* __restrict__ out,                 \
           const Squares* parts, int parts_of_matrix, int rows, int cols, int pitch) {         \
    divide<type>(from, out, parts, parts_of_matrix, rows, cols, pitch);                        \
  }
#define DIVIDE_TRANSPOSED_KERNEL(name, type, out_type)                                         \
  extern "C" __global__ void __launch_bounds__(kThreads)                                       \
      name(const __grid_constant__ Addresses from, out_type* __restrict__ out,                 \
           const Squares* parts, int parts_of_matrix, int rows, int cols, int pitch) {         \
    divide_transposed<type>(from, out, parts, parts_of_matrix, rows, cols, pitch);             \
  }
#define NORMALIZE_KERNEL(name, type, out_type)                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                    \
      name(const __grid_constant__ Addresses from, out_type* __restrict__ out, Squares* parts, \
           int64_t elements, unsigned long long* arrived, uint32_t* __restrict__ left,         \
           const uint32_t* __restrict__ all, int products) {                                   \
    normalize<type>(from, out, parts, elements, arrived, left, all, products);                 \
  }
#define UNPAD_KERNEL(name, type, out_type)                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads)                                       \
      name(const type* __restrict__ stack, out_type* __restrict__ out, int rows, int cols,     \
           int pitch) {                                                                        \
    unpad(stack, out, rows, cols, pitch);                                                      \
  }

MEASURE_KERNEL(newton_schulz_measure_f32, float)
MEASURE_KERNEL(newton_schulz_measure_f16, __half)
MEASURE_KERNEL(newton_schulz_measure_bf16, __nv_bfloat16)
DIVIDE_KERNEL(newton_schulz_divide_f32_f16, float, __half)
DIVIDE_KERNEL(newton_schulz_divide_f16_f16, __half, __half)
DIVIDE_KERNEL(newton_schulz_divide_bf16_f16, __nv_bfloat16, __half)
DIVIDE_KERNEL(newton_schulz_divide_f32_bf16, float, __nv_bfloat16)
DIVIDE_KERNEL(newton_schulz_divide_f16_bf16, __half, __nv_bfloat16)
DIVIDE_KERNEL(newton_schulz_divide_bf16_bf16, __nv_bfloat16, __nv_bfloat16)
DIVIDE_TRANSPOSED_KERNEL(newton_schulz_divide_transposed_f32_f16, float, __half)
DIVIDE_TRANSPOSED_KERNEL(newton_schulz_divide_transposed_f16_f16, __half, __half)
DIVIDE_TRANSPOSED_KERNEL(newton_schulz_divide_transposed_bf16_f16, __nv_bfloat16, __half)
DIVIDE_TRANSPOSED_KERNEL(newton_schulz_divide_transposed_f32_bf16, float, __nv_bfloat16)
DIVIDE_TRANSPOSED_KERNEL(newton_schulz_divide_transposed_f16_bf16, __half, __nv_bfloat16)
DIVIDE_TRANSPOSED_KERNEL(newton_schulz_divide_transposed_bf16_bf16, __nv_bfloat16, __nv_bfloat16)
NORMALIZE_KERNEL(newton_schulz_normalize_f32_f16, float, __half)
NORMALIZE_KERNEL(newton_schulz_normalize_f16_f16, __half, __half)
NORMALIZE_KERNEL(newton_schulz_normalize_bf16_f16, __nv_bfloat16, __half)
NORMALIZE_KERNEL(newton_schulz_normalize_f32_bf16, float, __nv_bfloat16)
NORMALIZE_KERNEL(newton_schulz_normalize_f16_bf16, __half, __nv_bfloat16)
NORMALIZE_KERNEL(newton_schulz_normalize_bf16_bf16, __nv_bfloat16, __nv_bfloat16)
UNPAD_KERNEL(newton_schulz_unpad_f16_f32, __half, float)
UNPAD_KERNEL(newton_schulz_unpad_bf16_f32, __nv_bfloat16, float)
UNPAD_KERNEL(newton_schulz_unpad_f16_f16, __half, __half)
UNPAD_KERNEL(newton_schulz_unpad_bf16_bf16, __nv_bfloat16, __nv_bfloat16)
