// What a status means, and the version of this interface.
#include "c_api.h"

extern "C" int accel_abi_version(void) { return 1; }

extern "C" const char* accel_status_message(int status) {
  switch (status) {
    case ACCEL_OK: return "ok";
    case ACCEL_NULL_POINTER: return "a required pointer is NULL; pass every operand that is not optional";
    case ACCEL_BAD_SIZE: return "a size is out of range; sizes start at 1, accel_gemv takes at most 16 rows";
    case ACCEL_BAD_DTYPE: return "no kernel for this dtype; pass ACCEL_FP32, ACCEL_FP16 or ACCEL_BF16";
    case ACCEL_BAD_ACT: return "no such activation; pass ACCEL_NONE to ACCEL_SILU";
    case ACCEL_NO_DEVICE: return "no NVIDIA GPU or driver here; run the reference instead";
    case ACCEL_LAUNCH_FAILED: return "the GPU refused the launch; build for its architecture";
    default: return "unknown status; the library and its caller differ in version";
  }
}
