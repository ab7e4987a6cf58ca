// Launches a kernel on the GPU or on the host, and returns a status.
#pragma once
#include "c_api.h"
#include "simt.cuh"

#ifdef __CUDACC__
constexpr unsigned kThreads = 128;
inline int device_status() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 ? ACCEL_OK : ACCEL_NO_DEVICE;
}
template <class Kernel, class... Arguments>
int launch(unsigned blocks, void* stream, Kernel kernel, Arguments... arguments) {
  if (int status = device_status()) return status;
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
  return cudaGetLastError() == cudaSuccess ? ACCEL_OK : ACCEL_LAUNCH_FAILED;
}
#else
constexpr unsigned kThreads = 8;  // enough for every barrier and ragged edge, and quick under a sanitizer
template <class Kernel, class... Arguments>
int launch(unsigned blocks, void*, Kernel kernel, Arguments... arguments) {
  launch_on_host(blocks, kThreads, kernel, arguments...);
  return ACCEL_OK;
}
#endif
constexpr int64_t kMaxBlocks = 2147483647;

// Sums one value a thread, or takes the largest. Every thread gets the result. The block size has to be a power of two.
template <bool kSum>
ACCEL_DEVICE float across_block(float value, float* scratch) {
  scratch[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      float other = scratch[threadIdx.x + half], mine = scratch[threadIdx.x];
      scratch[threadIdx.x] = kSum ? mine + other : (other > mine || other != other ? other : mine);
    }
    __syncthreads();
  }
  float result = scratch[0];
  __syncthreads();  // before the next use of scratch
  return result;
}
