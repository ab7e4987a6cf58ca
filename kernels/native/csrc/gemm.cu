// The C interface of the tensor-core GEMMs. Checks each call once, for all configurations.
#include "gemm.cuh"

#include <string.h>

#include <algorithm>
#include <vector>

#include "launch.cuh"

namespace {
std::vector<GemmConfig>& configs() {
  static std::vector<GemmConfig> all;  // filled while the library loads, before any call
  return all;
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

int element_size(int dtype) { return dtype == ACCEL_FP32 ? 4 : dtype == ACCEL_FP16 || dtype == ACCEL_BF16 ? 2 : 1; }

// The compute capability of the current device, or 0.
int capability() {
#ifdef __CUDACC__
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major * 10 + minor;
#else
  return 0;
#endif
}

int check(int config, const accel_gemm_problem* p) {
  if (!p) return ACCEL_NULL_POINTER;
  if (config < 0 || config >= accel_gemm_configs()) return ACCEL_BAD_CONFIG;
  if (!p->a || !p->b || !p->out) return ACCEL_NULL_POINTER;
  // CUTLASS counts rows, columns and K in 32 bits.
  const int64_t largest = 2147483647;
  if (std::min({p->m, p->n, p->k}) < 1 || std::max({p->m, p->n, p->k}) > largest) return ACCEL_BAD_SIZE;
  // 128 * 128 * K has to fit in an int32 sum.
  if (p->dtype == ACCEL_INT8 && p->k > largest / (128 * 128)) return ACCEL_BAD_SIZE;
  const GemmConfig& chosen = configs()[config];
  if (p->dtype != chosen.dtype || p->out_dtype != chosen.out_dtype) return ACCEL_BAD_DTYPE;
  if (p->act < ACCEL_NONE || p->act > ACCEL_SILU) return ACCEL_BAD_ACT;
  const bool rows = p->k * element_size(p->dtype) % 16 == 0 && p->n * element_size(p->out_dtype) % 16 == 0;
  const bool starts = aligned(p->a) && aligned(p->b) && aligned(p->out) && aligned(p->residual) && aligned(p->bias) &&
                      aligned(p->row_scale) && aligned(p->col_scale);
  return rows && starts ? ACCEL_OK : ACCEL_UNALIGNED;
}

int check_device(const GemmConfig& chosen) {
#ifdef __CUDACC__
  if (int status = device_status()) return status;
#endif
  const int here = capability();
  return here < chosen.least || here > chosen.most ? ACCEL_WRONG_ARCH : ACCEL_OK;
}
}  // namespace

RegisterGemm::RegisterGemm(const GemmConfig& config) {
  // Sorted by name, because the linker decides the order of the initializers.
  auto& all = configs();
  const auto place = std::find_if(all.begin(), all.end(),
                                  [&](const GemmConfig& other) { return strcmp(config.name, other.name) < 0; });
  all.insert(place, config);
}

extern "C" int accel_gemm_configs(void) { return static_cast<int>(configs().size()); }

extern "C" const char* accel_gemm_config_name(int config) {
  return config >= 0 && config < accel_gemm_configs() ? configs()[config].name : nullptr;
}

extern "C" int accel_gemm_workspace(int config, const accel_gemm_problem* problem, int64_t* bytes) {
  if (!bytes) return ACCEL_NULL_POINTER;
  if (int status = check(config, problem)) return status;
  if (int status = check_device(configs()[config])) return status;
  size_t found = 0;
  const int status = configs()[config].workspace(*problem, &found);
  *bytes = static_cast<int64_t>(found);
  return status;
}

extern "C" int accel_gemm(int config, const accel_gemm_problem* problem) {
  int64_t needed = 0;
  if (int status = accel_gemm_workspace(config, problem, &needed)) return status;
  if (needed > 0 && (!problem->workspace || problem->workspace_bytes < needed)) return ACCEL_NO_WORKSPACE;
  return configs()[config].run(*problem);
}
