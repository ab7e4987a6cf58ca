// accel::FusedConv2d_* on the CPU, in ONNX's layout: the reference in C++, with fp32 sums, the epilogue of the GPU
// kernels, and one rounding. An operator gets everything from its name: also its kernel, stride, padding and dilation.
#pragma once
#include <algorithm>
#include <array>
#include <optional>
#include <regex>

#include "onnxruntime_values.h"

namespace {
using Pair = std::array<int64_t, 2>;  // height, width

struct Conv {
  std::string name;
  Pair kernel, stride, padding, dilation;
  bool bias, residual;
  int act;
  Type dtype;  // of everything
};

// Returns the convolution of a name that accel.kernels.onnx.function made, or nothing for another name.
std::optional<Conv> conv_named(const std::string& name) {
  static const std::regex form(
      "FusedConv2d_k(\\d{1,9})x(\\d{1,9})_s(\\d{1,9})x(\\d{1,9})_p(\\d{1,9})x(\\d{1,9})_d(\\d{1,9})x(\\d{1,9})"
      "(_bias)?(_relu|_gelu_tanh|_gelu_erf|_silu)?(_residual)?_(fp32|fp16|bf16)");
  std::smatch found;
  if (!std::regex_match(name, found, form)) return {};
  Conv made{};
  made.name = name;
  Pair* const pairs[] = {&made.kernel, &made.stride, &made.padding, &made.dilation};
  for (size_t at = 0; at < 8; ++at) (*pairs[at / 2])[at % 2] = std::stoll(found[1 + at].str());
  for (const Pair& pair : {made.kernel, made.stride, made.dilation})
    if (std::min(pair[0], pair[1]) < 1) return {};
  made.bias = found[9].matched;
  made.act = static_cast<int>(std::find(std::begin(kActs), std::end(kActs), found[10].str()) - std::begin(kActs));
  made.residual = found[11].matched;
  for (const auto& [text, dtype] : kDtypes)
    if (found[12].str() == text) made.dtype = dtype;
  return made;
}

// Computes one channel of one output image: the sum over the input's channels and the kernel's taps.
void accumulate(const Conv& spec, const float* image, const float* weight, int64_t channels, const Pair& size,
                const Pair& out, std::vector<float>& sums) {
  std::fill(sums.begin(), sums.end(), 0.0f);
  for (int64_t tap = 0; tap < channels * spec.kernel[0] * spec.kernel[1]; ++tap) {
    const int64_t j = tap % spec.kernel[1], i = tap / spec.kernel[1] % spec.kernel[0];
    const float* const plane = image + tap / (spec.kernel[0] * spec.kernel[1]) * size[0] * size[1];
    for (int64_t oh = 0; oh < out[0]; ++oh) {
      const int64_t h = oh * spec.stride[0] - spec.padding[0] + i * spec.dilation[0];
      if (h < 0 || h >= size[0]) continue;
      for (int64_t ow = 0; ow < out[1]; ++ow) {
        const int64_t w = ow * spec.stride[1] - spec.padding[1] + j * spec.dilation[1];
        if (w >= 0 && w < size[1]) sums[oh * out[1] + ow] += weight[tap] * plane[h * size[1] + w];
      }
    }
  }
}

template <class Out>
void convolve(const Conv& spec, const Ort::KernelContext& context) {
  const auto shape = context.GetInput(0).GetTensorTypeAndShapeInfo().GetShape();
  const auto of = context.GetInput(1).GetTensorTypeAndShapeInfo().GetShape();
  if (shape.size() != 4 || of.size() != 4) refuse(spec.name, "x and the weight have to have four axes");
  if (of[1] != shape[1]) refuse(spec.name, "x and the weight don't agree on the channels");
  Pair size, out_size;
  for (size_t axis = 0; axis < 2; ++axis) {
    if (of[2 + axis] != spec.kernel[axis]) refuse(spec.name, "the weight is of another kernel than the name says");
    size[axis] = shape[2 + axis];
    const int64_t room = size[axis] + 2 * spec.padding[axis] - spec.dilation[axis] * (spec.kernel[axis] - 1) - 1;
    if (room < 0) refuse(spec.name, "the kernel is larger than the padded image");
    out_size[axis] = room / spec.stride[axis] + 1;
  }
  const std::vector<int64_t> out_shape{shape[0], of[0], out_size[0], out_size[1]};
  const auto x = widened(context.GetInput(0)), weight = widened(context.GetInput(1));
  size_t next = 2;
  const auto bias = vector_of(spec.name, spec.bias, context, next, of[0], "the bias has to have an element a channel");
  const auto residual = residual_of(spec.name, spec.residual, context, next, out_shape);
  Out* out = static_cast<Out*>(context.GetOutput(0, out_shape).GetTensorMutableRawData());
  std::vector<float> sums(static_cast<size_t>(out_size[0] * out_size[1]));
  const int64_t pixels = static_cast<int64_t>(sums.size());
  for (int64_t plane = 0; plane < shape[0] * of[0]; ++plane) {
    const int64_t image = plane / of[0], channel = plane % of[0];
    accumulate(spec, x.data() + image * shape[1] * size[0] * size[1],
               weight.data() + channel * of[1] * of[2] * of[3], shape[1], size, out_size, sums);
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      const int64_t at = plane * pixels + pixel;
      float y = activate(spec.bias ? sums[pixel] + bias[channel] : sums[pixel], spec.act);
      if (spec.residual) y += residual[at];
      narrow(y, &out[at]);
    }
  }
}

void run(const Conv& spec, const Ort::KernelContext& context) {
  if (spec.dtype == kFloat) convolve<float>(spec, context);
  if (spec.dtype == kHalf) convolve<half_t>(spec, context);
  if (spec.dtype == kBf16) convolve<bf16_t>(spec, context);
}

struct FusedConv2d : Ort::CustomOpBase<FusedConv2d, Kernel<Conv>, true> {
  explicit FusedConv2d(Conv given) : spec(std::move(given)) {}
  Conv spec;

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo*, void** kernel) const {
    *kernel = new Kernel<Conv>{spec};
    return nullptr;
  }
  const char* GetName() const { return spec.name.c_str(); }
  size_t GetInputTypeCount() const { return 2 + spec.bias + spec.residual; }
  Type GetInputType(size_t) const { return spec.dtype; }
  size_t GetOutputTypeCount() const { return 1; }
  Type GetOutputType(size_t) const { return spec.dtype; }
};
}  // namespace
