// The meaning of each status, and the version of this interface.
#include "c_api.h"

extern "C" int accel_abi_version(void) { return 3; }

extern "C" const char* accel_status_message(int status) {
  switch (status) {
    case ACCEL_OK: return "ok";
    case ACCEL_NULL_POINTER: return "a required pointer is NULL; pass every operand that is not optional";
    case ACCEL_BAD_SIZE: return "a size is out of range; sizes start at 1, accel_gemv takes at most 16 rows, int8 a K of 131071";
    case ACCEL_BAD_DTYPE: return "no kernel for this dtype; see c_api.h for those that it takes";
    case ACCEL_BAD_ACT: return "no such activation; pass ACCEL_NONE to ACCEL_SILU";
    case ACCEL_NO_DEVICE: return "no NVIDIA GPU or driver here; run the reference instead";
    case ACCEL_LAUNCH_FAILED: return "the GPU refused the launch; build for its architecture";
    case ACCEL_BAD_CONFIG: return "no such configuration in this library; count them with accel_gemm_configs";
    case ACCEL_UNALIGNED: return "an address or a row is not a multiple of 16 bytes; pad it or use another kernel";
    case ACCEL_WRONG_ARCH: return "this configuration is not for this GPU; take one of its architecture";
    case ACCEL_NO_WORKSPACE: return "the workspace is too small; ask accel_gemm_workspace for its size";
    default: return "unknown status; the library and its caller differ in version";
  }
}
