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

// sum · 4^exponent. The exponent of elements is between the two below, so that 2^-exponent, 16 times that,
// and the squares that count are normal numbers; that of a zero sum is `kNoExponent`.
struct Squares {
  int exponent;
  float sum;
};
constexpr int kLeastExponent = -120, kMostExponent = 126;

__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// Its sum for another exponent that is not less. By more than 100 the term is lost anyway.
__device__ __forceinline__ float with_exponent(Squares x, int exponent) {
  const float power = power_of_two(max(x.exponent - exponent, -100));
  return x.sum * power * power;
}

__device__ __forceinline__ Squares operator+(Squares a, Squares b) {
  const int exponent = max(a.exponent, b.exponent);
  return {exponent, with_exponent(a, exponent) + with_exponent(b, exponent)};
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
  // Clamped, it is right for zero, subnormal and infinite ones too.
  const int of_largest = (__float_as_int(largest) >> 23) - 127;
  const int exponent = min(max(of_largest, kLeastExponent), kMostExponent);
  const float power = power_of_two(-exponent);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float scaled = vectors[i][j] * power;
      sum = fmaf(scaled, scaled, sum);
    }
  }
  return {largest > 0 ? exponent : kNoExponent, isfinite(sum) ? sum : NAN};
}

// The sum over the block's threads, in all of them.
__device__ __forceinline__ Squares sum_over_block(Squares mine) {
  constexpr int kWarps = kThreads / 32;
  __shared__ Squares of_warps[kWarps];
  const int exponent = __reduce_max_sync(~0u, mine.exponent);
  float sum = with_exponent(mine, exponent);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = {exponent, sum};
  __syncthreads();
  Squares total{kNoExponent, 0};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    total.exponent = max(total.exponent, of_warps[warp].exponent);
  }
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    total.sum += with_exponent(of_warps[warp], total.exponent);
  }
  return total;
}

// In the first block of a matrix: sets the counts that its products take from.
__device__ __forceinline__ void set_counts(uint32_t* left, const uint32_t* all, int products) {
  if (blockIdx.x > 0) return;
  const int64_t of_matrix = int64_t{blockIdx.y} * products;
  for (int i = threadIdx.x; i < products; i += kThreads) left[of_matrix + i] = all[of_matrix + i];
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
  const Squares total = sum_over_block(mine);
  if (threadIdx.x == 0) parts[blockIdx.y * gridDim.x + blockIdx.x] = total;
  set_counts(left, all, products);
}

constexpr float kScale = 16;  // of X while it is iterated

// x ↦ kScale (x / 2^e) / norm
struct Normalizer {
  float factor, norm, reciprocal;

  __device__ explicit Normalizer(Squares total) {
    factor = kScale * power_of_two(total.exponent == kNoExponent ? 0 : -total.exponent);
    norm = total.sum == 0 ? 1.0f : sqrtf(total.sum);
    reciprocal = 1.0f / norm;
  }
  // The division is rounded once (Markstein), where nothing over- or underflows: the norm is from 2^-30
  // to 2^20; a quotient whose remainder is lost is below 2^-100, which is zero in f16 and of no account in
  // bf16.
  __device__ __forceinline__ float operator()(float x) const {
    const float scaled = x * factor, q = scaled * reciprocal;
    return fmaf(fmaf(-q, norm, scaled), reciprocal, q);
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

// The sum of so many parts of a matrix, over the threads of a block.
template <class PartAt>
__device__ __forceinline__ Squares sum_of_parts(int count, const PartAt& part_at) {
  Squares mine{kNoExponent, 0};
#pragma unroll
  for (int i = 0; i < kMaxParts / kThreads; ++i) {
    const int part = i * kThreads + threadIdx.x;
    if (part < count) mine = mine + part_at(part);
  }
  return sum_over_block(mine);
}

// That of the parts that `measure` stored.
__device__ __forceinline__ Squares sum_of_measured(const Squares* parts, int parts_of_matrix,
                                                   int index) {
  const Squares* of_matrix = parts + index * parts_of_matrix;
  return sum_of_parts(parts_of_matrix, [&](int part) { return of_matrix[part]; });
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
  const Normalizer normalized(sum_of_measured(parts, parts_of_matrix, index));
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

// A block's part of a sum as others wait for it, in one word with the number of its launch: whoever sees the
// number sees the part, without a fence. Zero at first.
struct Published {
  uint64_t word;

  static __device__ __forceinline__ Published load(const Published* from) {
    Published loaded;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(loaded.word) : "l"(from) : "memory");
    return loaded;
  }
  __device__ __forceinline__ uint16_t launch() const { return word >> 48; }
  __device__ __forceinline__ Squares part() const {
    return {static_cast<int16_t>(word >> 32), __uint_as_float(static_cast<uint32_t>(word))};
  }
  static __device__ __forceinline__ void store(Published* to, uint16_t launch, Squares part) {
    const uint64_t exponent = static_cast<uint16_t>(part.exponent);
    const uint64_t word = uint64_t{launch} << 48 | exponent << 32 | __float_as_uint(part.sum);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
  }
};

// Grid, at once: as that of `measure`, so that sums are the same, with at most 8 vectors a thread. Of
// matrices at multiples of 16 bytes, without padding.
template <class T, class U>
__device__ __forceinline__ void normalize(const Addresses& from, U* out, Published* published,
                                          int64_t elements, uint32_t* left, const uint32_t* all,
                                          int products) {
  const T* matrix = reinterpret_cast<const T*>(from.of[blockIdx.y]);
  U* to = out + int64_t{blockIdx.y} * elements;
  Published* parts = published + blockIdx.y * gridDim.x;
  const int64_t stride = int64_t{gridDim.x} * kThreads * kVector;
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  Vector<T> vectors[kMeasured];
  take_turn();
#pragma unroll
  for (int j = 0; j < kMeasured; ++j) {
    const int64_t i = first + j * stride;
    vectors[j].load(matrix + i, i < elements);
  }
  // All parts of a matrix are published as often as this one, since a launch takes all blocks of its matrices.
  const uint16_t launch = Published::load(parts + blockIdx.x).launch() + 1;
  const Squares part = sum_over_block(squares(vectors));
  if (threadIdx.x == 0) Published::store(parts + blockIdx.x, launch, part);
  set_counts(left, all, products);
  __syncthreads();  // the warps' sums have been read
  const Normalizer normalized(sum_of_parts(gridDim.x, [&](int part) {
    Published published = Published::load(parts + part);
    while (published.launch() != launch) published = Published::load(parts + part);
    return published.part();
  }));
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
  const Normalizer normalized(sum_of_measured(parts, parts_of_matrix, blockIdx.y));

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
      name(const __grid_constant__ Addresses from, out_type* __restrict__ out,                 \
           Published* published, int64_t elements, uint32_t* __restrict__ left,                \
           const uint32_t* __restrict__ all, int products) {                                   \
    normalize<type>(from, out, published, elements, left, all, products);                      \
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
