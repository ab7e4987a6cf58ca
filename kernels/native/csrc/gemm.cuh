// The table of the compiled tensor-core GEMMs: each translation unit under cutlass/ registers its configurations, and
// gemm.cu finds them by number. Which ones a library has depends on the architectures that it was built for.
#pragma once
#include <cstddef>

#include "c_api.h"

struct GemmConfig {
  const char* name;  // as in kernels/catalogue/units.py
  int dtype, out_dtype;
  int least, most;  // the lowest and highest compute capability (major * 10 + minor) that runs it
  int (*workspace)(const accel_gemm_problem&, size_t* bytes);
  int (*run)(const accel_gemm_problem&);
};

struct RegisterGemm {
  explicit RegisterGemm(const GemmConfig& config);
};
