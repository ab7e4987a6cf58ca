// The activations of all kernels: the formulas of kernels/catalogue/reference.py in fp32.
#pragma once
#include "c_api.h"
#include "simt.cuh"

ACCEL_DEVICE float activate(float x, int act) {
  if (act == ACCEL_RELU) return relu(x);
  if (act == ACCEL_SILU) return times_sigmoid(x, x);
  if (act == ACCEL_GELU_ERF) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  // 0.5 x (1 + tanh u) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
  if (act == ACCEL_GELU_TANH) return times_sigmoid(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
  return x;
}
