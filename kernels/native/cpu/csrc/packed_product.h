// The C interface of the products of few rows with packed int4 or int8 weights. Every function is safe to call from
// several threads at once. kernels/native/cpu/layout.py describes the packed form.
#pragma once
#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {
#define ACCEL_CPU_ABI 1
#define ACCEL_CPU_MOST_PARTS 3

enum accel_cpu_status {
  ACCEL_CPU_OK = 0,
  ACCEL_CPU_NULL = 1,      // a pointer is NULL
  ACCEL_CPU_SIZE = 2,      // a size is negative, zero or too large
  ACCEL_CPU_FORM = 3,      // the bits, the block or the number of parts isn't supported
  ACCEL_CPU_MISSING = 4,   // this CPU lacks the instructions of the named kernel
  ACCEL_CPU_MEMORY = 5,    // no memory for the quantized rows
};

// Computes x (rows, k) times the transposes of ``parts`` matrices (sizes[p], k), which are packed one after the other.
// The result of part p is out[p] (rows, sizes[p]). If ``gated``, there are two parts of equal size, and
// out[0] = silu(x @ part 0) * (x @ part 1). A residual (rows, sizes[0]) is added to out[0]. It may be out[0].
struct accel_cpu_product {
  const float* x;
  const void* weights;
  const uint16_t* scales;  // fp16, to be multiplied by gain
  const float* residual;   // or NULL
  float* out[ACCEL_CPU_MOST_PARTS];
  int64_t rows, k;
  int64_t sizes[ACCEL_CPU_MOST_PARTS];
  int32_t parts, bits, block, gated;
  float gain;  // a power of two
};

int accel_cpu_abi(void);
// The kernels that were compiled, the best first, and whether this CPU has the instructions of a kernel.
int accel_cpu_kernels(void);
const char* accel_cpu_kernel_name(int kernel);
int accel_cpu_runs(int kernel);
int accel_cpu_best(void);

// The three steps of a product, for a caller with threads of its own: quantize the rows of x into ``scratch``, then
// compute tasks 0 to accel_cpu_tasks() - 1 in any order and any threads.
int accel_cpu_check(const accel_cpu_product* product);
int64_t accel_cpu_scratch_bytes(const accel_cpu_product* product);
void accel_cpu_quantize(const accel_cpu_product* product, int kernel, void* scratch);
int64_t accel_cpu_tasks(const accel_cpu_product* product);
void accel_cpu_compute(const accel_cpu_product* product, int kernel, const void* scratch, int64_t first, int64_t last);

// All steps, with the threads of the process-wide pool. ``threads`` includes the calling thread.
int accel_cpu_run(const accel_cpu_product* product, int kernel, int threads);
}
#pragma GCC visibility pop
