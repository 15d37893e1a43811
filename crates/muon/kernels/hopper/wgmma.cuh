// Warpgroup products: D (64 × N, f32, in registers) += A (64 × 16) · B (16 × N), both from shared
// memory in the 128-byte swizzle.
//
// Thread t of the warpgroup, lane l = t % 32, holds of D: d[4 b + {0, 1}] = row 16 (t / 32) + l / 4,
// columns 8 b + 2 (l % 4) + {0, 1}; d[4 b + {2, 3}] = the same, 8 rows lower.
#pragma once

#include <type_traits>

#include "hopper.cuh"

namespace hopper {

// Orders earlier accesses to the accumulators before the products that follow.
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` of the committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of the accumulators across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;

// Describes an operand in blocks of 64 × 64 whose rows are 128 bytes, in groups of 8 rows (1024 bytes):
// the 16-byte unit u of a row lies at 128 row + 16 (u ^ row % 8). K, the index that is summed, runs
// along the rows, or down the columns; then what is more than 64 of the other index lies in further
// blocks, 8192 bytes apart.
template <bool kDown>
__device__ __forceinline__ uint64_t describe(uint32_t address) {
  constexpr uint64_t kBetweenGroups = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kBetweenBlocks = uint64_t{kDown ? 8192 >> 4 : 1} << 16;
  return kSwizzle128 | kBetweenGroups | kBetweenBlocks | (address & 0x3FFFF) >> 4;
}

// How much further the next 16 of K are, in what is added to a description.
template <bool kDown>
__device__ __forceinline__ constexpr uint64_t step_of_k() {
  return (kDown ? 16 * 128 : 16 * 2) >> 4;
}

#define HOPPER_D8(o)                                                            \
  "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]),   \
      "+f"(d[o + 5]), "+f"(d[o + 6]), "+f"(d[o + 7])
#define HOPPER_D32(o) HOPPER_D8(o), HOPPER_D8(o + 8), HOPPER_D8(o + 16), HOPPER_D8(o + 24)
#define HOPPER_D64(o) HOPPER_D32(o), HOPPER_D32(o + 32)
#define HOPPER_D80(o) HOPPER_D64(o), HOPPER_D8(o + 64), HOPPER_D8(o + 72)
#define HOPPER_D96(o) HOPPER_D64(o), HOPPER_D32(o + 64)
#define HOPPER_D128(o) HOPPER_D64(o), HOPPER_D64(o + 64)
#define HOPPER_LIST32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, " \
  "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define HOPPER_LIST64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, " \
  "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
  "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
  "%60, %61, %62, %63"
#define HOPPER_LIST80 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, " \
  "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
  "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
  "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define HOPPER_LIST96 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, " \
  "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
  "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
  "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HOPPER_LIST128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, " \
  "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
  "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
  "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, " \
  "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"

#define HOPPER_PRODUCT(n, type, list, registers, operands)                               \
  asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                           \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" list \
               "}, " operands ";\n}"                                                   \
               : registers                                                             \
               : "l"(a), "l"(b), "n"(int{kADown}), "n"(int{kBDown}))

#define HOPPER_PRODUCT_OF(n, list, registers, operands)            \
  if constexpr (std::is_same_v<T, __half>) {                     \
    HOPPER_PRODUCT(n, "f16", list, registers(0), operands);      \
  } else {                                                       \
    HOPPER_PRODUCT(n, "bf16", list, registers(0), operands);     \
  }

// D += A · B; `kCount` is N / 2. K runs along the rows of A or down its columns, and so for B.
template <class T, bool kADown, bool kBDown, int kCount>
__device__ __forceinline__ void multiply(float (&d)[kCount], uint64_t a, uint64_t b) {
  if constexpr (kCount == 32) {
    HOPPER_PRODUCT_OF(64, HOPPER_LIST32, HOPPER_D32, "%32, %33, add, 1, 1, %34, %35")
  } else if constexpr (kCount == 64) {
    HOPPER_PRODUCT_OF(128, HOPPER_LIST64, HOPPER_D64, "%64, %65, add, 1, 1, %66, %67")
  } else if constexpr (kCount == 80) {
    HOPPER_PRODUCT_OF(160, HOPPER_LIST80, HOPPER_D80, "%80, %81, add, 1, 1, %82, %83")
  } else if constexpr (kCount == 96) {
    HOPPER_PRODUCT_OF(192, HOPPER_LIST96, HOPPER_D96, "%96, %97, add, 1, 1, %98, %99")
  } else {
    static_assert(kCount == 128);
    HOPPER_PRODUCT_OF(256, HOPPER_LIST128, HOPPER_D128, "%128, %129, add, 1, 1, %130, %131")
  }
}

#undef HOPPER_PRODUCT_OF
#undef HOPPER_PRODUCT
#undef HOPPER_LIST32
#undef HOPPER_LIST64
#undef HOPPER_LIST80
#undef HOPPER_LIST96
#undef HOPPER_LIST128
#undef HOPPER_D8
#undef HOPPER_D32
#undef HOPPER_D64
#undef HOPPER_D80
#undef HOPPER_D96
#undef HOPPER_D128

}  // namespace hopper
