// A row of the table of kernels: the same functions, compiled for one set of instructions.
#pragma once
#include "packed_product.h"

struct AccelKernel {
  const char* name;
  bool (*runs)();
  void (*quantize)(const accel_cpu_product&, void* scratch);
  void (*compute)(const accel_cpu_product&, const void* scratch, int64_t first, int64_t last);
};

#if defined(__x86_64__)
extern const AccelKernel accel_avx512_vnni, accel_avx2;
#endif
extern const AccelKernel accel_portable;
