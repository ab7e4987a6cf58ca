// Blackwell GeForce, fp8 only. sm80.cu has its other products. ACCEL_IN, ACCEL_OUT: element types; ACCEL_UNIT: names.
#include "gemm3x.cuh"

using namespace accel3x;
using In = ACCEL_IN;
using Out = ACCEL_OUT;
constexpr int kK = 128 / sizeof(In);

template <int kM, int kN>
using Sm120 = Gemm<cutlass::arch::Sm120, In, Out, Shape<Int<kM>, Int<kN>, Int<kK>>, Shape<Int<kM>, Int<kN>, Int<kK>>,
                   Shape<_1, _1, _1>, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                   cutlass::epilogue::collective::EpilogueScheduleAuto, false>;

#define ACCEL_CONFIG(tile, ...) \
  static const RegisterGemm tile##_registered(config<__VA_ARGS__, In, Out>("sm120_" ACCEL_UNIT "_" #tile, 120, 120))

using T128x128 = Sm120<128, 128>;
// The ping-pong schedule would spill with any tile, because a warp holds the fragments of both operands for a K of 128.
using T128x64 = Sm120<128, 64>;
ACCEL_CONFIG(cooperative_128x128, T128x128);
ACCEL_CONFIG(cooperative_128x64, T128x64);
