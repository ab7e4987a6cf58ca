// accel::FusedGemm_* as operators of ONNX Runtime on the CPU: the reference in C++, fp32 sums and epilogue as on a GPU,
// one rounding. Those with scales are not here: ONNX Runtime inlines their bodies.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include <memory>
#include <string>
#include <vector>

#include "../csrc/activate.cuh"

namespace {
struct Spec {
  std::string name;
  bool matrices, transposed;  // gemm_nn and gemm_nt take matrices only; of gemm_nt, b is (N, K)
  bool bias, residual;
  int act;
  ONNXTensorElementDataType dtype;
};

[[noreturn]] void refuse(const Spec& spec, const char* why) {
  throw Ort::Exception("accel::" + spec.name + ": " + why, ORT_INVALID_ARGUMENT);
}

template <class T>
std::vector<float> widened(const Ort::ConstValue& value) {
  const T* from = static_cast<const T*>(value.GetTensorRawData());
  const size_t count = value.GetTensorTypeAndShapeInfo().GetElementCount();
  std::vector<float> wide(count);
  for (size_t i = 0; i < count; ++i) wide[i] = widen(from[i]);
  return wide;
}

template <class T>
void compute(const Spec& spec, const Ort::KernelContext& context) {
  const auto a_shape = context.GetInput(0).GetTensorTypeAndShapeInfo().GetShape();
  const auto b_shape = context.GetInput(1).GetTensorTypeAndShapeInfo().GetShape();
  if (b_shape.size() != 2) refuse(spec, "b has to be a matrix; leave this library out, the body takes any rank");
  if (a_shape.empty() || (spec.matrices && a_shape.size() != 2)) refuse(spec, "a has the wrong rank");
  const int64_t k = a_shape.back(), n = b_shape[spec.transposed ? 0 : 1];
  if (b_shape[spec.transposed ? 1 : 0] != k) refuse(spec, "a and b don't agree on K");
  std::vector<int64_t> out_shape = a_shape;
  out_shape.back() = n;
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < a_shape.size(); ++i) rows *= a_shape[i];

  const auto a = widened<T>(context.GetInput(0)), b = widened<T>(context.GetInput(1));
  std::vector<float> bias, residual;
  size_t next = 2;
  if (spec.bias) {
    bias = widened<T>(context.GetInput(next++));
    if (static_cast<int64_t>(bias.size()) != n) refuse(spec, "the bias has to have N elements");
  }
  if (spec.residual) {
    if (context.GetInput(next).GetTensorTypeAndShapeInfo().GetShape() != out_shape)
      refuse(spec, "the residual has to have the shape of the output");
    residual = widened<T>(context.GetInput(next));
  }
  T* out = static_cast<T*>(context.GetOutput(0, out_shape).GetTensorMutableRawData());
  std::vector<float> sums(static_cast<size_t>(n));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < n; ++j) sums[j] = 0.0f;
    for (int64_t i = 0; i < k; ++i) {
      const float x = a[row * k + i];
      const float* of = spec.transposed ? &b[i] : &b[i * n];
      const int64_t step = spec.transposed ? k : 1;
      for (int64_t j = 0; j < n; ++j) sums[j] += x * of[j * step];
    }
    for (int64_t j = 0; j < n; ++j) {
      float x = activate(spec.bias ? sums[j] + bias[j] : sums[j], spec.act);
      if (spec.residual) x += residual[row * n + j];
      narrow(x, &out[row * n + j]);
    }
  }
}

struct Kernel {
  const Spec& spec;

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) {
    try {
      const Ort::KernelContext context(raw);
      if (spec.dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) compute<float>(spec, context);
      if (spec.dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) compute<half_t>(spec, context);
      if (spec.dtype == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16) compute<bf16_t>(spec, context);
      return nullptr;
    } catch (const std::exception& error) {
      return Ort::Status(error).release();
    }
  }
};

struct FusedGemm : Ort::CustomOpBase<FusedGemm, Kernel, true> {
  explicit FusedGemm(Spec given) : spec(std::move(given)) {}
  Spec spec;

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo*, void** kernel) const {
    *kernel = new Kernel{spec};
    return nullptr;
  }
  const char* GetName() const { return spec.name.c_str(); }
  size_t GetInputTypeCount() const { return 2u + spec.bias + spec.residual; }
  ONNXTensorElementDataType GetInputType(size_t) const { return spec.dtype; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return spec.dtype; }
};

// Every name that accel.kernels.onnx_function gives a FusedGemm without scales.
std::vector<std::unique_ptr<FusedGemm>> every() {
  const char* const products[] = {"matmul", "gemm_nn", "gemm_nt"};
  const char* const acts[] = {"", "_relu", "_gelu_tanh", "_gelu_erf", "_silu"};  // in the order of ACCEL_NONE to SILU
  const std::pair<const char*, ONNXTensorElementDataType> dtypes[] = {{"_fp32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
                                                                      {"_fp16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
                                                                      {"_bf16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}};
  std::vector<std::unique_ptr<FusedGemm>> all;
  for (int product = 0; product < 3; ++product)
    for (int act = ACCEL_NONE; act <= ACCEL_SILU; ++act)
      for (const auto& [suffix, dtype] : dtypes)
        for (const bool bias : {false, true})
          for (const bool residual : {false, true}) {
            const std::string name = std::string("FusedGemm_") + products[product] + (bias ? "_bias" : "") + acts[act] +
                                     (residual ? "_residual" : "") + suffix;
            all.push_back(std::make_unique<FusedGemm>(
                Spec{name, product != 0, product == 2, bias, residual, act, dtype}));
          }
  return all;
}
}  // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                                const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (!api)
    return base->GetApi(1)->CreateStatus(
        ORT_FAIL, "this ONNX Runtime is older than the headers accel's operators were built with; build them again");
  Ort::InitApi(api);
  try {
    static const auto operators = every();  // ONNX Runtime keeps pointers to both
    static const auto domain = [] {
      Ort::CustomOpDomain made("accel");
      for (const auto& one : operators) made.Add(one.get());
      return made;
    }();
    Ort::UnownedSessionOptions(options).Add(domain);
    return nullptr;
  } catch (const std::exception& error) {
    return Ort::Status(error).release();
  }
}
