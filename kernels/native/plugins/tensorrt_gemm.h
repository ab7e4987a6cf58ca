// accel::FusedGemm as a plugin of TensorRT. The inputs are a (..., K), b (N, K), then bias, row scale (one for each row
// of a), column scale and residual (..., N), if they exist. In memory a is a matrix, whose rows are the product of all
// dimensions but the last.
#pragma once
#include "tensorrt_layer.h"

namespace {
struct Gemm final : Layer<Gemm, 7> {
  enum Field { kAct, kBias, kResidual, kRowScale, kColScale, kDtype, kOutDtype };
  using Spec = Fields<7>;
  static constexpr const char* kKind = "FusedGemm";
  static constexpr const char* kNames[] = {"act",       "bias",  "residual", "row_scale",
                                           "col_scale", "dtype", "out_dtype"};
  using Layer::Layer;

  static bool valid(const Spec& s) {
    for (const Field flag : {kBias, kResidual, kRowScale, kColScale})
      if (s[flag] != 0 && s[flag] != 1) return false;
    const bool out = s[kOutDtype] == ACCEL_FP16 || s[kOutDtype] == ACCEL_BF16;
    const bool in = s[kDtype] == s[kOutDtype] || s[kDtype] == ACCEL_INT8 || s[kDtype] == ACCEL_FP8;
    return out && in && s[kAct] >= ACCEL_NONE && s[kAct] <= ACCEL_SILU;
  }

  // The function's body then computes in fp32, so its bias is fp32 (see FusedGemm.dtypes).
  bool wide() const { return spec[kRowScale] || spec[kColScale] || spec[kDtype] != spec[kOutDtype]; }
  int32_t inputs() const { return 2 + spec[kBias] + spec[kRowScale] + spec[kColScale] + spec[kResidual]; }

  // Returns the type of an input, or of the output, which comes after the inputs.
  DataType type_at(int32_t at) const {
    std::vector<DataType> types{type_of(spec[kDtype]), type_of(spec[kDtype])};
    if (spec[kBias]) types.push_back(wide() ? DataType::kFLOAT : type_of(spec[kOutDtype]));
    for (int32_t scale = 0; scale < spec[kRowScale] + spec[kColScale]; ++scale) types.push_back(DataType::kFLOAT);
    if (spec[kResidual]) types.push_back(type_of(spec[kOutDtype]));
    types.push_back(type_of(spec[kOutDtype]));
    return types[at];
  }

  // If the bias has another type, its fp32 copy comes before the workspace of the configuration.
  int64_t bias_bytes(int64_t n) const { return spec[kBias] && !wide() ? padded(n * 4) : 0; }

  int32_t getOutputDataTypes(DataType* types, int32_t, const DataType*, int32_t) const noexcept override {
    types[0] = type_of(spec[kOutDtype]);
    return 0;
  }

  int32_t getOutputShapes(const DimsExprs* in, int32_t count, const DimsExprs*, int32_t, DimsExprs* out, int32_t,
                          IExprBuilder&) noexcept override {
    if (count != inputs() || in[0].nbDims < 2 || in[1].nbDims != 2) return refused(ACCEL_BAD_SIZE);
    if (spec[kResidual] && in[count - 1].nbDims != in[0].nbDims) return refused(ACCEL_BAD_SIZE);
    out[0] = in[0];
    out[0].d[in[0].nbDims - 1] = in[1].d[0];
    return 0;
  }

  bool supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* all, int32_t count,
                                 int32_t) noexcept override {
    if (count != inputs() || at > count) return false;
    return all[at].desc.format == TensorFormat::kLINEAR && all[at].desc.type == type_at(at);
  }

  int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) noexcept override {
    try {
      tactics = tactics_for(problem(rows(in[0].opt), in[1].opt.d[0], in[1].opt.d[1]), rows(in[0].max));
      return 0;
    } catch (const std::exception&) {
      return refused(ACCEL_NO_WORKSPACE);
    }
  }

  size_t getWorkspaceSize(const DynamicPluginTensorDesc* in, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return static_cast<size_t>(bias_bytes(in[1].max.d[0]) + kRoom);
  }

  int32_t enqueue(const PluginTensorDesc* in, const PluginTensorDesc*, const void* const* data, void* const* out,
                  void* workspace, cudaStream_t stream) noexcept override {
    const Dims &a = in[0].dims, &b = in[1].dims;
    if (a.nbDims < 2 || b.nbDims != 2 || a.d[a.nbDims - 1] != b.d[1]) return refused(ACCEL_BAD_SIZE);
    accel_gemm_problem p = problem(rows(a), b.d[0], b.d[1]);
    if (p.m == 0) return 0;
    p.a = data[0];
    p.b = data[1];
    p.out = out[0];
    p.stream = stream;
    int32_t next = 2;
    const void* const bias = spec[kBias] ? data[next++] : nullptr;
    if (spec[kRowScale]) p.row_scale = static_cast<const float*>(data[next++]);
    if (spec[kColScale]) p.col_scale = static_cast<const float*>(data[next++]);
    if (spec[kResidual]) p.residual = data[next++];
    const int64_t in_front = bias_bytes(p.n);
    p.bias = static_cast<const float*>(in_front ? workspace : bias);
    int status = ACCEL_OK;
    if (in_front) status = accel_widen(bias, spec[kOutDtype], static_cast<float*>(workspace), p.n, stream);
    if (status == ACCEL_OK) status = multiply(p, tactic, static_cast<char*>(workspace) + in_front);
    return status == ACCEL_OK ? 0 : refused(status);
  }

 private:
  static int64_t rows(const Dims& a) {
    int64_t found = 1;
    for (int32_t axis = 0; axis + 1 < a.nbDims; ++axis) found *= a.d[axis];
    return found;
  }

  accel_gemm_problem problem(int64_t m, int64_t n, int64_t k) const {
    return problem_of(spec[kDtype], spec[kOutDtype], spec[kAct], m, n, k);
  }
};
}  // namespace
