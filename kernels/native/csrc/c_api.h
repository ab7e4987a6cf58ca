// The C interface of the compiled kernels. The library loads without a GPU. Every call returns a status and never
// throws.
#ifndef ACCEL_KERNELS_C_API_H
#define ACCEL_KERNELS_C_API_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

enum {
  ACCEL_OK = 0,
  ACCEL_NULL_POINTER = 1,
  ACCEL_BAD_SIZE = 2,
  ACCEL_BAD_DTYPE = 3,
  ACCEL_BAD_ACT = 4,
  ACCEL_NO_DEVICE = 5,
  ACCEL_LAUNCH_FAILED = 6,
  ACCEL_BAD_CONFIG = 7,
  ACCEL_UNALIGNED = 8,
  ACCEL_WRONG_ARCH = 9,
  ACCEL_NO_WORKSPACE = 10
};
enum { ACCEL_FP32 = 0, ACCEL_FP16 = 1, ACCEL_BF16 = 2, ACCEL_INT8 = 3, ACCEL_FP8 = 4 };
enum { ACCEL_NONE = 0, ACCEL_RELU = 1, ACCEL_GELU_TANH = 2, ACCEL_GELU_ERF = 3, ACCEL_SILU = 4 };

int accel_abi_version(void);
const char* accel_status_message(int status);

// x (rows, columns) in dtype, rows row_stride elements apart -> q (rows, columns) dense, scales fp32 (rows).
// q_dtype: ACCEL_INT8 or ACCEL_FP8.
int accel_quantize_rowwise(const void* x, int dtype, void* q, int q_dtype, float* scales, int64_t rows, int64_t columns,
                           int64_t row_stride, void* stream);

// out (m, n) = act(row_scale * col_scale * (a @ b^T) + bias) + residual for a (m, k), b (n, k), 1 <= m <= 16, all dense
// and in dtype, except for the fp32 scales and bias. NULL leaves out an operand.
int accel_gemv(const void* a, const void* b, void* out, const float* bias, const void* residual, const float* row_scale,
               const float* col_scale, int dtype, int act, int64_t m, int64_t n, int64_t k, void* stream);

// x (images, height, width, channels) -> columns (images * out height * out width, kernel_h * kernel_w * channels),
// dense. element_size: 1, 2 or 4 bytes. geometry: kernel, stride, padding and dilation, each (height, width).
int accel_im2col(const void* x, void* columns, int element_size, int64_t images, int64_t height, int64_t width,
                 int64_t channels, const int32_t geometry[8], void* stream);

// from (count) in fp32, fp16 or bf16 -> to (count) in fp32.
int accel_widen(const void* from, int dtype, float* to, int64_t count, void* stream);

// out (m, n) = act(row_scale * col_scale * (a @ b^T) + bias) + residual on tensor cores: a (m, k) and b (n, k) in
// dtype, out and residual in out_dtype, all dense. Every address and every row is a multiple of 16 bytes. For int8, k
// is at most 131071, so that no int32 sum overflows. NULL leaves out an operand.
typedef struct {
  const void *a, *b;
  void* out;
  const float* bias;
  const void* residual;
  const float *row_scale, *col_scale;
  int64_t m, n, k;
  int32_t dtype, out_dtype, act;
  void* workspace;
  int64_t workspace_bytes;
  void* stream;
} accel_gemm_problem;

// The configurations of this library are numbered from 0. They depend on the architectures that it was built for.
int accel_gemm_configs(void);
const char* accel_gemm_config_name(int config);
// The bytes of device memory that accel_gemm needs as workspace for this problem on the current device.
int accel_gemm_workspace(int config, const accel_gemm_problem* problem, int64_t* bytes);
int accel_gemm(int config, const accel_gemm_problem* problem);

#ifdef __cplusplus
}
#endif
#endif
