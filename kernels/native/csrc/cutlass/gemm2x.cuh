// The same epilogue tree on CUTLASS 2: mma.sync, cp.async, stream-K. For sm_80, sm_86, sm_89, and sm_120's fp16 and
// int8.
#pragma once
#include <type_traits>

#include "cutlass/cutlass.h"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle_streamk.h"
// Included last, because it doesn't include the headers that it needs.
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"
#include "entry.cuh"
#include "functors.cuh"

namespace accel2x {
using namespace cute;
namespace visitor = cutlass::epilogue::threadblock;
constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
using PerRow = Stride<_1, _0, int64_t>;
using PerColumn = Stride<_0, _1, int64_t>;
using Dense = Stride<int64_t, _1, int64_t>;

// CUTLASS always loads the source. If there is none, every element is out of bounds, and so zero.
template <class Layout, class Out>
struct Residual : visitor::VisitorAuxLoad<Layout, Out, Dense> {
  using Base = visitor::VisitorAuxLoad<Layout, Out, Dense>;
  using Base::Base;

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord tile, int thread, ProblemShape shape) {
    auto made = Base::get_callbacks(tile, thread, shape);
    if (!this->params_ptr->ptr_aux) made.problem_shape = ProblemShape{};
    return made;
  }
};

template <class In, class Out, int kM, int kN, int kK, int kWarpM, int kWarpN, int kStages, class Instruction>
struct Gemm {
  using Acc = std::conditional_t<std::is_same_v<In, int8_t>, int32_t, float>;
  using Tile = cutlass::gemm::GemmShape<kM, kN, kK>;
  using Warp = cutlass::gemm::GemmShape<kWarpM, kWarpN, kK>;
  static constexpr int kAlignIn = 16 / sizeof(In), kAlignOut = 16 / sizeof(Out);
  using Operator =
      std::conditional_t<std::is_same_v<In, int8_t>, cutlass::arch::OpMultiplyAddSaturate, cutlass::arch::OpMultiplyAdd>;

  using Layout = visitor::OutputTileThreadLayout<Tile, Warp, Out, kAlignOut, 1>;
  using OfM = visitor::VisitorColBroadcast<Layout, float, PerRow>;
  using OfN = visitor::VisitorRowBroadcast<Layout, float, PerColumn>;
  using Scalar = visitor::VisitorScalarBroadcast<float>;
  using Times = visitor::VisitorCompute<cutlass::multiplies, float, float, kRound>;
  using Plus = visitor::VisitorCompute<cutlass::plus, float, float, kRound>;
  using PlusSource = visitor::VisitorCompute<cutlass::plus, Out, float, kRound>;
  using Act = visitor::VisitorCompute<Activation, float, float, kRound>;

  using ByRow = visitor::Sm80EVT<Times, OfM, visitor::VisitorAccFetch>;
  using Scaled = visitor::Sm80EVT<Times, OfN, ByRow>;
  using Biased = visitor::Sm80EVT<Plus, OfN, Scaled>;
  using Activated = visitor::Sm80EVT<Act, Biased, Scalar>;
  using Summed = visitor::Sm80EVT<PlusSource, Activated, Residual<Layout, Out>>;
  using Tree = visitor::Sm80EVT<visitor::VisitorAuxStore<Layout, Out, kRound, Dense>, Summed>;

  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      In, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, kAlignIn, In, cutlass::layout::ColumnMajor,
      cutlass::ComplexTransform::kNone, kAlignIn, Out, cutlass::layout::RowMajor, kAlignOut, Acc, float,
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Tile, Warp, Instruction, Tree,
      cutlass::gemm::threadblock::ThreadblockSwizzleStreamK, kStages, Operator, 1>::GemmKernel;
  using Adapter = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static typename Adapter::Arguments arguments(const accel_gemm_problem& p) {
    const Dense dense{p.n, _1{}, p.m * p.n};
    typename ByRow::Arguments by_row{{p.row_scale, 1.0f, {}}, {}, {}};
    typename Scaled::Arguments scaled{{p.col_scale, 1.0f, {}}, by_row, {}};
    typename Biased::Arguments biased{{p.bias, 0.0f, {}}, scaled, {}};
    typename Activated::Arguments activated{biased, {{static_cast<float>(p.act)}, {}, {}}, {}};
    Out* residual = const_cast<Out*>(static_cast<const Out*>(p.residual));
    typename Summed::Arguments summed{activated, {residual, Out(0), dense}, {}};
    typename Tree::Arguments tree{summed, {static_cast<Out*>(p.out), dense}};
    const int m = static_cast<int>(p.m), n = static_cast<int>(p.n), k = static_cast<int>(p.k);
    return typename Adapter::Arguments(cutlass::gemm::GemmUniversalMode::kGemm, {m, n, k},
                                       1,     // split-K slices: stream-K chooses the split itself
                                       tree, p.a, p.b, nullptr, nullptr, p.m * p.k, p.n * p.k, 0, 0, p.k, p.k, 0, 0);
  }

  // Tells whether the current device runs it, because a library may hold code only for another GPU.
  static bool runs_here() { return cutlass::gemm::device::GemmUniversalBase<Kernel>::maximum_active_blocks() > 0; }
};
}  // namespace accel2x
