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
    const int act = static_cast<int>(which[0]);
    if (act == ACCEL_NONE) return x;
    cutlass::Array<float, N> result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) result[i] = activate(x[i], act);
    return result;
  }
};
