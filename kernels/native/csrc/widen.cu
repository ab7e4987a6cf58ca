// Converts vectors to fp32, the type in which the other kernels take the bias and the scales.
#include "launch.cuh"

template <class T>
__global__ void widen_kernel(const T* from, float* to, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; at < count; at += step)
    to[at] = widen(from[at]);
}

template <class T>
int run(const void* from, float* to, int64_t count, void* stream) {
  const int64_t wanted = (count + kThreads - 1) / kThreads;
  const unsigned blocks = static_cast<unsigned>(wanted < 1024 ? wanted : 1024);
  return launch(blocks, stream, widen_kernel<T>, static_cast<const T*>(from), to, count);
}

extern "C" int accel_widen(const void* from, int dtype, float* to, int64_t count, void* stream) {
  if (!from || !to) return ACCEL_NULL_POINTER;
  if (count < 1) return ACCEL_BAD_SIZE;
  if (dtype < ACCEL_FP32 || dtype > ACCEL_BF16) return ACCEL_BAD_DTYPE;
  auto* chosen = dtype == ACCEL_FP32 ? run<float> : dtype == ACCEL_FP16 ? run<half_t> : run<bf16_t>;
  return chosen(from, to, count, stream);
}
