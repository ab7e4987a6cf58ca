// act(row_scale * col_scale * (a @ b^T) + bias) + residual on CUTLASS 3: TMA, warp-specialized, one epilogue tree for
// sm_90a, sm_100a and sm_120a. a (M, K) and b (N, K) are dense. A NULL operand is replaced by a constant.
#pragma once
#include <algorithm>
#include <type_traits>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"
#include "entry.cuh"
#include "functors.cuh"

namespace accel3x {
using namespace cute;
namespace fusion = cutlass::epilogue::fusion;
constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

// kSwap: computes the transposed product. If M is small, the many columns of the problem then fill the rows of the
// tile. kBlocks: this many blocks share the memory of a multiprocessor.
template <class Arch, class In, class Out, class Tile, class CtaTile, class Cluster, class Mainloop, class Schedule,
          bool kSwap, class Scheduler = void, int kBlocks = 1>
struct Gemm {
  using Acc = std::conditional_t<std::is_same_v<In, int8_t>, int32_t, float>;
  static constexpr int kAlignIn = 16 / sizeof(In), kAlignOut = 16 / sizeof(Out);
  using LayoutOut = std::conditional_t<kSwap, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;

  // A vector along M of the problem runs along the rows of the tile, or along its columns if the product is swapped.
  using DownRows = fusion::Sm90ColBroadcast<0, CtaTile, float, float, Stride<_1, _0, int64_t>>;
  using AlongRows = fusion::Sm90RowBroadcast<0, CtaTile, float, float, Stride<_0, _1, int64_t>>;
  using OfM = std::conditional_t<kSwap, AlongRows, DownRows>;
  using OfN = std::conditional_t<kSwap, DownRows, AlongRows>;
  using Scalar = fusion::Sm90ScalarBroadcast<float>;
  using Times = fusion::Sm90Compute<cutlass::multiplies, float, float, kRound>;
  using Plus = fusion::Sm90Compute<cutlass::plus, float, float, kRound>;
  using Act = fusion::Sm90Compute<Activation, float, float, kRound>;
  // beta * C + x doesn't read C if beta is 0.
  using PlusSource = fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Out, float, kRound>;

  using ByRow = fusion::Sm90EVT<Times, OfM, fusion::Sm90AccFetch>;
  using Scaled = fusion::Sm90EVT<Times, OfN, ByRow>;
  using Biased = fusion::Sm90EVT<Plus, OfN, Scaled>;
  using Activated = fusion::Sm90EVT<Act, Biased, Scalar>;
  using Tree = fusion::Sm90EVT<PlusSource, Scalar, fusion::Sm90SrcFetch<Out>, Activated>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, Acc, float,
      Out, LayoutOut, kAlignOut, Out, LayoutOut, kAlignOut, Schedule, Tree>::CollectiveOp;
  // The shared memory of the other blocks of a multiprocessor. 1 KB more a block belongs to the system.
  static constexpr int kOthers = (kBlocks - 1) * (232448 / kBlocks + 1024);
  using Main = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, cutlass::arch::OpClassTensorOp, In, cutlass::layout::RowMajor, kAlignIn, In, cutlass::layout::ColumnMajor,
      kAlignIn, Acc, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage)) +
                                                        kOthers>,
      Mainloop>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Main, Epilogue, Scheduler>;
  using Adapter = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static typename Adapter::Arguments arguments(const accel_gemm_problem& p) {
    const int m = static_cast<int>(kSwap ? p.n : p.m), n = static_cast<int>(kSwap ? p.m : p.n);
    const int k = static_cast<int>(p.k);
    const In* first = static_cast<const In*>(kSwap ? p.b : p.a);
    const In* second = static_cast<const In*>(kSwap ? p.a : p.b);
    const auto first_stride = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1});
    const auto second_stride = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1});
    const auto out_stride = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1});
    Out* out = static_cast<Out*>(p.out);
    // A descriptor of C is made even if nothing reads C, so C needs some valid address.
    const Out* source = p.residual ? static_cast<const Out*>(p.residual) : out;

    typename ByRow::Arguments by_row{{p.row_scale, 1.0f, {}}, {}, {}};
    typename Scaled::Arguments scaled{{p.col_scale, 1.0f, {}}, by_row, {}};
    typename Biased::Arguments biased{{p.bias, 0.0f, {}}, scaled, {}};
    typename Activated::Arguments activated{biased, {{static_cast<float>(p.act)}, {}, {}}, {}};
    typename Tree::Arguments tree{{{p.residual ? 1.0f : 0.0f}, {}, {}}, {}, activated, {}};
    cutlass::KernelHardwareInfo hardware;
    cudaGetDevice(&hardware.device_id);
    hardware.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(hardware.device_id);
    typename Adapter::Arguments made{cutlass::gemm::GemmUniversalMode::kGemm,
                                     {m, n, k, 1},
                                     {first, first_stride, second, second_stride},
                                     {tree, source, out_stride, out, out_stride},
                                     hardware};
    if (in_squares(m, n)) made.scheduler.max_swizzle_size = 8;
    return made;
  }

  // Tells whether the tiles run in squares of 8 by 8 clusters, which read the same operands at the same time. If
  // squares don't divide the problem, CUTLASS would add empty tiles. A small problem gains nothing. Measured on Hopper
  // only.
  static bool in_squares(int m, int n) {
    const int rows = ceil_div(m, int(size<0>(CtaTile{}) * size<0>(Cluster{})));
    const int columns = ceil_div(n, int(size<1>(CtaTile{}) * size<1>(Cluster{})));
    return std::is_same_v<Arch, cutlass::arch::Sm90> && std::min(rows, columns) >= 16 && rows % 8 == 0 &&
           columns % 8 == 0;
  }

  // Registers code only for the architecture that it is compiled for.
  static bool runs_here() { return true; }
};
}  // namespace accel3x
