// A STUB, NOT TENSORRT. The stub has the part of TensorRT 10's plugin interface (IPluginV3) that accel's plugin uses,
// written for the tests from TensorRT's documentation. The names and signatures let the plugin compile and run. The
// stub shares no memory layout with the real library, and doesn't imitate TensorRT's behavior.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace nvinfer1 {
using AsciiChar = char;
enum class DataType : int32_t { kFLOAT = 0, kHALF = 1, kINT8 = 2, kINT32 = 3, kFP8 = 6, kBF16 = 7 };
enum class TensorFormat : int32_t { kLINEAR = 0, kHWC8 = 2, kCHW32 = 5 };
enum class DimensionOperation : int32_t { kSUM = 0, kPROD = 1, kFLOOR_DIV = 7 };
enum class PluginFieldType : int32_t { kFLOAT32 = 1, kINT32 = 5, kUNKNOWN = 8 };
enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };
enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };

struct Dims {
  static constexpr int32_t MAX_DIMS = 8;
  int32_t nbDims;
  int64_t d[MAX_DIMS];
};
struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
  float scale;
};
struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
  Dims min, max, opt;
};
class IDimensionExpr;
namespace apiv {
class VDimensionExpr {
 public:
  virtual bool isConstant() const = 0;
  virtual int64_t getConstantValue() const = 0;
  virtual bool isSizeTensor() const = 0;
};
class VExprBuilder {
 public:
  virtual const IDimensionExpr* constant(int64_t value) = 0;
  virtual const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& a, const IDimensionExpr& b) = 0;
  virtual const IDimensionExpr* declareSizeTensor(int32_t at, const IDimensionExpr& opt, const IDimensionExpr& upper) = 0;
};
}  // namespace apiv
class IDimensionExpr {
 public:
  int64_t getConstantValue() const noexcept { return mImpl->getConstantValue(); }

 protected:
  apiv::VDimensionExpr* mImpl;
  virtual ~IDimensionExpr() noexcept = default;
};
class IExprBuilder {
 public:
  const IDimensionExpr* constant(int64_t value) noexcept { return mImpl->constant(value); }
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& a, const IDimensionExpr& b) noexcept {
    return mImpl->operation(op, a, b);
  }

 protected:
  apiv::VExprBuilder* mImpl;
  virtual ~IExprBuilder() noexcept = default;
};
struct DimsExprs {
  int32_t nbDims;
  const IDimensionExpr* d[Dims::MAX_DIMS];
};
struct PluginField {
  const AsciiChar* name;
  const void* data;
  PluginFieldType type;
  int32_t length;
};
struct PluginFieldCollection {
  int32_t nbFields;
  const PluginField* fields;
};

class ILogger {
 public:
  enum class Severity : int32_t { kINTERNAL_ERROR = 0, kERROR = 1 };
  virtual void log(Severity severity, const AsciiChar* message) noexcept = 0;
  virtual ~ILogger() = default;
};
class ILoggerFinder {
 public:
  virtual ILogger* findLogger() = 0;
  virtual ~ILoggerFinder() = default;
};

class IVersionedInterface {
 public:
  virtual ~IVersionedInterface() noexcept = default;
};
class IPluginResourceContext {};
class IPluginCapability : public IVersionedInterface {};
class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
 public:
  virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
  virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
 public:
  virtual const AsciiChar* getPluginName() const noexcept = 0;
  virtual const AsciiChar* getPluginVersion() const noexcept = 0;
  virtual const AsciiChar* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
 public:
  virtual int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t inputs, const DynamicPluginTensorDesc* out,
                                  int32_t outputs) noexcept = 0;
  virtual int32_t getOutputDataTypes(DataType* types, int32_t outputs, const DataType* given,
                                     int32_t inputs) const noexcept = 0;
  virtual int32_t getOutputShapes(const DimsExprs* in, int32_t inputs, const DimsExprs* shapes, int32_t shape_inputs,
                                  DimsExprs* out, int32_t outputs, IExprBuilder& builder) noexcept = 0;
  virtual bool supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* all, int32_t inputs,
                                         int32_t outputs) noexcept = 0;
  virtual int32_t getNbOutputs() const noexcept = 0;
  virtual size_t getWorkspaceSize(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*,
                                  int32_t) const noexcept {
    return 0;
  }
  virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
  virtual int32_t getNbTactics() noexcept { return 0; }
  virtual const char* getTimingCacheID() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
 public:
  virtual int32_t setTactic(int32_t) noexcept { return 0; }
  virtual int32_t onShapeChange(const PluginTensorDesc* in, int32_t inputs, const PluginTensorDesc* out,
                                int32_t outputs) noexcept = 0;
  virtual int32_t enqueue(const PluginTensorDesc* in, const PluginTensorDesc* out, const void* const* inputs,
                          void* const* outputs, void* workspace, cudaStream_t stream) noexcept = 0;
  virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
  virtual const PluginFieldCollection* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
 public:
  virtual const AsciiChar* getPluginName() const noexcept = 0;
  virtual const AsciiChar* getPluginVersion() const noexcept = 0;
  virtual const AsciiChar* getPluginNamespace() const noexcept = 0;
  virtual const PluginFieldCollection* getFieldNames() noexcept = 0;
  virtual IPluginV3* createPlugin(const AsciiChar* name, const PluginFieldCollection* fields,
                                  TensorRTPhase phase) noexcept = 0;
};
}  // namespace nvinfer1
