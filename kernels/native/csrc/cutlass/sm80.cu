// Ampere, and later GPUs that run its instructions. ACCEL_IN, ACCEL_OUT: element types; ACCEL_UNIT: their names.
#include "gemm2x.cuh"

using namespace accel2x;
using In = ACCEL_IN;
using Out = ACCEL_OUT;
constexpr int kBytes = sizeof(In);
using Instruction =
    std::conditional_t<kBytes == 1, cutlass::gemm::GemmShape<16, 8, 32>, cutlass::gemm::GemmShape<16, 8, 16>>;

// K is in bytes. Three stages of the largest tile fit in the 99 KB of sm_86, sm_89 and sm_120.
template <int kM, int kN, int kKBytes, int kWarpM, int kWarpN, int kStages>
using Sm80 = Gemm<In, Out, kM, kN, kKBytes / kBytes, kWarpM, kWarpN, kStages, Instruction>;

#define ACCEL_CONFIG(tile, ...) \
  static const RegisterGemm tile##_registered(config<__VA_ARGS__, In, Out>("sm80_" ACCEL_UNIT "_" #tile, 80, 129))

using T128x128 = Sm80<128, 128, 64, 64, 64, 4>;
using T128x256 = Sm80<128, 256, 64, 64, 64, 3>;
using T64x128 = Sm80<64, 128, 64, 32, 64, 4>;
using T64x64 = Sm80<64, 64, 128, 32, 32, 4>;
ACCEL_CONFIG(streamk_128x128, T128x128);
ACCEL_CONFIG(streamk_128x256, T128x256);
ACCEL_CONFIG(streamk_64x128, T64x128);
ACCEL_CONFIG(streamk_64x64, T64x64);
