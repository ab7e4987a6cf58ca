// accel's operators as plugins of TensorRT (IPluginV3) over the C interface of the compiled kernels.
//
// Each product name of accel.kernels.onnx.function that these kernels compute has a creator, which takes a node by its
// name. The creator "FusedGemm" reads the epilogue from the node's fields. accel's engine build writes these fields
// into nodes of other names, and transposes their weights. The names of convolutions have too many sizes, so
// "FusedConv2d" reads the sizes from fields too.
#include <utility>

#include "tensorrt_conv2d.h"
#include "tensorrt_gemm.h"

namespace {
using Creators = std::vector<std::unique_ptr<IPluginCreatorV3One>>;

// Only products with b as (N, K).
Creators every() {
  const char* const acts[] = {"", "_relu", "_gelu_tanh", "_gelu_erf", "_silu"};  // in the order of ACCEL_NONE to SILU
  const std::pair<const char*, int32_t> outs[] = {{"_fp16", ACCEL_FP16}, {"_bf16", ACCEL_BF16}};
  const std::pair<const char*, int32_t> operands[] = {{"", -1}, {"_int8", ACCEL_INT8}, {"_fp8_e4m3", ACCEL_FP8}};
  Creators all;
  all.push_back(std::make_unique<Creator<Gemm, 7>>(
      "FusedGemm", Gemm::Spec{0, 0, 0, 0, 0, ACCEL_FP16, ACCEL_FP16}, false));
  all.push_back(std::make_unique<Creator<Conv2d, 12>>(
      "FusedConv2d", Conv2d::Spec{0, 0, 0, ACCEL_FP16, 1, 1, 1, 1, 0, 0, 1, 1}, false));
  for (const auto& [suffix, out] : outs)
    for (const auto& [own, operand] : operands)
      for (int act = ACCEL_NONE; act <= ACCEL_SILU; ++act)
        for (int flags = 0; flags < 16; ++flags) {
          const int32_t bias = flags & 1, residual = flags >> 1 & 1, row = flags >> 2 & 1, col = flags >> 3;
          const std::string name = std::string("FusedGemm_gemm_nt") + own + (row ? "_row" : "") + (col ? "_col" : "") +
                                   (bias ? "_bias" : "") + acts[act] + (residual ? "_residual" : "") + suffix;
          const Gemm::Spec spec{act, bias, residual, row, col, operand < 0 ? out : operand, out};
          all.push_back(std::make_unique<Creator<Gemm, 7>>(name, spec, true));
        }
  return all;
}
}  // namespace

// The symbols that IPluginRegistry::loadLibrary looks for.
extern "C" __attribute__((visibility("default"))) void setLoggerFinder(ILoggerFinder* given) { finder = given; }

extern "C" __attribute__((visibility("default"))) IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static const auto creators = every();
  static const auto pointers = [] {
    std::vector<IPluginCreatorInterface*> made;
    for (const auto& one : creators) made.push_back(one.get());
    return made;
  }();
  count = static_cast<int32_t>(pointers.size());
  return pointers.data();
}
