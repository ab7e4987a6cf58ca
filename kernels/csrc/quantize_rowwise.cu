// One block a row: its largest magnitude, then its quotients. The arithmetic is that of quantize_rowwise_torch.
#include "launch.cuh"

template <class In>
__global__ void quantize_kernel(const In* x, int8_t* q, float* scales, int64_t columns, int64_t row_stride) {
  ACCEL_SHARED float scratch[kThreads];
  const int64_t row = blockIdx.x;
  float largest = 0.0f;
  for (int64_t k = threadIdx.x; k < columns; k += kThreads) {
    float v = fabsf(widen(x[row * row_stride + k]));
    if (v > largest || v != v) largest = v;  // a NaN stays: nothing is larger than it
  }
  largest = across_block<false>(largest, scratch);
  float scale = divide(largest, 127.0f);
  if (scale < 1.1754943508222875e-38f) scale = 1.1754943508222875e-38f;
  if (largest == 0.0f) scale = 1.0f;
  if (threadIdx.x == 0) scales[row] = scale;
  for (int64_t k = threadIdx.x; k < columns; k += kThreads) {
    float ratio = divide(widen(x[row * row_stride + k]), scale);
    ratio = ratio != ratio ? 0.0f : fminf(fmaxf(rintf(ratio), -127.0f), 127.0f);
    q[row * columns + k] = static_cast<int8_t>(ratio);
  }
}

extern "C" int accel_quantize_rowwise(const void* x, int dtype, int8_t* q, float* scales, int64_t rows, int64_t columns,
                                      int64_t row_stride, void* stream) {
  if (!x || !q || !scales) return ACCEL_NULL_POINTER;
  if (rows < 1 || rows > kMaxBlocks || columns < 1 || row_stride < columns) return ACCEL_BAD_SIZE;
  const unsigned blocks = static_cast<unsigned>(rows);
  if (dtype == ACCEL_FP32)
    return launch(blocks, stream, quantize_kernel<float>, static_cast<const float*>(x), q, scales, columns, row_stride);
  if (dtype == ACCEL_FP16)
    return launch(blocks, stream, quantize_kernel<half_t>, static_cast<const half_t*>(x), q, scales, columns,
                  row_stride);
  if (dtype == ACCEL_BF16)
    return launch(blocks, stream, quantize_kernel<bf16_t>, static_cast<const bf16_t*>(x), q, scales, columns,
                  row_stride);
  return ACCEL_BAD_DTYPE;
}
