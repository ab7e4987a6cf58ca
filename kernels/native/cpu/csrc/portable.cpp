// The kernel for any CPU, and the one to read first.
#include "rows.h"

namespace {
float widen_half(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 0) {
    const float small = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -small : small;
  }
  const uint32_t wide = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | fraction << 13;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

struct Tile {
  template <int count, int bits>
  static void compute(const uint8_t* weights, const uint16_t* scales, const Rows& x, int64_t row, int64_t per,
                      float* sums) {
    constexpr int64_t step = bits == 4 ? 8 : 4;  // weights of an output that lie together, in 4 bytes
    for (int r = 0; r < count; ++r) {
      const int64_t begin = (row + r) * x.spans;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        float sum = 0.0f;
        for (int64_t block = 0; block < x.spans / per; ++block) {
          float inner = 0.0f;
          for (int64_t span = block * per; span < (block + 1) * per; ++span) {
            int32_t exact = x.initial[begin + span];
            for (int64_t i = 0; i < kSpan; ++i) {
              const int64_t k = span * kSpan + i, dword = (k / step * kLanes + lane) * 4, within = k % step;
              const int32_t w = bits == 4 ? weights[dword + within % 4] >> (within / 4 * 4) & 15
                                          : weights[dword + within];
              exact += w * x.q[begin * kSpan + k];  // both in the order of the quantized rows
            }
            inner = std::fma(static_cast<float>(exact), x.scales[begin + span], inner);
          }
          sum = std::fma(inner, widen_half(scales[block * kLanes + lane]), sum);
        }
        sums[r * kLanes + lane] = sum;
      }
    }
  }
};

bool runs() { return true; }
}  // namespace

const AccelKernel accel_portable{"portable", runs, quantize_rows, compute_tasks<Tile>};
