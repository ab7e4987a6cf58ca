// Stands in for a tensor-core GEMM in the tests on the host. The stand-in supports only fp16 products of 24 columns,
// and writes its sums to the workspace that it requests.
#include "activate.cuh"
#include "gemm.cuh"

namespace {
constexpr int64_t kColumns = 24;

int workspace(const accel_gemm_problem& p, size_t* bytes) {
  *bytes = kColumns * sizeof(float);
  return p.n == kColumns ? ACCEL_OK : ACCEL_UNALIGNED;
}

int run(const accel_gemm_problem& p) {
  const auto *a = static_cast<const half_t*>(p.a), *b = static_cast<const half_t*>(p.b);
  const auto* residual = static_cast<const half_t*>(p.residual);
  auto* const sums = static_cast<float*>(p.workspace);
  for (int64_t row = 0; row < p.m; ++row) {
    for (int64_t column = 0; column < p.n; ++column) {
      sums[column] = 0;
      for (int64_t k = 0; k < p.k; ++k) sums[column] += widen(a[row * p.k + k]) * widen(b[column * p.k + k]);
    }
    for (int64_t column = 0; column < p.n; ++column) {
      const int64_t at = row * p.n + column;
      const float x = activate(p.bias ? sums[column] + p.bias[column] : sums[column], p.act);
      narrow(residual ? x + widen(residual[at]) : x, static_cast<half_t*>(p.out) + at);
    }
  }
  return ACCEL_OK;
}

const RegisterGemm registered({"host_fp16_naive", ACCEL_FP16, ACCEL_FP16, 0, 0, workspace, run});
}  // namespace
