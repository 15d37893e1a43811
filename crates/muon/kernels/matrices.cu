// What Newton-Schulz needs around its products: normalization into a stack, the way back, symmetry, and a diagonal.
#include "numbers.cuh"

// As src/cuda/matrices.rs has them.
constexpr u32 MATRICES = 128;  // of a launch
constexpr u32 TILE = 32;       // a side of a transposed tile
constexpr u32 TILE_ROWS = 8;   // threads are TILE x TILE_ROWS
constexpr u32 FIELDS = 4;      // of a survey

struct Addresses { u64 of[MATRICES]; };

// Divides a matrix by its Frobenius norm as src/normalize.rs does: by an exact power of two near its largest magnitude,
// then by the norm of that. The survey's sum of squares is in f64, which no f32 square leaves: it is scaled afterwards.
struct Normalizer {
    double scale;
    float norm;
    u32 zero, finite;

    __device__ __forceinline__ float operator()(float x) const {
        if (!finite) return __int_as_float(0x7fc00000);
        return zero ? x : __fdiv_rn(__double2float_rn(x * scale), norm);
    }
};

// Made by one thread of a block, from the survey of its matrix.
__device__ __forceinline__ Normalizer normalizer(const double* survey) {
    __shared__ Normalizer made;
    if (threadIdx.x == 0) {
        const double squares = survey[0], largest = survey[3];
        // 2^-e for a magnitude in [2^e, 2^(e+1)): with the exponent's bits, biased by 1023, mirrored.
        const long long biased = __double_as_longlong(largest) >> 52;
        const double scale = __longlong_as_double((2 * 1023 - biased) << 52);
        made = {scale, __double2float_rn(__dsqrt_rn(squares * scale * scale)), largest == 0.0, survey[1] == 0.0};
    }
    __syncthreads();
    return made;
}

// The square tiles of a rows x cols matrix, read in its order and written in that of its transpose.
template <class In, class Out, class F>
__device__ __forceinline__ void transpose(const In* __restrict__ in, Out* __restrict__ out, u32 rows, u32 cols, F f) {
    __shared__ Out tile[TILE][TILE + 1];
    const u32 tiles_across = (cols + TILE - 1) / TILE;
    const u32 row0 = blockIdx.x / tiles_across * TILE, col0 = blockIdx.x % tiles_across * TILE;
    const u32 x = threadIdx.x % TILE;
    for (u32 y = threadIdx.x / TILE; y < TILE; y += TILE_ROWS) {
        const u32 row = row0 + y, col = col0 + x;
        if (row < rows && col < cols) tile[y][x] = f(in[static_cast<u64>(row) * cols + col]);
    }
    __syncthreads();
    for (u32 y = threadIdx.x / TILE; y < TILE; y += TILE_ROWS) {
        const u32 row = row0 + x, col = col0 + y;
        if (row < rows && col < cols) out[static_cast<u64>(col) * rows + row] = tile[x][y];
    }
}

// Matrices rows x cols, each at an address of its own, become a stack; blockIdx.y is the matrix.
template <class Out>
__device__ __forceinline__ void normalize(const Addresses& from, const double* surveys, Out* __restrict__ stack,
                                          u64 elements) {
    const Normalizer f = normalizer(surveys + FIELDS * blockIdx.y);
    const float* __restrict__ in = reinterpret_cast<const float*>(from.of[blockIdx.y]);
    Out* __restrict__ out = stack + elements * blockIdx.y;
    each(elements, [&](u64 i) { out[i] = from_f32<Out>(f(in[i])); });
}

// The same, each matrix turned over to cols x rows.
template <class Out>
__device__ __forceinline__ void normalize_transposed(const Addresses& from, const double* surveys,
                                                     Out* __restrict__ stack, u32 rows, u32 cols) {
    const Normalizer f = normalizer(surveys + FIELDS * blockIdx.y);
    const float* in = reinterpret_cast<const float*>(from.of[blockIdx.y]);
    Out* out = stack + static_cast<u64>(rows) * cols * blockIdx.y;
    transpose(in, out, rows, cols, [&](float x) { return from_f32<Out>(f(x)); });
}

// A stack of rows x cols matrices, each turned over to cols x rows in f32.
template <class In>
__device__ __forceinline__ void widen_transposed(const In* in, float* out, u32 rows, u32 cols) {
    const u64 matrix = static_cast<u64>(rows) * cols * blockIdx.y;
    transpose(in + matrix, out + matrix, rows, cols, [](In x) { return to_f32(x); });
}

// The tiles of n x n matrices above the diagonal become the transposes of those below; blockIdx.y is the matrix.
template <class T> __device__ __forceinline__ void mirror(T* stack, u32 n) {
    __shared__ T tile[TILE][TILE + 1];
    const u32 tiles_across = (n + TILE - 1) / TILE;
    const u32 row0 = blockIdx.x / tiles_across * TILE, col0 = blockIdx.x % tiles_across * TILE;
    if (col0 > row0) return;
    T* matrix = stack + static_cast<u64>(n) * n * blockIdx.y;
    const u32 x = threadIdx.x % TILE;
    for (u32 y = threadIdx.x / TILE; y < TILE; y += TILE_ROWS) {
        const u32 row = row0 + y, col = col0 + x;
        if (row < n && col < n) tile[y][x] = matrix[static_cast<u64>(row) * n + col];
    }
    __syncthreads();
    for (u32 y = threadIdx.x / TILE; y < TILE; y += TILE_ROWS) {
        const u32 row = col0 + y, col = row0 + x;
        if (row < col && col < n) matrix[static_cast<u64>(row) * n + col] = tile[x][y];
    }
}

// z <- z + a I on a stack of n x n matrices, rounded to its dtype once.
template <class T> __device__ __forceinline__ void add_to_diagonal(T* z, float a, u32 n, u64 rows) {
    each(rows, [&](u64 row) {
        T* diagonal = z + row * n + row % n;
        *diagonal = from_f32<T>(__fadd_rn(to_f32(*diagonal), a));
    });
}

#define FOR_DTYPE(T, suffix)                                                                                      \
    extern "C" __global__ void normalize_##suffix(const __grid_constant__ Addresses from, const double* surveys, \
                                                  T* stack, u64 elements) {                                      \
        normalize(from, surveys, stack, elements);                                                               \
    }                                                                                                            \
    extern "C" __global__ void normalize_transposed_##suffix(const __grid_constant__ Addresses from,             \
                                                             const double* surveys, T* stack, u32 rows,          \
                                                             u32 cols) {                                         \
        normalize_transposed(from, surveys, stack, rows, cols);                                                  \
    }                                                                                                            \
    extern "C" __global__ void widen_transposed_##suffix(const T* in, float* out, u32 rows, u32 cols) {          \
        widen_transposed(in, out, rows, cols);                                                                   \
    }                                                                                                            \
    extern "C" __global__ void mirror_##suffix(T* stack, u32 n) { mirror(stack, n); }                              \
    extern "C" __global__ void add_to_diagonal_##suffix(T* z, float a, u32 n, u64 rows) {                        \
        add_to_diagonal(z, a, n, rows);                                                                          \
    }
FOR_DTYPE(float, f32)
FOR_DTYPE(__half, f16)
FOR_DTYPE(__nv_bfloat16, bf16)
