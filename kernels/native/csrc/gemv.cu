// The product for a small M: one block for each column of the output reads its row of b once and keeps up to 16 sums.
#include "activate.cuh"
#include "launch.cuh"

constexpr int kMaxRows = 16;

template <class T>
__global__ void gemv_kernel(const T* a, const T* b, T* out, const float* bias, const T* residual,
                            const float* row_scale, const float* col_scale, int act, int m, int64_t n, int64_t k) {
  ACCEL_SHARED float scratch[kThreads];
  const int64_t column = blockIdx.x;
  float sums[kMaxRows];
#pragma unroll
  for (int row = 0; row < kMaxRows; ++row) sums[row] = 0.0f;
  for (int64_t i = threadIdx.x; i < k; i += kThreads) {
    float y = widen(b[column * k + i]);
#pragma unroll
    for (int row = 0; row < kMaxRows; ++row)
      if (row < m) sums[row] += widen(a[row * k + i]) * y;
  }
#pragma unroll
  for (int row = 0; row < kMaxRows; ++row) {
    if (row >= m) continue;
    float x = across_block<true>(sums[row], scratch);
    if (threadIdx.x != 0) continue;
    if (row_scale) x *= row_scale[row];
    if (col_scale) x *= col_scale[column];
    if (bias) x += bias[column];
    x = activate(x, act);
    if (residual) x += widen(residual[row * n + column]);
    narrow(x, out + row * n + column);
  }
}

template <class T>
int run(const void* a, const void* b, void* out, const float* bias, const void* residual, const float* row_scale,
        const float* col_scale, int act, int64_t m, int64_t n, int64_t k, void* stream) {
  return launch(static_cast<unsigned>(n), stream, gemv_kernel<T>, static_cast<const T*>(a), static_cast<const T*>(b),
                static_cast<T*>(out), bias, static_cast<const T*>(residual), row_scale, col_scale, act,
                static_cast<int>(m), n, k);
}

extern "C" int accel_gemv(const void* a, const void* b, void* out, const float* bias, const void* residual,
                          const float* row_scale, const float* col_scale, int dtype, int act, int64_t m, int64_t n,
                          int64_t k, void* stream) {
  if (!a || !b || !out) return ACCEL_NULL_POINTER;
  if (m < 1 || m > kMaxRows || n < 1 || n > kMaxBlocks || k < 1) return ACCEL_BAD_SIZE;
  if (act < ACCEL_NONE || act > ACCEL_SILU) return ACCEL_BAD_ACT;
  auto* chosen = dtype == ACCEL_FP32 ? run<float> : dtype == ACCEL_FP16 ? run<half_t> : run<bf16_t>;
  if (dtype < ACCEL_FP32 || dtype > ACCEL_BF16) return ACCEL_BAD_DTYPE;
  return chosen(a, b, out, bias, residual, row_scale, col_scale, act, m, n, k, stream);
}
