// Blackwell with tensor memory. ACCEL_IN, ACCEL_OUT: element types; ACCEL_UNIT: their names.
#include "gemm3x.cuh"

using namespace accel3x;
using In = ACCEL_IN;
using Out = ACCEL_OUT;
constexpr int kK = 128 / sizeof(In);  // one swizzle of shared memory

// Two multiprocessors share a tile of 256 rows. Each computes 128 of them.
template <int kM, int kN, bool kSwap = false>
using Sm100 = Gemm<
    cutlass::arch::Sm100, In, Out, Shape<Int<kM>, Int<kN>, Int<kK>>, Shape<_128, Int<kN>, Int<kK>>,
    Shape<Int<kM / 128>, _1, _1>,
    std::conditional_t<kM == 256, cutlass::gemm::KernelTmaWarpSpecialized2SmSm100,
                       cutlass::gemm::KernelTmaWarpSpecialized1SmSm100>,
    std::conditional_t<kM == 256, cutlass::epilogue::TmaWarpSpecialized2Sm, cutlass::epilogue::TmaWarpSpecialized1Sm>,
    kSwap>;

#define ACCEL_CONFIG(tile, ...) \
  static const RegisterGemm tile##_registered(config<__VA_ARGS__, In, Out>("sm100_" ACCEL_UNIT "_" #tile, 100, 100))

using T128x128 = Sm100<128, 128>;
using T128x256 = Sm100<128, 256>;
using T256x128 = Sm100<256, 128>;
using T256x256 = Sm100<256, 256>;
using T128x16 = Sm100<128, 16, true>;
ACCEL_CONFIG(one_128x128, T128x128);
ACCEL_CONFIG(one_128x256, T128x256);
ACCEL_CONFIG(two_256x128, T256x128);
ACCEL_CONFIG(two_256x256, T256x256);
ACCEL_CONFIG(swapped_128x16, T128x16);
