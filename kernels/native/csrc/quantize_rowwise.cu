// One block for each row finds its largest magnitude, then its quotients, with the arithmetic of
// quantize_rowwise_torch. It reads a row twice, but only once from memory: 8192 fp32 are 32 KiB, which are still in L1
// or L2.
#include "launch.cuh"

ACCEL_DEVICE void quantize(float ratio, int8_t* q) {
  *q = ratio != ratio ? int8_t(0) : static_cast<int8_t>(fminf(fmaxf(rintf(ratio), -127.0f), 127.0f));
}
ACCEL_DEVICE void quantize(float ratio, fp8_t* q) { *q = to_fp8(ratio); }

template <class In, class Q>
__global__ void quantize_kernel(const In* x, Q* q, float* scales, float largest_q, int64_t columns,
                                int64_t row_stride) {
  ACCEL_SHARED float scratch[kThreads];
  const int64_t row = blockIdx.x;
  float largest = 0.0f;
  for (int64_t k = threadIdx.x; k < columns; k += kThreads) {
    float v = fabsf(widen(x[row * row_stride + k]));
    if (v > largest || v != v) largest = v;  // NaN stays, because no comparison with NaN is true
  }
  largest = across_block<false>(largest, scratch);
  float scale = divide(largest, largest_q);
  if (scale < 1.1754943508222875e-38f) scale = 1.1754943508222875e-38f;
  if (largest == 0.0f) scale = 1.0f;
  if (threadIdx.x == 0) scales[row] = scale;
  for (int64_t k = threadIdx.x; k < columns; k += kThreads) {
    quantize(divide(widen(x[row * row_stride + k]), scale), &q[row * columns + k]);
  }
}

template <class In>
int run(const void* x, void* q, int q_dtype, float* scales, int64_t rows, int64_t columns, int64_t row_stride,
        void* stream) {
  const In* from = static_cast<const In*>(x);
  const unsigned blocks = static_cast<unsigned>(rows);
  if (q_dtype == ACCEL_FP8)
    return launch(blocks, stream, quantize_kernel<In, fp8_t>, from, static_cast<fp8_t*>(q), scales, 448.0f, columns,
                  row_stride);
  return launch(blocks, stream, quantize_kernel<In, int8_t>, from, static_cast<int8_t*>(q), scales, 127.0f, columns,
                row_stride);
}

extern "C" int accel_quantize_rowwise(const void* x, int dtype, void* q, int q_dtype, float* scales, int64_t rows,
                                      int64_t columns, int64_t row_stride, void* stream) {
  if (!x || !q || !scales) return ACCEL_NULL_POINTER;
  if (rows < 1 || rows > kMaxBlocks || columns < 1 || row_stride < columns) return ACCEL_BAD_SIZE;
  if (q_dtype != ACCEL_INT8 && q_dtype != ACCEL_FP8) return ACCEL_BAD_DTYPE;
  auto* chosen = dtype == ACCEL_FP32 ? run<float> : dtype == ACCEL_FP16 ? run<half_t> : run<bf16_t>;
  if (dtype < ACCEL_FP32 || dtype > ACCEL_BF16) return ACCEL_BAD_DTYPE;
  return chosen(x, q, q_dtype, scales, rows, columns, row_stride, stream);
}
