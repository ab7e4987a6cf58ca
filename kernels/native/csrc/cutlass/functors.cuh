// The only node of the epilogue tree that CUTLASS doesn't have: an activation that is chosen at run time.
#pragma once
#include "../activate.cuh"
#include "cutlass/array.h"

// act(x). The activation's number is a second operand, equal for all elements, so one kernel serves every activation.
template <class T>
struct Activation;

template <int N>
struct Activation<cutlass::Array<float, N>> {
  CUTLASS_DEVICE cutlass::Array<float, N> operator()(const cutlass::Array<float, N>& x,
                                                     const cutlass::Array<float, N>& which) const {
    constexpr int kAtOnce = N % 16 == 0 ? 16 : N;  // on Blackwell, where N is larger, all at once would spill registers
    cutlass::Array<float, N> result = x;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; i += kAtOnce) activate_all<kAtOnce>(result.data() + i, static_cast<int>(which[i]));
    return result;
  }
};
