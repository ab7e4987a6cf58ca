// Makes a GEMM of CUTLASS 2 or 3 an entry of the library's table. The GEMM is a class with an Adapter, and the
// Adapter's arguments for a problem.
#pragma once
#include "../gemm.cuh"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

template <class T>
constexpr int kDtype = -1;
template <>
constexpr int kDtype<cutlass::half_t> = ACCEL_FP16;
template <>
constexpr int kDtype<cutlass::bfloat16_t> = ACCEL_BF16;
template <>
constexpr int kDtype<int8_t> = ACCEL_INT8;
template <>
constexpr int kDtype<cutlass::float_e4m3_t> = ACCEL_FP8;

template <class Made>
int workspace(const accel_gemm_problem& p, size_t* bytes) {
  if (!Made::runs_here()) {
    cudaGetLastError();  // clears the error of this query, which the next launch would report
    return ACCEL_WRONG_ARCH;
  }
  *bytes = Made::Adapter::get_workspace_size(Made::arguments(p));
  return ACCEL_OK;
}

template <class Made>
int run(const accel_gemm_problem& p) {
  const auto made = Made::arguments(p);
  if (Made::Adapter::can_implement(made) != cutlass::Status::kSuccess) return ACCEL_UNALIGNED;
  const auto stream = static_cast<cudaStream_t>(p.stream);
  typename Made::Adapter adapter;
  if (adapter.initialize(made, p.workspace, stream) != cutlass::Status::kSuccess) return ACCEL_LAUNCH_FAILED;
  return adapter.run(stream) == cutlass::Status::kSuccess ? ACCEL_OK : ACCEL_LAUNCH_FAILED;
}

template <class Made, class In, class Out>
GemmConfig config(const char* name, int least, int most) {
  return {name, kDtype<In>, kDtype<Out>, least, most, workspace<Made>, run<Made>};
}
