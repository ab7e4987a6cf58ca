// Hopper. ACCEL_IN, ACCEL_OUT: element types; ACCEL_UNIT: their names, part of the configurations' names.
#include "gemm3x.cuh"

using namespace accel3x;
using In = ACCEL_IN;
using Out = ACCEL_OUT;
constexpr int kK = 128 / sizeof(In);  // one swizzle of shared memory

using Cooperative = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using CooperativeStore = cutlass::epilogue::TmaWarpSpecializedCooperative;
using Pingpong = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using PingpongStore = cutlass::epilogue::TmaWarpSpecialized;

template <int kM, int kN, class Cluster, class Main, class Store, bool kSwap = false>
using Sm90 = Gemm<cutlass::arch::Sm90, In, Out, Shape<Int<kM>, Int<kN>, Int<kK>>, Shape<Int<kM>, Int<kN>, Int<kK>>,
                  Cluster, Main, Store, kSwap>;

#define ACCEL_CONFIG(tile, ...) \
  static const RegisterGemm tile##_registered(config<__VA_ARGS__, In, Out>("sm90_" ACCEL_UNIT "_" #tile, 90, 90))

using T128x128 = Sm90<128, 128, Shape<_2, _1, _1>, Cooperative, CooperativeStore>;
#ifdef ACCEL_FP8_IN
// The tensor cores keep 14 bits of an fp8 sum, so registers add it up every 128 of K. This doubles the accumulators,
// which spill from 128x256 on.
using T128x192 = Sm90<128, 192, Shape<_2, _1, _1>, Cooperative, CooperativeStore>;
#else
using T128x256 = Sm90<128, 256, Shape<_2, _1, _1>, Cooperative, CooperativeStore>;
#endif
using T64x128 = Sm90<64, 128, Shape<_1, _1, _1>, Pingpong, PingpongStore>;
using T64x16 = Sm90<64, 16, Shape<_1, _1, _1>, Pingpong, PingpongStore, true>;
ACCEL_CONFIG(cooperative_128x128, T128x128);
#ifdef ACCEL_FP8_IN
ACCEL_CONFIG(cooperative_128x192, T128x192);
#else
ACCEL_CONFIG(cooperative_128x256, T128x256);
#endif
ACCEL_CONFIG(pingpong_64x128, T64x128);
ACCEL_CONFIG(swapped_64x16, T64x16);
