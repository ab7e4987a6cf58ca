// Hopper. ACCEL_IN, ACCEL_OUT: element types; ACCEL_UNIT: their names, part of the configurations' names.
#include "gemm3x.cuh"

using namespace accel3x;
using In = ACCEL_IN;
using Out = ACCEL_OUT;
constexpr int kK = 128 / sizeof(In);  // one swizzle of shared memory

// Cooperative: two groups of warps share a tile. Pingpong: each group has a tile of its own, and computes its epilogue
// while the other group multiplies. Plain: one group, and one tile a block.
using Cooperative = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using CooperativeStore = cutlass::epilogue::TmaWarpSpecializedCooperative;
using Pingpong = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using Plain = cutlass::gemm::KernelTmaWarpSpecialized;
using Store = cutlass::epilogue::TmaWarpSpecialized;
using StreamK = cutlass::gemm::StreamKScheduler;

template <int kM, int kN, class Cluster, class Main, class Schedule, bool kSwap = false, class Scheduler = void,
          int kBlocks = 1>
using Sm90 = Gemm<cutlass::arch::Sm90, In, Out, Shape<Int<kM>, Int<kN>, Int<kK>>, Shape<Int<kM>, Int<kN>, Int<kK>>,
                  Cluster, Main, Schedule, kSwap, Scheduler, kBlocks>;

#define ACCEL_CONFIG(tile, ...) \
  static const RegisterGemm tile##_registered(config<__VA_ARGS__, In, Out>("sm90_" ACCEL_UNIT "_" #tile, 90, 90))

#ifdef ACCEL_FP8_IN
// The tensor cores keep 14 bits of an fp8 sum, so registers add it up every 128 of K. This doubles the accumulators,
// which spill if a group of warps has more than 64x192 of the tile.
using T128x128 = Sm90<128, 128, Shape<_2, _1, _1>, Cooperative, CooperativeStore>;
using T128x192 = Sm90<128, 192, Shape<_2, _1, _1>, Cooperative, CooperativeStore>;
ACCEL_CONFIG(cooperative_128x128, T128x128);
ACCEL_CONFIG(cooperative_128x192, T128x192);
#else
using T256x128 = Sm90<256, 128, Shape<_1, _2, _1>, Cooperative, CooperativeStore>;
using T128x128 = Sm90<128, 128, Shape<_2, _1, _1>, Pingpong, Store>;
using Split128x128 = Sm90<128, 128, Shape<_1, _1, _1>, Cooperative, CooperativeStore, false, StreamK>;
using T64x128 = Sm90<64, 128, Shape<_1, _1, _1>, Pingpong, Store>;
ACCEL_CONFIG(cooperative_256x128, T256x128);
ACCEL_CONFIG(pingpong_128x128, T128x128);
ACCEL_CONFIG(streamk_128x128, Split128x128);
ACCEL_CONFIG(pingpong_64x128, T64x128);
#endif
using T64x64 = Sm90<64, 64, Shape<_1, _1, _1>, Pingpong, Store>;
// Two blocks fit on a multiprocessor, so the tiles of a few rows are all loaded at the same time.
using T64x16 = Sm90<64, 16, Shape<_1, _1, _1>, Plain, Store, true, void, 2>;
ACCEL_CONFIG(pingpong_64x64, T64x64);
ACCEL_CONFIG(swapped_64x16, T64x16);
