// accel::FusedGemm as a plugin of TensorRT (IPluginV3) over the C interface of the compiled kernels: a is (M, K), b
// (N, K), and after them come those that there are of bias, row scale, column scale and residual.
//
// Every name of accel.kernels.onnx_function that these kernels compute has a creator, so that a node is taken by its
// name; "FusedGemm" takes the epilogue from its fields. A tactic is one configuration of the library, which TensorRT
// times itself.
#include <NvInferRuntime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../csrc/c_api.h"

namespace {
using namespace nvinfer1;

constexpr const char* kVersion = "1";
constexpr const char* kNamespace = "";
constexpr int64_t kSmallM = 16;  // as many rows as accel_gemv takes
constexpr int32_t kGemv = 1;     // its tactic; those of the configurations are larger
// What every layer gets for splitting K: they share it, and an engine that is loaded doesn't know what it asked for.
constexpr int64_t kRoom = 32 << 20;

// The epilogue: what its fields are called, in the order in which a Spec holds their values.
enum Field { kAct, kBias, kResidual, kRowScale, kColScale, kDtype, kOutDtype, kFields };
constexpr const char* kNames[kFields] = {"act", "bias", "residual", "row_scale", "col_scale", "dtype", "out_dtype"};
using Spec = std::array<int32_t, kFields>;

// The function's body computes in fp32 then, and so its bias is fp32: see FusedGemm.dtypes.
bool wide(const Spec& s) { return s[kRowScale] || s[kColScale] || s[kDtype] != s[kOutDtype]; }
int32_t inputs(const Spec& s) { return 2 + s[kBias] + s[kRowScale] + s[kColScale] + s[kResidual]; }

bool valid(const Spec& s) {
  for (const Field flag : {kBias, kResidual, kRowScale, kColScale})
    if (s[flag] != 0 && s[flag] != 1) return false;
  const bool out = s[kOutDtype] == ACCEL_FP16 || s[kOutDtype] == ACCEL_BF16;
  const bool in = s[kDtype] == s[kOutDtype] || s[kDtype] == ACCEL_INT8 || s[kDtype] == ACCEL_FP8;
  return out && in && s[kAct] >= ACCEL_NONE && s[kAct] <= ACCEL_SILU;
}

DataType type_of(int32_t dtype) {
  switch (dtype) {
    case ACCEL_FP16: return DataType::kHALF;
    case ACCEL_BF16: return DataType::kBF16;
    case ACCEL_INT8: return DataType::kINT8;
    case ACCEL_FP8: return DataType::kFP8;
    default: return DataType::kFLOAT;
  }
}

// The type of an input, or, after them, of the output.
DataType type_at(const Spec& s, int32_t at) {
  std::vector<DataType> types{type_of(s[kDtype]), type_of(s[kDtype])};
  if (s[kBias]) types.push_back(wide(s) ? DataType::kFLOAT : type_of(s[kOutDtype]));
  for (int32_t scale = 0; scale < s[kRowScale] + s[kColScale]; ++scale) types.push_back(DataType::kFLOAT);
  if (s[kResidual]) types.push_back(type_of(s[kOutDtype]));
  types.push_back(type_of(s[kOutDtype]));
  return types[at];
}

int64_t bytes_of(int32_t dtype) { return dtype == ACCEL_INT8 || dtype == ACCEL_FP8 ? 1 : 2; }

ILoggerFinder* finder = nullptr;

int32_t failed(int status) {
  ILogger* const logger = finder ? finder->findLogger() : nullptr;
  const std::string text = std::string("accel FusedGemm: ") + accel_status_message(status);
  if (logger) logger->log(ILogger::Severity::kERROR, text.c_str());
  return status;
}

// The same for a configuration in every library that has it: engines keep the tactic, the order may change.
int32_t tactic_of(const char* name) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (; *name; ++name) hash = (hash ^ static_cast<unsigned char>(*name)) * 16777619u;
  return static_cast<int32_t>(hash % 2147483600u) + kGemv + 1;
}

// A problem of these sizes; with addresses that stand for aligned memory until there is any.
accel_gemm_problem problem_of(const Spec& s, int64_t m, int64_t n, int64_t k) {
  void* const somewhere = reinterpret_cast<void*>(256);
  accel_gemm_problem p{};
  p.a = p.b = p.out = somewhere;
  p.m = m;
  p.n = n;
  p.k = k;
  p.dtype = s[kDtype];
  p.out_dtype = s[kOutDtype];
  p.act = s[kAct];
  return p;
}

// In front of what a configuration wants: the bias in fp32, where it comes in another type.
int64_t bias_bytes(const Spec& s, int64_t n) { return s[kBias] && !wide(s) ? (n * 4 + 255) / 256 * 256 : 0; }

struct Plugin final : IPluginV3, IPluginV3OneCore, IPluginV3OneBuild, IPluginV3OneRuntime {
  Plugin(std::string given, const Spec& s) : name(std::move(given)), spec(s) {
    for (int field = 0; field < kFields; ++field)
      fields[field] = PluginField{kNames[field], &spec[field], PluginFieldType::kINT32, 1};
    collection.nbFields = kFields;
    collection.fields = fields.data();
  }

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
    switch (type) {
      case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
      case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
      case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }

  Plugin* clone() noexcept override {
    try {
      auto made = std::make_unique<Plugin>(name, spec);
      made->tactics = tactics;
      made->tactic = tactic;
      return made.release();
    } catch (const std::exception&) {
      return nullptr;
    }
  }

  const char* getPluginName() const noexcept override { return name.c_str(); }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  int32_t getNbOutputs() const noexcept override { return 1; }

  int32_t getOutputDataTypes(DataType* types, int32_t, const DataType*, int32_t) const noexcept override {
    types[0] = type_of(spec[kOutDtype]);
    return 0;
  }

  int32_t getOutputShapes(const DimsExprs* in, int32_t count, const DimsExprs*, int32_t, DimsExprs* out, int32_t,
                          IExprBuilder&) noexcept override {
    if (count != inputs(spec) || in[0].nbDims != 2 || in[1].nbDims != 2) return failed(ACCEL_BAD_SIZE);
    out[0].nbDims = 2;
    out[0].d[0] = in[0].d[0];
    out[0].d[1] = in[1].d[0];
    return 0;
  }

  bool supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* all, int32_t count,
                                 int32_t) noexcept override {
    if (count != inputs(spec) || at > count) return false;
    return all[at].desc.format == TensorFormat::kLINEAR && all[at].desc.type == type_at(spec, at);
  }

  int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) noexcept override {
    try {
      tactics.clear();
      const int64_t m = in[0].opt.d[0], n = in[1].opt.d[0], k = in[1].opt.d[1];
      const accel_gemm_problem p = problem_of(spec, m, n, k);
      for (int config = 0; config < accel_gemm_configs(); ++config) {
        int64_t needed = 0;
        if (accel_gemm_workspace(config, &p, &needed) == ACCEL_OK && needed <= kRoom)
          tactics.push_back(tactic_of(accel_gemm_config_name(config)));
      }
      if (in[0].max.d[0] <= kSmallM && spec[kDtype] == spec[kOutDtype]) tactics.push_back(kGemv);
      return 0;
    } catch (const std::exception&) {
      return failed(ACCEL_NO_WORKSPACE);
    }
  }

  int32_t getNbTactics() noexcept override { return static_cast<int32_t>(tactics.size()); }

  int32_t getValidTactics(int32_t* found, int32_t count) noexcept override {
    std::copy_n(tactics.begin(), std::min<size_t>(tactics.size(), count), found);
    return 0;
  }

  // What the dimensions decide is in TensorRT's own part of the key.
  const char* getTimingCacheID() noexcept override {
    timing_id.clear();
    for (const int32_t value : spec) timing_id += std::to_string(value) + " ";
    return timing_id.c_str();
  }

  size_t getWorkspaceSize(const DynamicPluginTensorDesc* in, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return static_cast<size_t>(bias_bytes(spec, in[1].max.d[0]) + kRoom);
  }

  int32_t setTactic(int32_t given) noexcept override {
    tactic = given;
    return 0;
  }

  int32_t onShapeChange(const PluginTensorDesc*, int32_t, const PluginTensorDesc*, int32_t) noexcept override {
    return 0;
  }

  int32_t enqueue(const PluginTensorDesc* in, const PluginTensorDesc*, const void* const* data, void* const* out,
                  void* workspace, cudaStream_t stream) noexcept override {
    if (in[0].dims.nbDims != 2 || in[1].dims.nbDims != 2 || in[0].dims.d[1] != in[1].dims.d[1])
      return failed(ACCEL_BAD_SIZE);
    accel_gemm_problem p = problem_of(spec, in[0].dims.d[0], in[1].dims.d[0], in[1].dims.d[1]);
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
    const int64_t in_front = bias_bytes(spec, p.n);
    if (in_front) {
      float* const widened = static_cast<float*>(workspace);
      if (const int status = accel_widen(bias, spec[kOutDtype], widened, p.n, stream)) return failed(status);
      p.bias = widened;
    } else {
      p.bias = static_cast<const float*>(bias);
    }
    return multiply(p, static_cast<char*>(workspace) + in_front);
  }

  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }

  const PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection; }

 private:
  // By the tactic that was chosen; where that doesn't take these sizes, by the first that does.
  int32_t multiply(accel_gemm_problem& p, void* workspace) const {
    const bool few = p.m <= kSmallM && spec[kDtype] == spec[kOutDtype];
    int status = ACCEL_BAD_CONFIG;
    if (tactic == kGemv && few) return small(p);
    for (const bool chosen : {true, false}) {
      for (int config = 0; config < accel_gemm_configs(); ++config) {
        if (chosen != (tactic_of(accel_gemm_config_name(config)) == tactic)) continue;
        int64_t needed = 0;
        status = accel_gemm_workspace(config, &p, &needed);
        if (status != ACCEL_OK || needed > kRoom) continue;
        p.workspace = needed ? workspace : nullptr;
        p.workspace_bytes = needed;
        status = accel_gemm(config, &p);
        if (status == ACCEL_OK) return 0;
      }
    }
    return few ? small(p) : failed(status);
  }

  int32_t small(const accel_gemm_problem& p) const {
    const int status = accel_gemv(p.a, p.b, p.out, p.bias, p.residual, p.row_scale, p.col_scale, p.dtype, p.act, p.m,
                                  p.n, p.k, p.stream);
    return status == ACCEL_OK ? 0 : failed(status);
  }

  std::string name, timing_id;
  Spec spec;
  std::vector<int32_t> tactics;
  int32_t tactic = 0;
  std::array<PluginField, kFields> fields;
  PluginFieldCollection collection;
};

struct Creator final : IPluginCreatorV3One {
  // ``fixed``: the name says what it is, and no field may say something else.
  Creator(std::string given, const Spec& s, bool is_fixed) : name(std::move(given)), spec(s), fixed(is_fixed) {
    for (int field = 0; field < kFields; ++field)
      fields[field] = PluginField{kNames[field], nullptr, PluginFieldType::kINT32, 1};
    collection.nbFields = kFields;
    collection.fields = fields.data();
  }

  const char* getPluginName() const noexcept override { return name.c_str(); }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection; }

  // A field that isn't known, as those that a parser adds, is passed over; one of another type or value is refused.
  IPluginV3* createPlugin(const char*, const PluginFieldCollection* given, TensorRTPhase) noexcept override {
    try {
      Spec made = spec;
      for (int32_t at = 0; given && at < given->nbFields; ++at) {
        const PluginField& field = given->fields[at];
        for (int known = 0; known < kFields; ++known) {
          if (strcmp(field.name, kNames[known]) != 0) continue;
          if (field.type != PluginFieldType::kINT32 || field.length != 1 || !field.data) return refuse();
          memcpy(&made[known], field.data, sizeof(int32_t));
        }
      }
      if (!valid(made) || (fixed && made != spec)) return refuse();
      return new Plugin(name, made);
    } catch (const std::exception&) {
      return nullptr;
    }
  }

 private:
  static IPluginV3* refuse() {
    failed(ACCEL_BAD_CONFIG);
    return nullptr;
  }

  std::string name;
  Spec spec;
  bool fixed;
  std::array<PluginField, kFields> fields;
  PluginFieldCollection collection;
};

// As accel.kernels.onnx_function names them: those with b as (N, K).
std::vector<std::unique_ptr<Creator>> every() {
  const char* const acts[] = {"", "_relu", "_gelu_tanh", "_gelu_erf", "_silu"};  // in the order of ACCEL_NONE to SILU
  const std::pair<const char*, int32_t> outs[] = {{"_fp16", ACCEL_FP16}, {"_bf16", ACCEL_BF16}};
  const std::pair<const char*, int32_t> operands[] = {{"", -1}, {"_int8", ACCEL_INT8}, {"_fp8_e4m3", ACCEL_FP8}};
  std::vector<std::unique_ptr<Creator>> all;
  all.push_back(std::make_unique<Creator>("FusedGemm", Spec{0, 0, 0, 0, 0, ACCEL_FP16, ACCEL_FP16}, false));
  for (const auto& [suffix, out] : outs)
    for (const auto& [own, operand] : operands)
      for (int act = ACCEL_NONE; act <= ACCEL_SILU; ++act)
        for (int flags = 0; flags < 16; ++flags) {
          const int32_t bias = flags & 1, residual = flags >> 1 & 1, row = flags >> 2 & 1, col = flags >> 3;
          const std::string name = std::string("FusedGemm_gemm_nt") + own + (row ? "_row" : "") + (col ? "_col" : "") +
                                   (bias ? "_bias" : "") + acts[act] + (residual ? "_residual" : "") + suffix;
          const Spec spec{act, bias, residual, row, col, operand < 0 ? out : operand, out};
          all.push_back(std::make_unique<Creator>(name, spec, true));
        }
  return all;
}
}  // namespace

// What IPluginRegistry::loadLibrary looks for.
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
