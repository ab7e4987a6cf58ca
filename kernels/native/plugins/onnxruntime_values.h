// The shared parts of accel's operators for ONNX Runtime: element types, tensors widened to fp32, the frame of a
// kernel.
#pragma once
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include <cmath>
#include <string>
#include <vector>

#include "../csrc/activate.cuh"

namespace {
using Type = ONNXTensorElementDataType;
constexpr Type kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, kHalf = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
               kBf16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, kInt8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
               kFp8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN;

// The spelling of accel.kernels.onnx.function. The activations are in the order of ACCEL_NONE to ACCEL_SILU.
const std::pair<const char*, Type> kDtypes[] = {{"fp32", kFloat}, {"fp16", kHalf}, {"bf16", kBf16}};
const std::pair<const char*, Type> kQuantized[] = {{"int8", kInt8}, {"fp8_e4m3", kFp8}};
const char* const kActs[] = {"", "_relu", "_gelu_tanh", "_gelu_erf", "_silu"};

[[noreturn]] void refuse(const std::string& name, const char* why) {
  throw Ort::Exception("accel::" + name + ": " + why, ORT_INVALID_ARGUMENT);
}

float widen(int8_t x) { return x; }
float widen(fp8_t x) {
  const int exponent = x.bits >> 3 & 15, fraction = x.bits & 7;
  float value = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(1.0f * fraction, -9);
  if ((x.bits & 0x7f) == 0x7f) value = std::nanf("");
  return x.bits & 0x80 ? -value : value;
}
using ::widen;

template <class T>
std::vector<float> widened_as(const Ort::ConstValue& value) {
  const T* from = static_cast<const T*>(value.GetTensorRawData());
  const size_t count = value.GetTensorTypeAndShapeInfo().GetElementCount();
  std::vector<float> wide(count);
  for (size_t i = 0; i < count; ++i) wide[i] = widen(from[i]);
  return wide;
}

std::vector<float> widened(const Ort::ConstValue& value) {
  switch (value.GetTensorTypeAndShapeInfo().GetElementType()) {
    case kHalf: return widened_as<half_t>(value);
    case kBf16: return widened_as<bf16_t>(value);
    case kInt8: return widened_as<int8_t>(value);
    case kFp8: return widened_as<fp8_t>(value);
    default: return widened_as<float>(value);
  }
}

// Reads the next input as a vector operand of ``count`` elements, or returns an empty vector if it is absent.
std::vector<float> vector_of(const std::string& name, bool there, const Ort::KernelContext& context, size_t& next,
                             int64_t count, const char* wrong) {
  if (!there) return {};
  std::vector<float> found = widened(context.GetInput(next++));
  if (static_cast<int64_t>(found.size()) != count) refuse(name, wrong);
  return found;
}

// Reads the last input as the residual, with the output's shape, or returns an empty vector if it is absent.
std::vector<float> residual_of(const std::string& name, bool there, const Ort::KernelContext& context, size_t next,
                               const std::vector<int64_t>& shape) {
  if (!there) return {};
  if (context.GetInput(next).GetTensorTypeAndShapeInfo().GetShape() != shape)
    refuse(name, "the residual has to have the shape of the output");
  return widened(context.GetInput(next));
}

template <class What>
struct Kernel {
  const What& spec;

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) {
    try {
      run(spec, Ort::KernelContext(raw));
      return nullptr;
    } catch (const std::exception& error) {
      return Ort::Status(error).release();
    }
  }
};
}  // namespace
