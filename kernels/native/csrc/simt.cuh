// Makes the same source compile for the GPU (nvcc) and for the host. On the host each thread of a block is a real
// thread, __syncthreads() is a barrier, shared memory is static, and blocks run one at a time. ASan finds wrong
// addresses there, and TSan missing barriers.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
using half_t = __half;
using bf16_t = __nv_bfloat16;
struct fp8_t {
  uint8_t bits;
};
#define ACCEL_SHARED __shared__
#define ACCEL_DEVICE __device__ __forceinline__
ACCEL_DEVICE float widen(float x) { return x; }
ACCEL_DEVICE float widen(half_t x) { return __half2float(x); }
ACCEL_DEVICE float widen(bf16_t x) { return __bfloat162float(x); }
ACCEL_DEVICE void narrow(float x, float* out) { *out = x; }
ACCEL_DEVICE void narrow(float x, half_t* out) { *out = __float2half_rn(x); }
ACCEL_DEVICE void narrow(float x, bf16_t* out) { *out = __float2bfloat16_rn(x); }
// Rounds to float8 e4m3fn, to nearest even. Values larger than 448 saturate, and NaN stays NaN.
ACCEL_DEVICE fp8_t to_fp8(float x) { return fp8_t{__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)}; }
ACCEL_DEVICE float divide(float x, float y) { return __fdiv_rn(x, y); }
// Returns the larger of x and 0. NaN stays NaN, while fmaxf would return 0.
ACCEL_DEVICE float relu(float x) {
  float found;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(found) : "f"(x));
  return found;
}
// 2^x and 1 / x without the handling of numbers below 2^-126, which become 0. An exact quotient is a function call, and
// a call in an epilogue makes ptxas serialize every wgmma.
ACCEL_DEVICE float quick_exp2(float x) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}
ACCEL_DEVICE float quick_reciprocal(float x) {
  float found;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}
#else
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>
#define __global__
#define ACCEL_SHARED static
#define ACCEL_DEVICE inline
using half_t = _Float16;
struct bf16_t {
  uint16_t bits;
};
struct fp8_t {
  uint8_t bits;
};
struct dim3 {
  unsigned x, y, z;
};
inline thread_local dim3 threadIdx{}, blockIdx{};
inline dim3 blockDim{}, gridDim{};
inline std::barrier<>* block_barrier = nullptr;
inline void __syncthreads() { block_barrier->arrive_and_wait(); }

inline float widen(float x) { return x; }
inline float widen(half_t x) { return static_cast<float>(x); }
inline float widen(bf16_t x) {
  uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, half_t* out) { *out = static_cast<half_t>(x); }
inline void narrow(float x, bf16_t* out) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  // Rounds to nearest even. NaN stays NaN.
  out->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}
inline fp8_t to_fp8(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fabs(x);
  if (x != x) return {static_cast<uint8_t>(sign | 0x7f)};
  if (magnitude >= 448.0f) return {static_cast<uint8_t>(sign | 0x7e)};
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  // Three bits after the leading 1. Below 2^-6 the numbers are multiples of 2^-9.
  exponent = magnitude < 0.015625f ? -6 : exponent - 1;
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  // A mantissa that rounds up to 16 carries into the exponent.
  return {static_cast<uint8_t>(sign | (((exponent + 6) << 3) + steps))};
}
inline float divide(float x, float y) { return x / y; }
inline float relu(float x) { return x < 0.0f ? 0.0f : x; }
inline float quick_exp2(float x) { return std::exp2(x); }
inline float quick_reciprocal(float x) { return 1.0f / x; }

template <class Kernel, class... Arguments>
void launch_on_host(unsigned blocks, unsigned threads, Kernel kernel, Arguments... arguments) {
  gridDim = {blocks, 1, 1};
  blockDim = {threads, 1, 1};
  for (unsigned block = 0; block < blocks; ++block) {
    std::barrier<> barrier(threads);
    block_barrier = &barrier;
    std::vector<std::thread> running;
    for (unsigned thread = 0; thread < threads; ++thread)
      running.emplace_back([=] {
        blockIdx = {block, 0, 0};
        threadIdx = {thread, 0, 0};
        kernel(arguments...);
      });
    for (auto& one : running) one.join();
  }
}
#endif
