// accel's operators for ONNX Runtime on the CPU: the reference in C++, with fp32 sums (exact sums for int8), the
// epilogue of the GPU kernels, and one rounding. Products with scales, or of int8 and fp8, are the ones that torch's
// export writes (gemm_nn). ONNX Runtime inlines the body of an operator that isn't here.
//
// PackedProduct* alone are made for speed, see onnxruntime_packed.h.
//
// FusedGemm_*, QuantizeRowwise_* and PackedProduct* are always registered. FusedConv2d_* have their sizes in their names, so the
// session options list the ones of a model: custom_op.FusedConv2d.0, custom_op.FusedConv2d.1 and so on.
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "onnxruntime_conv2d.h"
#include "onnxruntime_packed.h"
#include "onnxruntime_values.h"

namespace {
struct Spec {
  std::string name;
  bool matrices, transposed;  // gemm_nn and gemm_nt take only matrices; with gemm_nt, b is (N, K)
  bool bias, row, col, residual;
  int act;
  Type operand, dtype;  // of a and b, of the output

  // The body then computes in fp32, so the bias is fp32.
  bool wide() const { return row || col || operand != dtype; }
  std::vector<Type> inputs() const {
    std::vector<Type> types{operand, operand};
    if (bias) types.push_back(wide() ? kFloat : dtype);
    if (row) types.push_back(kFloat);
    if (col) types.push_back(kFloat);
    if (residual) types.push_back(dtype);
    return types;
  }
};

// Sum: float as on a GPU, or double for int8, whose products it adds exactly.
template <class Out, class Sum>
void compute(const Spec& spec, const Ort::KernelContext& context) {
  const auto a_shape = context.GetInput(0).GetTensorTypeAndShapeInfo().GetShape();
  const auto b_shape = context.GetInput(1).GetTensorTypeAndShapeInfo().GetShape();
  if (b_shape.size() != 2) refuse(spec.name, "b has to be a matrix; leave this library out, the body takes any rank");
  if (a_shape.empty() || (spec.matrices && a_shape.size() != 2)) refuse(spec.name, "a has the wrong rank");
  const int64_t k = a_shape.back(), n = b_shape[spec.transposed ? 0 : 1];
  if (b_shape[spec.transposed ? 1 : 0] != k) refuse(spec.name, "a and b don't agree on K");
  std::vector<int64_t> out_shape = a_shape;
  out_shape.back() = n;
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < a_shape.size(); ++i) rows *= a_shape[i];

  const auto a = widened(context.GetInput(0)), b = widened(context.GetInput(1));
  size_t next = 2;
  const auto bias = vector_of(spec.name, spec.bias, context, next, n, "the bias has to have N elements");
  const auto by_row = vector_of(spec.name, spec.row, context, next, rows, "the row scale has to have M elements");
  const auto by_col = vector_of(spec.name, spec.col, context, next, n, "the column scale has to have N elements");
  const auto residual = residual_of(spec.name, spec.residual, context, next, out_shape);
  Out* out = static_cast<Out*>(context.GetOutput(0, out_shape).GetTensorMutableRawData());
  std::vector<Sum> sums(static_cast<size_t>(n));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < n; ++j) sums[j] = 0;
    for (int64_t i = 0; i < k; ++i) {
      const Sum x = a[row * k + i];
      const float* of = spec.transposed ? &b[i] : &b[i * n];
      const int64_t step = spec.transposed ? k : 1;
      for (int64_t j = 0; j < n; ++j) sums[j] += x * of[j * step];
    }
    for (int64_t j = 0; j < n; ++j) {
      float x = static_cast<float>(sums[j]);
      if (spec.row) x *= by_row[row];
      if (spec.col) x *= by_col[j];
      x = activate(spec.bias ? x + bias[j] : x, spec.act);
      if (spec.residual) x += residual[row * n + j];
      narrow(x, &out[row * n + j]);
    }
  }
}

template <class Out>
void compute(const Spec& spec, const Ort::KernelContext& context) {
  if (spec.operand == kInt8) return compute<Out, double>(spec, context);
  compute<Out, float>(spec, context);
}

void run(const Spec& spec, const Ort::KernelContext& context) {
  if (spec.dtype == kFloat) compute<float>(spec, context);
  if (spec.dtype == kHalf) compute<half_t>(spec, context);
  if (spec.dtype == kBf16) compute<bf16_t>(spec, context);
}

// Quantizes rows to int8 or fp8 with scales, with the arithmetic of quantize_rowwise.cu.
struct Rows {
  std::string name;
  Type source, dtype;
};

void quantize(float ratio, int8_t* q) {
  *q = std::isnan(ratio) ? int8_t(0) : static_cast<int8_t>(std::fmin(std::fmax(std::rint(ratio), -127.0f), 127.0f));
}
void quantize(float ratio, fp8_t* q) { *q = to_fp8(ratio); }

template <class Q>
void quantize_rows(const std::vector<float>& x, int64_t rows, int64_t columns, float largest_q, Q* q, float* scales) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = &x[row * columns];
    float largest = 0.0f;
    for (int64_t i = 0; i < columns; ++i)
      if (std::fabs(from[i]) > largest || std::isnan(from[i])) largest = std::fabs(from[i]);  // keeps NaN
    float scale = largest / largest_q;
    if (scale < 1.1754943508222875e-38f) scale = 1.1754943508222875e-38f;
    scales[row] = largest == 0.0f ? 1.0f : scale;
    for (int64_t i = 0; i < columns; ++i) quantize(from[i] / scales[row], &q[row * columns + i]);
  }
}

void run(const Rows& spec, const Ort::KernelContext& context) {
  const auto shape = context.GetInput(0).GetTensorTypeAndShapeInfo().GetShape();
  if (shape.size() != 2) refuse(spec.name, "x has to be a matrix");
  const auto x = widened(context.GetInput(0));
  void* q = context.GetOutput(0, shape).GetTensorMutableRawData();
  float* scales = context.GetOutput(1, {shape[0]}).GetTensorMutableData<float>();
  if (spec.dtype == kInt8) quantize_rows(x, shape[0], shape[1], 127.0f, static_cast<int8_t*>(q), scales);
  if (spec.dtype == kFp8) quantize_rows(x, shape[0], shape[1], 448.0f, static_cast<fp8_t*>(q), scales);
}

struct FusedGemm : Ort::CustomOpBase<FusedGemm, Kernel<Spec>, true> {
  explicit FusedGemm(Spec given) : spec(std::move(given)), inputs(spec.inputs()) {}
  Spec spec;
  std::vector<Type> inputs;

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo*, void** kernel) const {
    *kernel = new Kernel<Spec>{spec};
    return nullptr;
  }
  const char* GetName() const { return spec.name.c_str(); }
  size_t GetInputTypeCount() const { return inputs.size(); }
  Type GetInputType(size_t at) const { return inputs[at]; }
  size_t GetOutputTypeCount() const { return 1; }
  Type GetOutputType(size_t) const { return spec.dtype; }
};

struct QuantizeRowwise : Ort::CustomOpBase<QuantizeRowwise, Kernel<Rows>, true> {
  explicit QuantizeRowwise(Rows given) : spec(std::move(given)) {}
  Rows spec;

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo*, void** kernel) const {
    *kernel = new Kernel<Rows>{spec};
    return nullptr;
  }
  const char* GetName() const { return spec.name.c_str(); }
  size_t GetInputTypeCount() const { return 1; }
  Type GetInputType(size_t) const { return spec.source; }
  size_t GetOutputTypeCount() const { return 2; }
  Type GetOutputType(size_t at) const { return at == 0 ? spec.dtype : kFloat; }
};

// Every FusedGemm whose name begins like this. accel.kernels.onnx.function makes the names.
void add_epilogues(std::vector<std::unique_ptr<FusedGemm>>& all, const std::string& begins, Spec spec) {
  for (int act = ACCEL_NONE; act <= ACCEL_SILU; ++act)
    for (const auto& [suffix, dtype] : kDtypes) {
      if (dtype != spec.dtype) continue;
      for (const bool bias : {false, true})
        for (const bool residual : {false, true}) {
          spec.name = begins + (bias ? "_bias" : "") + kActs[act] + (residual ? "_residual" : "") + "_" + suffix;
          spec.bias = bias;
          spec.residual = residual;
          spec.act = act;
          all.push_back(std::make_unique<FusedGemm>(spec));
        }
    }
}

std::vector<std::unique_ptr<FusedGemm>> every_gemm() {
  const char* const products[] = {"matmul", "gemm_nn", "gemm_nt"};
  std::vector<std::unique_ptr<FusedGemm>> all;
  for (const auto& [_, dtype] : kDtypes) {
    for (int product = 0; product < 3; ++product)
      add_epilogues(all, std::string("FusedGemm_") + products[product],
                    Spec{"", product != 0, product == 2, false, false, false, false, 0, dtype, dtype});
    for (int scales = 0; scales < 4; ++scales) {
      const bool row = scales & 1, col = scales & 2;
      const std::string named = std::string(row ? "_row" : "") + (col ? "_col" : "");
      if (scales)
        add_epilogues(all, "FusedGemm_gemm_nn" + named, Spec{"", true, false, false, row, col, false, 0, dtype, dtype});
      for (const auto& [own, operand] : kQuantized)
        add_epilogues(all, std::string("FusedGemm_gemm_nn_") + own + named,
                      Spec{"", true, false, false, row, col, false, 0, operand, dtype});
    }
  }
  return all;
}

std::vector<std::unique_ptr<QuantizeRowwise>> every_quantization() {
  std::vector<std::unique_ptr<QuantizeRowwise>> all;
  for (const auto& [from, source] : kDtypes)
    for (const auto& [to, dtype] : kQuantized)
      all.push_back(std::make_unique<QuantizeRowwise>(
          Rows{std::string("QuantizeRowwise_") + from + "_" + to, source, dtype}));
  return all;
}

// The convolutions that the options name. Ignores other names, because a model may have operators of its own.
std::set<std::string> convolutions_of(const Ort::UnownedSessionOptions& options) {
  std::set<std::string> names;
  for (int at = 0;; ++at) {
    const std::string key = "custom_op.FusedConv2d." + std::to_string(at);
    if (!options.HasConfigEntry(key.c_str())) return names;
    if (const std::string name = options.GetConfigEntry(key.c_str()); conv_named(name)) names.insert(name);
  }
}

// The operators of a session with these convolutions. ONNX Runtime keeps pointers to them, so they are never freed.
// They are made once for each set of convolutions.
const Ort::CustomOpDomain& domain_with(const std::set<std::string>& convolutions) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  static const auto gemms = every_gemm();
  static const auto quantizations = every_quantization();
  static const auto packed = every_packed();
  static std::map<std::string, FusedConv2d> made;
  static std::map<std::set<std::string>, Ort::CustomOpDomain> domains;
  if (const auto known = domains.find(convolutions); known != domains.end()) return known->second;
  Ort::CustomOpDomain domain("accel");
  for (const auto& one : gemms) domain.Add(one.get());
  for (const auto& one : quantizations) domain.Add(one.get());
  for (const auto& one : packed) domain.Add(one.get());
  for (const auto& name : convolutions) domain.Add(&made.try_emplace(name, *conv_named(name)).first->second);
  return domains.emplace(convolutions, std::move(domain)).first->second;
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
    Ort::UnownedSessionOptions given(options);
    given.Add(domain_with(convolutions_of(given)));
    return nullptr;
  } catch (const std::exception& error) {
    return Ort::Status(error).release();
  }
}
