// Between the C interface of the tensor-core GEMMs and their compiled configurations: each translation unit under
// cutlass/ registers what it holds, and gemm.cu finds it by number. A library built for other architectures holds fewer.
#pragma once
#include <cstddef>

#include "c_api.h"

struct GemmConfig {
  const char* name;  // as in kernels/units.py
  int dtype, out_dtype;
  int least, most;  // compute capabilities (major * 10 + minor) that run it
  int (*workspace)(const accel_gemm_problem&, size_t* bytes);
  int (*run)(const accel_gemm_problem&);
};

struct RegisterGemm {
  explicit RegisterGemm(const GemmConfig& config);
};
