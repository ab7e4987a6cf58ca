// accel::FusedConv2d as a plugin of TensorRT. The inputs are x, the weight, then bias and residual if they exist, in
// fp16 or bf16. Images are NHWC and weights OHWI, which is TensorRT's kHWC8 if the channels are a multiple of 8. The
// plugin multiplies the patches of some images at a time.
#pragma once
#include "tensorrt_layer.h"

namespace {
// The bytes of patches in memory at a time, at least of one image. The patches of an image are as many times larger
// than it as the kernel has taps.
constexpr int64_t kPatchBytes = 256 << 20;
constexpr int64_t kVector = 8;  // channels: 16 bytes, which is also how the products load them

struct Conv2d final : Layer<Conv2d, 12> {
  enum Field {
    kAct, kBias, kResidual, kDtype, kKernel, kKernelW, kStride, kStrideW, kPadding, kPaddingW, kDilation, kDilationW
  };
  using Spec = Fields<12>;
  static constexpr const char* kKind = "FusedConv2d";
  static constexpr const char* kNames[] = {"act",      "bias",     "residual",  "dtype",     "kernel_h",   "kernel_w",
                                           "stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w"};
  using Layer::Layer;

  static bool valid(const Spec& s) {
    for (const Field flag : {kBias, kResidual})
      if (s[flag] != 0 && s[flag] != 1) return false;
    for (int at = kKernel; at <= kDilationW; ++at)
      if (s[at] < (at == kPadding || at == kPaddingW ? 0 : 1)) return false;
    const bool typed = s[kDtype] == ACCEL_FP16 || s[kDtype] == ACCEL_BF16;
    return typed && s[kAct] >= ACCEL_NONE && s[kAct] <= ACCEL_SILU;
  }

  int32_t inputs() const { return 2 + spec[kBias] + spec[kResidual]; }

  int32_t getOutputDataTypes(DataType* types, int32_t, const DataType*, int32_t) const noexcept override {
    types[0] = type_of(spec[kDtype]);
    return 0;
  }

  int32_t getOutputShapes(const DimsExprs* in, int32_t count, const DimsExprs*, int32_t, DimsExprs* out, int32_t,
                          IExprBuilder& builder) noexcept override {
    if (count != inputs() || in[0].nbDims != 4 || in[1].nbDims != 4) return refused(ACCEL_BAD_SIZE);
    out[0].nbDims = 4;
    out[0].d[0] = in[0].d[0];
    out[0].d[1] = in[1].d[0];
    for (int axis = 0; axis < 2; ++axis) {
      const auto calculate = [&](DimensionOperation operation, const IDimensionExpr* size, int64_t by) {
        return builder.operation(operation, *size, *builder.constant(by));
      };
      const auto* room = calculate(DimensionOperation::kSUM, in[0].d[2 + axis], around(axis));
      const auto* steps = calculate(DimensionOperation::kFLOOR_DIV, room, spec[kStride + axis]);
      out[0].d[2 + axis] = calculate(DimensionOperation::kSUM, steps, 1);
    }
    return 0;
  }

  // All inputs but the bias are images or weights, with the channels as second dimension.
  bool supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* all, int32_t count,
                                 int32_t) noexcept override {
    if (count != inputs() || at > count || all[at].desc.type != type_of(spec[kDtype])) return false;
    const PluginTensorDesc& tensor = all[at].desc;
    if (spec[kBias] && at == 2) return tensor.format == TensorFormat::kLINEAR;
    return tensor.format == TensorFormat::kHWC8 && tensor.dims.nbDims == 4 && tensor.dims.d[1] > 0 &&
           tensor.dims.d[1] % kVector == 0;
  }

  int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) noexcept override {
    try {
      const Work opt = work(in[0].opt, in[1].opt), most = work(in[0].max, in[1].max);
      tactics = tactics_for(opt.product, most.images * most.pixels);
      return 0;
    } catch (const std::exception&) {
      return refused(ACCEL_NO_WORKSPACE);
    }
  }

  // Fewer or smaller images never need more than the largest.
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* in, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    const Work most = work(in[0].max, in[1].max);
    const int64_t patches = std::min(most.images * most.patch_bytes, std::max(kPatchBytes, most.patch_bytes));
    return static_cast<size_t>(bias_bytes(most.product.n) + padded(patches) + kRoom);
  }

  int32_t enqueue(const PluginTensorDesc* in, const PluginTensorDesc*, const void* const* data, void* const* out,
                  void* workspace, cudaStream_t stream) noexcept override {
    const Dims &x = in[0].dims, &weight = in[1].dims;
    if (x.nbDims != 4 || weight.nbDims != 4 || x.d[1] != weight.d[1]) return refused(ACCEL_BAD_SIZE);
    if (weight.d[2] != spec[kKernel] || weight.d[3] != spec[kKernelW]) return refused(ACCEL_BAD_SIZE);
    Work w = work(x, weight);
    if (w.images == 0) return 0;
    if (w.pixels < 1) return refused(ACCEL_BAD_SIZE);
    accel_gemm_problem& p = w.product;
    char* const in_front = static_cast<char*>(workspace);
    char* const patches = in_front + bias_bytes(p.n);
    char* const rest = patches + padded(w.at_once * w.patch_bytes);
    p.stream = stream;
    p.b = data[1];
    if (spec[kBias]) {
      p.bias = reinterpret_cast<const float*>(in_front);
      if (const int status = accel_widen(data[2], spec[kDtype], reinterpret_cast<float*>(in_front), p.n, stream))
        return refused(status);
    }
    const auto* const added = spec[kResidual] ? static_cast<const char*>(data[2 + spec[kBias]]) : nullptr;
    for (int64_t first = 0; first < w.images; first += w.at_once) {
      const int64_t images = std::min(w.at_once, w.images - first);
      const char* const image = static_cast<const char*>(data[0]) + first * x.d[1] * x.d[2] * x.d[3] * 2;
      const int64_t done = first * w.pixels * p.n * 2;
      p.m = images * w.pixels;
      p.a = w.patch_bytes ? patches : image;
      p.out = static_cast<char*>(out[0]) + done;
      p.residual = added ? added + done : nullptr;
      int status = ACCEL_OK;
      if (w.patch_bytes)
        status = accel_im2col(image, patches, 2, images, x.d[2], x.d[3], x.d[1], &spec[kKernel], stream);
      if (status == ACCEL_OK) status = multiply(p, tactic, rest);
      if (status != ACCEL_OK) return refused(status);
    }
    return 0;
  }

 private:
  // ``product``: of ``at_once`` images. ``patch_bytes``: of one image, or 0 if the image is already its patches.
  struct Work {
    int64_t images, pixels, patch_bytes, at_once;
    accel_gemm_problem product;
  };

  // The padding of an axis minus the extent of the kernel.
  int64_t around(int axis) const {
    return 2 * static_cast<int64_t>(spec[kPadding + axis]) -
           (static_cast<int64_t>(spec[kDilation + axis]) * (spec[kKernel + axis] - 1) + 1);
  }

  int64_t out_size(int axis, int64_t size) const {
    const int64_t room = size + around(axis);
    return room < 0 ? 0 : room / spec[kStride + axis] + 1;
  }

  Work work(const Dims& x, const Dims& weight) const {
    Work w{};
    w.images = x.d[0];
    w.pixels = out_size(0, x.d[2]) * out_size(1, x.d[3]);
    const int64_t k = weight.d[1] * spec[kKernel] * spec[kKernelW];
    bool pointwise = true;
    for (const Field one : {kKernel, kKernelW, kStride, kStrideW}) pointwise = pointwise && spec[one] == 1;
    pointwise = pointwise && spec[kPadding] == 0 && spec[kPaddingW] == 0;
    w.patch_bytes = pointwise ? 0 : w.pixels * k * 2;
    w.at_once = w.images;
    if (w.patch_bytes) w.at_once = std::min(w.images, std::max<int64_t>(1, kPatchBytes / w.patch_bytes));
    w.product = problem_of(spec[kDtype], spec[kDtype], spec[kAct], w.at_once * w.pixels, weight.d[0], k);
    return w;
  }

  int64_t bias_bytes(int64_t n) const { return spec[kBias] ? padded(n * 4) : 0; }
};
}  // namespace
