// Chooses the kernel, checks the sizes and splits a product among the threads of the pool.
#include <new>
#include <vector>

#include "kernel.h"
#include "pool.h"

namespace {
const AccelKernel* const kKernels[] = {
#if defined(__x86_64__)
    &accel_avx512_vnni, &accel_avx2,
#endif
    &accel_portable};
constexpr int kCount = sizeof kKernels / sizeof *kKernels;
constexpr int64_t kMost = int64_t(1) << 31;  // of rows, columns and inputs: no size in bytes overflows

int64_t groups_in(int64_t size) { return (size + 15) / 16; }
}  // namespace

extern "C" {
int accel_cpu_abi(void) { return ACCEL_CPU_ABI; }
int accel_cpu_kernels(void) { return kCount; }
const char* accel_cpu_kernel_name(int kernel) { return kernel < 0 || kernel >= kCount ? "" : kKernels[kernel]->name; }
int accel_cpu_runs(int kernel) { return kernel >= 0 && kernel < kCount && kKernels[kernel]->runs(); }

int accel_cpu_best(void) {
  static const int best = [] {
    int kernel = 0;
    while (!kKernels[kernel]->runs()) ++kernel;  // the last one runs on any CPU
    return kernel;
  }();
  return best;
}

int accel_cpu_check(const accel_cpu_product* p) {
  if (!p || !p->x || !p->weights || !p->scales) return ACCEL_CPU_NULL;
  if (p->parts < 1 || p->parts > ACCEL_CPU_MOST_PARTS || (p->bits != 4 && p->bits != 8)) return ACCEL_CPU_FORM;
  if (p->block < 32 || p->block > 256 || (p->block & (p->block - 1))) return ACCEL_CPU_FORM;
  if (p->gated && (p->parts != 2 || p->sizes[0] != p->sizes[1])) return ACCEL_CPU_FORM;
  if (p->rows < 1 || p->rows >= kMost || p->k < 1 || p->k >= kMost) return ACCEL_CPU_SIZE;
  for (int part = 0; part < p->parts; ++part) {
    if (p->sizes[part] < 1 || p->sizes[part] >= kMost) return ACCEL_CPU_SIZE;
    if (!(p->gated && part) && !p->out[part]) return ACCEL_CPU_NULL;
  }
  return ACCEL_CPU_OK;
}

int64_t accel_cpu_scratch_bytes(const accel_cpu_product* p) {
  const int64_t spans = (p->k + p->block - 1) / p->block * (p->block / 32);
  return p->rows * spans * (32 + 4 + 4);
}

void accel_cpu_quantize(const accel_cpu_product* p, int kernel, void* scratch) {
  kKernels[kernel]->quantize(*p, scratch);
}

int64_t accel_cpu_tasks(const accel_cpu_product* p) {
  int64_t tasks = 0;
  for (int part = 0; part < (p->gated ? 1 : p->parts); ++part) tasks += groups_in(p->sizes[part]);
  return tasks;
}

void accel_cpu_compute(const accel_cpu_product* p, int kernel, const void* scratch, int64_t first, int64_t last) {
  kKernels[kernel]->compute(*p, scratch, first, last);
}

int accel_cpu_run(const accel_cpu_product* p, int kernel, int threads) {
  if (const int status = accel_cpu_check(p)) return status;
  if (!accel_cpu_runs(kernel)) return ACCEL_CPU_MISSING;
  std::vector<char> scratch;
  try {
    scratch.resize(static_cast<size_t>(accel_cpu_scratch_bytes(p)));
  } catch (const std::bad_alloc&) {
    return ACCEL_CPU_MEMORY;
  }
  kKernels[kernel]->quantize(*p, scratch.data());
  const auto compute = [&](int64_t first, int64_t last) { kKernels[kernel]->compute(*p, scratch.data(), first, last); };
  accel_pool_run(accel_cpu_tasks(p), threads, compute);
  return ACCEL_CPU_OK;
}
}
