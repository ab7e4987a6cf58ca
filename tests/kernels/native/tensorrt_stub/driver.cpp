// Drives a plugin as TensorRT does, with the stub's headers or the real ones. The tests call this library with ctypes.
#include <NvInferRuntime.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {
struct Said : ILogger, ILoggerFinder {
  std::string text;
  void log(Severity, const char* message) noexcept override { text = message; }
  ILogger* findLogger() override { return this; }
} said;

IPluginCreatorV3One* creator_of(IPluginCreatorInterface* const* all, int32_t count, const char* name) {
  for (int32_t at = 0; at < count; ++at) {
    auto* one = dynamic_cast<IPluginCreatorV3One*>(all[at]);
    if (one && strcmp(one->getPluginName(), name) == 0) return one;
  }
  return nullptr;
}

// Represents a size that is a known constant. ``Builder`` below computes with such sizes.
struct Size final : IDimensionExpr, apiv::VDimensionExpr {
  explicit Size(int64_t given) : value(given) { mImpl = this; }
  bool isConstant() const override { return true; }
  int64_t getConstantValue() const override { return value; }
  bool isSizeTensor() const override { return false; }
  int64_t value;
};

struct Builder final : IExprBuilder, apiv::VExprBuilder {
  Builder() { mImpl = this; }
  const IDimensionExpr* constant(int64_t value) override { return &made.emplace_back(value); }
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& a, const IDimensionExpr& b) override {
    const int64_t x = a.getConstantValue(), y = b.getConstantValue();
    switch (op) {
      case DimensionOperation::kSUM: return constant(x + y);
      case DimensionOperation::kPROD: return constant(x * y);
      case DimensionOperation::kFLOOR_DIV: return constant(x / y);
      default: return nullptr;
    }
  }
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr&) override {
    return nullptr;
  }
  std::deque<Size> made;
};

template <class Interface>
Interface* half(IPluginV3* plugin, PluginCapabilityType type) {
  return dynamic_cast<Interface*>(plugin->getCapabilityInterface(type));
}
}  // namespace

extern "C" const char* last_words() { return said.text.c_str(); }

extern "C" void listen(void (*set)(ILoggerFinder*)) { set(&said); }

extern "C" const char* name_of(IPluginCreatorInterface* const* all, int32_t at) {
  return dynamic_cast<IPluginCreatorV3One*>(all[at])->getPluginName();
}

// Returns 0, the number of the failed step, or 100 plus enqueue's status. ``dims`` has four sizes per tensor, and the
// output is the last tensor. Images and weights of a convolution are NHWC in memory. The first dim of the first input
// is dynamic, and ``largest_m`` is the maximum of this dim in the optimization profile. ``tactic`` -1 selects the
// plugin's first tactic, or 0 if the plugin has no tactics.
extern "C" int run(IPluginCreatorInterface* const* all, int32_t count, const char* name, int32_t fields,
                   const char* const* field_names, const int32_t* values, int32_t inputs, const void* const* data,
                   const int32_t* types, int64_t* dims, const int32_t* ranks, void* out, int64_t largest_m,
                   int32_t tactic, int32_t* tactics) {
  IPluginCreatorV3One* const creator = creator_of(all, count, name);
  if (!creator) return 1;
  std::vector<PluginField> given(fields);
  for (int32_t at = 0; at < fields; ++at) given[at] = {field_names[at], &values[at], PluginFieldType::kINT32, 1};
  const PluginFieldCollection collection{fields, given.data()};
  IPluginV3* const made = creator->createPlugin("layer", &collection, TensorRTPhase::kBUILD);
  if (!made) return 2;

  auto* core = half<IPluginV3OneCore>(made, PluginCapabilityType::kCORE);
  auto* build = half<IPluginV3OneBuild>(made, PluginCapabilityType::kBUILD);
  if (!core || !build || strcmp(core->getPluginName(), creator->getPluginName()) != 0) return 3;
  std::vector<DynamicPluginTensorDesc> tensors(inputs + 1);
  std::vector<DimsExprs> expressions(inputs);
  Builder builder;
  const bool images = strcmp(name, "FusedConv2d") == 0;
  for (int32_t at = 0; at <= inputs; ++at) {
    DynamicPluginTensorDesc& tensor = tensors[at];
    tensor.desc.dims.nbDims = ranks[at];
    for (int32_t axis = 0; axis < ranks[at]; ++axis) tensor.desc.dims.d[axis] = dims[4 * at + axis];
    tensor.desc.type = static_cast<DataType>(types[at]);
    tensor.min = tensor.opt = tensor.max = tensor.desc.dims;
    if (at == 0) {
      tensor.max.d[0] = largest_m;
      tensor.desc.dims.d[0] = -1;
    }
    if (at == inputs) continue;
    expressions[at].nbDims = ranks[at];
    for (int32_t axis = 0; axis < ranks[at]; ++axis) expressions[at].d[axis] = builder.constant(dims[4 * at + axis]);
  }
  for (int32_t at = 0; at <= inputs; ++at) {
    tensors[at].desc.format = TensorFormat::kCHW32;
    if (build->supportsFormatCombination(at, tensors.data(), inputs, 1)) return 4;
    tensors[at].desc.format = images && ranks[at] == 4 ? TensorFormat::kHWC8 : TensorFormat::kLINEAR;
    if (!build->supportsFormatCombination(at, tensors.data(), inputs, 1)) return 5;
  }
  DataType out_type{};
  if (build->getNbOutputs() != 1 || build->getOutputDataTypes(&out_type, 1, nullptr, inputs) != 0) return 6;
  if (static_cast<int32_t>(out_type) != types[inputs]) return 7;
  DimsExprs shape{};
  if (build->getOutputShapes(expressions.data(), inputs, nullptr, 0, &shape, 1, builder) != 0) return 8;
  if (shape.nbDims != ranks[inputs]) return 9;
  for (int32_t axis = 0; axis < shape.nbDims; ++axis)
    if (shape.d[axis]->getConstantValue() != dims[4 * inputs + axis]) return 9;
  if (build->configurePlugin(tensors.data(), inputs, &tensors[inputs], 1) != 0) return 10;
  *tactics = build->getNbTactics();
  std::vector<int32_t> valid(*tactics);
  if (build->getValidTactics(valid.data(), *tactics) != 0) return 11;
  if (tactic < 0) tactic = valid.empty() ? 0 : valid[0];
  const size_t room = build->getWorkspaceSize(tensors.data(), inputs, &tensors[inputs], 1);
  if (!build->getTimingCacheID()) return 12;

  // Creates the plugin from its serialized fields, as loading an engine does.
  const PluginFieldCollection* kept = half<IPluginV3OneRuntime>(made, PluginCapabilityType::kRUNTIME)
                                          ->getFieldsToSerialize();
  IPluginV3* const loaded = creator->createPlugin("layer", kept, TensorRTPhase::kRUNTIME);
  delete made;
  if (!loaded) return 13;
  auto* runtime = half<IPluginV3OneRuntime>(loaded, PluginCapabilityType::kRUNTIME);
  if (runtime->setTactic(tactic) != 0) return 14;
  IPluginV3* const attached = runtime->attachToContext(nullptr);
  delete loaded;
  if (!attached) return 15;
  runtime = half<IPluginV3OneRuntime>(attached, PluginCapabilityType::kRUNTIME);
  std::vector<PluginTensorDesc> now;
  for (const auto& tensor : tensors) now.push_back(tensor.desc);
  now[0].dims.d[0] = dims[0];
  if (runtime->onShapeChange(now.data(), inputs, &now[inputs], 1) != 0) return 16;
  void* const workspace = std::aligned_alloc(256, (room + 255) / 256 * 256);
  void* const outputs[] = {out};
  const int32_t status = runtime->enqueue(now.data(), &now[inputs], data, outputs, workspace, nullptr);
  std::free(workspace);
  delete attached;
  return status == 0 ? 0 : 100 + status;
}
