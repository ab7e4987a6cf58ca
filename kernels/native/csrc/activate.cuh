// The activations of all kernels: the formulas of kernels/catalogue/reference.py in fp32, without a branch on x.
// Branches would keep the GPU from computing several elements of a thread at a time.
#pragma once
#include <cmath>

#include "c_api.h"
#include "simt.cuh"

// x * sigmoid(u), given u * log2(e)
ACCEL_DEVICE float times_sigmoid(float x, float u_log2e) { return x * quick_reciprocal(1.0f + quick_exp2(-u_log2e)); }

ACCEL_DEVICE float silu(float x) { return times_sigmoid(x, 1.4426950408889634f * x); }

// 0.5 x (1 + tanh u) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
ACCEL_DEVICE float gelu_tanh(float x) { return times_sigmoid(x, x * (2.3022082f + 0.10294324f * x * x)); }

// x Phi(x) = max(x, 0) - |x| Phi(-|x|). Abramowitz and Stegun, 7.1.26, give Phi(-|x|) with an error of 7.5e-8.
ACCEL_DEVICE float gelu_erf(float x) {
  const float s = fminf(fabsf(x), 30.0f);  // larger numbers give the same result, and infinity would give NaN
  const float t = quick_reciprocal(1.0f + 0.23164189f * s);
  float sum = 0.53070271f * t - 0.72657602f;
  sum = sum * t + 0.71070687f;
  sum = sum * t - 0.14224837f;
  sum = sum * t + 0.1274148f;
  return relu(x) - s * (sum * t * quick_exp2(-0.72134752f * s * s));
}

// Applies ``act`` to ``count`` numbers.
template <int count>
ACCEL_DEVICE void activate_all(float* x, int act) {
  if (act == ACCEL_GELU_TANH) {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = gelu_tanh(x[i]);
  } else if (act == ACCEL_GELU_ERF) {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = gelu_erf(x[i]);
  } else if (act == ACCEL_SILU) {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = silu(x[i]);
  } else if (act == ACCEL_RELU) {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = relu(x[i]);
  }
}

ACCEL_DEVICE float activate(float x, int act) {
  activate_all<1>(&x, act);
  return x;
}
