// accel::PackedProduct* for ONNX Runtime: products with packed int4 and int8 weights, by the kernels of native/cpu, in the
// threads of the session. accel.kernels.onnx.packed makes the names, the attributes and the function bodies.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "../cpu/csrc/packed_product.h"
#include "onnxruntime_values.h"

namespace {
// A piece of work reads about this many bytes of weights, so that a thread that is late takes fewer pieces.
constexpr int64_t kPieceBytes = 1 << 16;

struct PackedForm {
  std::string name;
  int parts;
  bool gated, residual;
};

struct PackedKernel {
  const PackedForm& form;
  int64_t k, groups, blocks, block, bits;
  float gain;
  std::vector<int64_t> sizes;

  PackedKernel(const PackedForm& given, const Ort::ConstKernelInfo& info)
      : form(given),
        k(info.GetAttribute<int64_t>("K")),
        groups(info.GetAttribute<int64_t>("N") / 16),
        block(info.GetAttribute<int64_t>("block_size")),
        bits(info.GetAttribute<int64_t>("bits")),
        gain(info.GetAttributes<float>("gain").at(0)) {
    int64_t next = 0;
    for (int part = 0; part < form.parts; ++part) {
      const auto begin = info.GetAttributes<int64_t>(("begin_" + std::to_string(part)).c_str());
      const auto end = info.GetAttributes<int64_t>(("end_" + std::to_string(part)).c_str());
      if (begin.size() != 1 || end.size() != 1 || begin[0] != next * 16 || end[0] <= begin[0])
        refuse(form.name, "the matrices don't follow one another");
      sizes.push_back(end[0] - begin[0]);
      next += (sizes.back() + 15) / 16;
    }
    if (next != groups || block < 1 || k < 1) refuse(form.name, "N isn't the number of outputs of all matrices");
    blocks = (k + block - 1) / block;
  }

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) {
    try {
      run(Ort::KernelContext(raw));
      return nullptr;
    } catch (const std::exception& error) {
      return Ort::Status(error).release();
    }
  }

  void run(const Ort::KernelContext& context) const {
    const auto x = context.GetInput(0);
    std::vector<int64_t> shape = x.GetTensorTypeAndShapeInfo().GetShape();
    if (shape.empty() || shape.back() != k) refuse(form.name, "the last dim of x isn't K");
    const auto weights = context.GetInput(1), scales = context.GetInput(2);
    expect(weights, {groups, blocks * block * bits / 32, 16, 4}, "the weights don't have the packed form");
    expect(scales, {groups, blocks, 16}, "the scales don't have the packed form");
    accel_cpu_product product{};
    product.rows = 1;
    for (size_t i = 0; i + 1 < shape.size(); ++i) product.rows *= shape[i];
    product.x = x.GetTensorData<float>();
    product.weights = weights.GetTensorRawData();
    product.scales = static_cast<const uint16_t*>(scales.GetTensorRawData());
    product.k = k;
    product.parts = form.parts;
    product.bits = static_cast<int32_t>(bits);
    product.block = static_cast<int32_t>(block);
    product.gated = form.gated;
    product.gain = gain;
    for (int part = 0; part < form.parts; ++part) {
      product.sizes[part] = shape.back() = sizes[part];
      if (part == 0 || !form.gated) product.out[part] = context.GetOutput(part, shape).GetTensorMutableData<float>();
    }
    if (form.residual) {
      shape.back() = sizes[0];
      expect(context.GetInput(3), shape, "the residual has to have the shape of the output");
      product.residual = context.GetInput(3).GetTensorData<float>();
    }
    if (product.rows == 0) return;
    if (accel_cpu_check(&product)) refuse(form.name, "the kernels don't support this form");
    compute(product, context);
  }

  void expect(const Ort::ConstValue& value, const std::vector<int64_t>& shape, const char* wrong) const {
    if (value.GetTensorTypeAndShapeInfo().GetShape() != shape) refuse(form.name, wrong);
  }

  void compute(const accel_cpu_product& product, const Ort::KernelContext& context) const {
    static thread_local std::vector<char> scratch;  // grows to the largest product of the thread
    const auto bytes = static_cast<size_t>(accel_cpu_scratch_bytes(&product));
    if (scratch.size() < bytes) scratch.resize(bytes);
    struct Work {
      const accel_cpu_product& product;
      const void* scratch;
      int kernel;
      int64_t tasks, piece;
    } work{product, scratch.data(), accel_cpu_best(), accel_cpu_tasks(&product), 1};
    const int64_t task_bytes = blocks * block * bits * 2 * (form.gated ? 2 : 1);
    work.piece = std::max<int64_t>(1, kPieceBytes / task_bytes);
    accel_cpu_quantize(&product, work.kernel, scratch.data());
    const auto some = [](void* given, size_t at) {
      const Work& work = *static_cast<const Work*>(given);
      const int64_t first = static_cast<int64_t>(at) * work.piece;
      accel_cpu_compute(&work.product, work.kernel, work.scratch, first, std::min(first + work.piece, work.tasks));
    };
    const auto pieces = static_cast<size_t>((work.tasks + work.piece - 1) / work.piece);
    context.ParallelFor(some, pieces, 0, &work);
  }
};

struct PackedProduct : Ort::CustomOpBase<PackedProduct, PackedKernel, true> {
  explicit PackedProduct(PackedForm given) : form(std::move(given)) {}
  PackedForm form;

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    try {
      *kernel = new PackedKernel(form, Ort::ConstKernelInfo(info));
      return nullptr;
    } catch (const std::exception& error) {
      return Ort::Status(error).release();
    }
  }
  const char* GetName() const { return form.name.c_str(); }
  size_t GetInputTypeCount() const { return form.residual ? 4 : 3; }
  Type GetInputType(size_t at) const {
    return at == 1 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 : at == 2 ? kHalf : kFloat;
  }
  size_t GetOutputTypeCount() const { return form.gated ? 1 : form.parts; }
  Type GetOutputType(size_t) const { return kFloat; }
};

std::vector<std::unique_ptr<PackedProduct>> every_packed() {
  std::vector<std::unique_ptr<PackedProduct>> all;
  for (int parts = 1; parts <= ACCEL_CPU_MOST_PARTS; ++parts)
    all.push_back(std::make_unique<PackedProduct>(
        PackedForm{parts == 1 ? "PackedProduct" : "PackedProduct_" + std::to_string(parts), parts, false, false}));
  all.push_back(std::make_unique<PackedProduct>(PackedForm{"PackedProduct_gated", 2, true, false}));
  all.push_back(std::make_unique<PackedProduct>(PackedForm{"PackedProduct_residual", 1, false, true}));
  return all;
}
}  // namespace
