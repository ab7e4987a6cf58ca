// What all kernels share. Each kernel's file includes this header and is compiled with other instructions, so everything
// is in an unnamed namespace: the linker must never take one file's function for another's.
//
// All kernels round at the same places, in the same order, with fused multiply-adds. So they agree bit by bit.
#pragma once
#include <cmath>
#include <cstring>

#include "kernel.h"

namespace {
constexpr int64_t kLanes = 16;   // outputs of a group, which are packed together
constexpr int64_t kSpan = 32;    // activations with a common scale
constexpr float kSmallest = 1e-30f;  // a span of smaller numbers counts as zeros, because 127 / x would overflow

int64_t spans_of(const accel_cpu_product& p) {
  const int64_t per = p.block / kSpan;
  return (p.k + p.block - 1) / p.block * per;
}
int64_t groups_in(int64_t size) { return (size + kLanes - 1) / kLanes; }

// The quantized rows of x: [rows][spans * 32] int8, then the scales and the initial sums [rows][spans]. For int4
// weights, 8 activations are in the order 0 2 4 6 1 3 5 7, because the low halves of 4 bytes hold the weights 0 2 4 6.
struct Rows {
  int8_t* q;
  float* scales;
  int32_t* initial;  // what the zero point of the weights adds, so that the sums begin with it
  int64_t spans;

  Rows(const accel_cpu_product& p, void* scratch) : spans(spans_of(p)) {
    const int64_t count = p.rows * spans;
    q = static_cast<int8_t*>(scratch);
    scales = reinterpret_cast<float*>(q + count * kSpan);
    initial = reinterpret_cast<int32_t*>(scales + count);
  }
};

// Rounds each span of 32 numbers to int8 with one scale, max|x| / 127 times the gain of the weights. A span with an infinity or a NaN has the scale
// NaN. Python: kernels/native/cpu/reference.py.
void quantize_rows(const accel_cpu_product& p, void* scratch) {
  const Rows to(p, scratch);
  const int32_t zero_point = p.bits == 4 ? 8 : 128;
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t span = 0; span < to.spans; ++span) {
      const int64_t at = row * to.spans + span, left = p.k - span * kSpan;
      float own[kSpan];
      const float* x = p.x + row * p.k + span * kSpan;
      if (left < kSpan) {  // the end of the row, filled with zeros
        std::memset(own, 0, sizeof own);
        if (left > 0) std::memcpy(own, x, left * sizeof(float));
        x = own;
      }
      int32_t largest = 0;  // as bits, in which NaN > infinity > all numbers
      for (int64_t i = 0; i < kSpan; ++i) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
      }
      float most;
      std::memcpy(&most, &largest, sizeof most);
      const bool finite = largest < 0x7f800000;
      const float inverse = finite && most >= kSmallest ? 127.0f / most : 0.0f;
      int8_t q[kSpan] = {};
      int32_t sum = 0;
      if (inverse != 0.0f)
        for (int64_t i = 0; i < kSpan; ++i) {
          const int32_t rounded = static_cast<int32_t>(std::nearbyint(x[i] * inverse));
          sum += rounded;
          q[i] = static_cast<int8_t>(rounded);
        }
      int8_t* placed = to.q + at * kSpan;
      if (p.bits == 4)
        for (int64_t i = 0; i < kSpan; ++i) placed[i] = q[i / 8 * 8 + i % 4 * 2 + i / 4 % 2];
      else
        std::memcpy(placed, q, kSpan);
      to.scales[at] = finite ? most / 127.0f * p.gain : std::nanf("");
      to.initial[at] = -zero_point * sum;
    }
}

// exp(x) for x in [-87, 88], to 2 units in the last place: 2^n e^r with |r| <= ln 2 / 2 (Cephes, expf).
float quick_exp(float x) {
  const float n = std::nearbyint(x * 1.44269504088896341f);
  float r = std::fma(n, -0.693359375f, x);
  r = std::fma(n, 2.12194440e-4f, r);
  float e = std::fma(r, 1.9875691500e-4f, 1.3981999507e-3f);
  e = std::fma(e, r, 8.3334519073e-3f);
  e = std::fma(e, r, 4.1665795894e-2f);
  e = std::fma(e, r, 1.6666665459e-1f);
  e = std::fma(e, r, 5.0000001201e-1f);
  e = std::fma(e, r * r, r) + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return e * power;
}

float silu(float x) {
  float bounded = x < -87.0f ? -87.0f : x;  // a NaN stays
  bounded = bounded > 87.0f ? 87.0f : bounded;
  return bounded == bounded ? x / (1.0f + quick_exp(-bounded)) : x;
}

// Writes the sums of one row and one group: residual added, and only the columns that exist.
void write(const accel_cpu_product& p, int part, int64_t row, int64_t column, const float* sums) {
  const int64_t size = p.sizes[part], left = size - column, count = left < kLanes ? left : kLanes;
  float* to = p.out[part] + row * size + column;
  const float* more = part == 0 && p.residual ? p.residual + row * size + column : nullptr;
  for (int64_t i = 0; i < count; ++i) to[i] = more ? sums[i] + more[i] : sums[i];
}

void gate(const float* gates, const float* ups, float* out) {
  for (int64_t i = 0; i < kLanes; ++i) out[i] = silu(gates[i]) * ups[i];
}

constexpr int kMostRows = 8;  // rows that a tile computes at once

// Calls Tile::compute<rows>(product, weights, scales, rows of x, first row, sums) for every group of the tasks.
template <class Tile, int count>
void tile(const accel_cpu_product& p, const Rows& x, int64_t group, int64_t row, float* sums) {
  const int64_t bytes = x.spans * kSpan * kLanes * p.bits / 8, scales = x.spans * kSpan / p.block * kLanes;
  const auto* weights = static_cast<const uint8_t*>(p.weights) + group * bytes;
  const uint16_t* own = p.scales + group * scales;
  if (p.bits == 4)
    Tile::template compute<count, 4>(weights, own, x, row, p.block / kSpan, sums);
  else
    Tile::template compute<count, 8>(weights, own, x, row, p.block / kSpan, sums);
}

template <class Tile, int count>
void rows_of(const accel_cpu_product& p, const Rows& x, int part, int64_t group, int64_t within, int64_t& row) {
  for (; row + count <= p.rows; row += count) {
    float sums[count * kLanes], ups[count * kLanes], gated[kLanes];
    tile<Tile, count>(p, x, group, row, sums);
    if (p.gated) tile<Tile, count>(p, x, group + groups_in(p.sizes[0]), row, ups);
    for (int i = 0; i < count; ++i) {
      if (p.gated) gate(sums + i * kLanes, ups + i * kLanes, gated);
      write(p, part, row + i, within * kLanes, p.gated ? gated : sums + i * kLanes);
    }
  }
}

template <class Tile>
void compute_tasks(const accel_cpu_product& p, const void* scratch, int64_t first, int64_t last) {
  const Rows x(p, const_cast<void*>(scratch));
  for (int64_t task = first; task < last; ++task) {
    int part = 0;
    int64_t within = task;
    while (!p.gated && within >= groups_in(p.sizes[part])) within -= groups_in(p.sizes[part++]);
    int64_t row = 0;
    rows_of<Tile, 8>(p, x, part, task, within, row);
    rows_of<Tile, 4>(p, x, part, task, within, row);
    rows_of<Tile, 2>(p, x, part, task, within, row);
    rows_of<Tile, 1>(p, x, part, task, within, row);
  }
}
}  // namespace
