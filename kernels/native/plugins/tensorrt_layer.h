// The shared parts of accel's TensorRT plugins (IPluginV3): the fields of a layer, the tactics, and the product by the
// compiled kernels through their C interface.
//
// A tactic is a configuration of the library. TensorRT times the tactics itself.
#pragma once
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
constexpr int64_t kSmallM = 16;  // the most rows that accel_gemv takes
constexpr int32_t kGemv = 1;     // the tactic of gemv; configurations have larger numbers
// The workspace of every layer for splitting K. All layers share it, because a loaded engine doesn't know what a layer
// asked for.
constexpr int64_t kRoom = 32 << 20;

template <size_t kFields>
using Fields = std::array<int32_t, kFields>;

DataType type_of(int32_t dtype) {
  switch (dtype) {
    case ACCEL_FP16: return DataType::kHALF;
    case ACCEL_BF16: return DataType::kBF16;
    case ACCEL_INT8: return DataType::kINT8;
    case ACCEL_FP8: return DataType::kFP8;
    default: return DataType::kFLOAT;
  }
}

int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

ILoggerFinder* finder = nullptr;

int32_t failed(const char* kind, int status) {
  ILogger* const logger = finder ? finder->findLogger() : nullptr;
  const std::string text = std::string("accel ") + kind + ": " + accel_status_message(status);
  if (logger) logger->log(ILogger::Severity::kERROR, text.c_str());
  return status;
}

// The tactic of a configuration, equal in every library: engines store it, and the order of configurations may change.
int32_t tactic_of(const char* name) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (; *name; ++name) hash = (hash ^ static_cast<unsigned char>(*name)) * 16777619u;
  return static_cast<int32_t>(hash % 2147483600u) + kGemv + 1;
}

// Makes a problem of these sizes, with placeholder addresses of aligned memory.
accel_gemm_problem problem_of(int32_t dtype, int32_t out_dtype, int32_t act, int64_t m, int64_t n, int64_t k) {
  void* const somewhere = reinterpret_cast<void*>(256);
  accel_gemm_problem p{};
  p.a = p.b = p.out = somewhere;
  p.m = m;
  p.n = n;
  p.k = k;
  p.dtype = dtype;
  p.out_dtype = out_dtype;
  p.act = act;
  return p;
}

// Returns the configurations that take a product. ``most_rows``: the most rows that it can ever have.
std::vector<int32_t> tactics_for(const accel_gemm_problem& p, int64_t most_rows) {
  std::vector<int32_t> found;
  for (int config = 0; config < accel_gemm_configs(); ++config) {
    int64_t needed = 0;
    if (accel_gemm_workspace(config, &p, &needed) == ACCEL_OK && needed <= kRoom)
      found.push_back(tactic_of(accel_gemm_config_name(config)));
  }
  if (most_rows <= kSmallM && p.dtype == p.out_dtype) found.push_back(kGemv);
  return found;
}

int small(const accel_gemm_problem& p) {
  return accel_gemv(p.a, p.b, p.out, p.bias, p.residual, p.row_scale, p.col_scale, p.dtype, p.act, p.m, p.n, p.k,
                    p.stream);
}

// Computes a product by the chosen tactic, or if it doesn't take these sizes, by the first tactic that does.
// ``workspace``: kRoom bytes.
int multiply(accel_gemm_problem& p, int32_t tactic, void* workspace) {
  const bool few = p.m <= kSmallM && p.dtype == p.out_dtype;
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
      if (status == ACCEL_OK) return status;
    }
  }
  return few ? small(p) : status;
}

// A layer that its fields describe. ``Made``: the plugin, with kKind and kNames.
template <class Made, size_t kFields>
struct Layer : IPluginV3, IPluginV3OneCore, IPluginV3OneBuild, IPluginV3OneRuntime {
  Layer(std::string given, const Fields<kFields>& s) : name(std::move(given)), spec(s) {
    for (size_t field = 0; field < kFields; ++field)
      fields[field] = PluginField{Made::kNames[field], &spec[field], PluginFieldType::kINT32, 1};
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

  IPluginV3* clone() noexcept override {
    try {
      auto made = std::make_unique<Made>(name, spec);
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
  int32_t getNbTactics() noexcept override { return static_cast<int32_t>(tactics.size()); }

  int32_t getValidTactics(int32_t* found, int32_t count) noexcept override {
    std::copy_n(tactics.begin(), std::min<size_t>(tactics.size(), count), found);
    return 0;
  }

  // TensorRT's own part of the cache key covers the dimensions.
  const char* getTimingCacheID() noexcept override {
    timing_id.clear();
    for (const int32_t value : spec) timing_id += std::to_string(value) + " ";
    return timing_id.c_str();
  }

  int32_t setTactic(int32_t given) noexcept override {
    tactic = given;
    return 0;
  }

  int32_t onShapeChange(const PluginTensorDesc*, int32_t, const PluginTensorDesc*, int32_t) noexcept override {
    return 0;
  }

  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }

  const PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection; }

  int32_t refused(int status) const { return failed(Made::kKind, status); }

  std::string name, timing_id;
  Fields<kFields> spec;
  std::vector<int32_t> tactics;
  int32_t tactic = 0;
  std::array<PluginField, kFields> fields;
  PluginFieldCollection collection;
};

template <class Made, size_t kFields>
struct Creator final : IPluginCreatorV3One {
  // ``fixed``: the name determines the layer, and no field may contradict it.
  Creator(std::string given, const Fields<kFields>& s, bool is_fixed)
      : name(std::move(given)), spec(s), fixed(is_fixed) {
    for (size_t field = 0; field < kFields; ++field)
      fields[field] = PluginField{Made::kNames[field], nullptr, PluginFieldType::kINT32, 1};
    collection.nbFields = kFields;
    collection.fields = fields.data();
  }

  const char* getPluginName() const noexcept override { return name.c_str(); }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection; }

  // Ignores unknown fields, e.g. those that a parser adds. Refuses a field of a wrong type or value.
  IPluginV3* createPlugin(const char*, const PluginFieldCollection* given, TensorRTPhase) noexcept override {
    try {
      Fields<kFields> made = spec;
      for (int32_t at = 0; given && at < given->nbFields; ++at) {
        const PluginField& field = given->fields[at];
        for (size_t known = 0; known < kFields; ++known) {
          if (strcmp(field.name, Made::kNames[known]) != 0) continue;
          if (field.type != PluginFieldType::kINT32 || field.length != 1 || !field.data) return refuse();
          memcpy(&made[known], field.data, sizeof(int32_t));
        }
      }
      if (!Made::valid(made) || (fixed && made != spec)) return refuse();
      return new Made(name, made);
    } catch (const std::exception&) {
      return nullptr;
    }
  }

 private:
  static IPluginV3* refuse() {
    failed(Made::kKind, ACCEL_BAD_CONFIG);
    return nullptr;
  }

  std::string name;
  Fields<kFields> spec;
  bool fixed;
  std::array<PluginField, kFields> fields;
  PluginFieldCollection collection;
};
}  // namespace
