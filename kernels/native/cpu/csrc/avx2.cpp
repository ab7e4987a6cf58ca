// The kernel for CPUs with AVX2, FMA and F16C. vpmaddubsw adds two products into 16 bits, and its sums saturate. For int4
// a span of 32 adds at most 16 products of 15 * 127 to a sum, 30,480 in all, which fits. For int8, the weights are taken
// without their sign, and the sign goes to the other factor: two products of 128 * 127 fit, too.
#include <immintrin.h>

#include "rows.h"

namespace {
__m256i four(const int8_t* q) {
  int32_t bytes;
  std::memcpy(&bytes, q, sizeof bytes);
  return _mm256_set1_epi32(bytes);
}

struct Tile {
  template <int count, int bits>
  static void compute(const uint8_t* weights, const uint16_t* scales, const Rows& x, int64_t row, int64_t per,
                      float* sums) {
    if constexpr (count > 2) {  // 16 registers hold the sums of two rows
      compute<count / 2, bits>(weights, scales, x, row, per, sums);
      compute<count / 2, bits>(weights, scales, x, row + count / 2, per, sums + count / 2 * kLanes);
    } else {
      half<count, bits>(weights, scales, x, row, per, sums);
      half<count, bits>(weights + 32, scales + 8, x, row, per, sums + 8);
    }
  }

  // The first 8 of 16 outputs.
  template <int count, int bits>
  static void half(const uint8_t* weights, const uint16_t* scales, const Rows& x, int64_t row, int64_t per,
                   float* sums) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), zero_point = _mm256_set1_epi8(-128);
    const int64_t stride = x.spans * kSpan;
    const int8_t* q = x.q + row * stride;
    const float* x_scales = x.scales + row * x.spans;
    const int32_t* initial = x.initial + row * x.spans;
    __m256 sum[count], inner[count];
    for (int r = 0; r < count; ++r) sum[r] = _mm256_setzero_ps();
    for (int64_t block = 0; block < x.spans; block += per, scales += kLanes) {
      for (int r = 0; r < count; ++r) inner[r] = _mm256_setzero_ps();
      for (int64_t span = block; span < block + per; ++span) {
        __m256i exact[count];
        const int8_t* at = q + span * kSpan;
        if constexpr (bits == 4) {
          __m256i narrow[count];
          for (int r = 0; r < count; ++r) narrow[r] = _mm256_setzero_si256();
          for (int i = 0; i < 4; ++i, weights += 64, at += 8) {
            const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights));
            const __m256i even = _mm256_and_si256(both, low);
            const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            for (int r = 0; r < count; ++r) {
              narrow[r] = _mm256_add_epi16(narrow[r], _mm256_maddubs_epi16(even, four(at + r * stride)));
              narrow[r] = _mm256_add_epi16(narrow[r], _mm256_maddubs_epi16(odd, four(at + 4 + r * stride)));
            }
          }
          for (int r = 0; r < count; ++r)
            exact[r] = _mm256_add_epi32(_mm256_set1_epi32(initial[r * x.spans + span]),
                                        _mm256_madd_epi16(narrow[r], ones));
        } else {
          for (int r = 0; r < count; ++r) exact[r] = _mm256_setzero_si256();
          for (int i = 0; i < 8; ++i, weights += 64, at += 4) {
            const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights));
            const __m256i weight = _mm256_xor_si256(loaded, zero_point);  // without the zero point 128
            const __m256i without_sign = _mm256_abs_epi8(weight);
            for (int r = 0; r < count; ++r) {
              const __m256i signed_x = _mm256_sign_epi8(four(at + r * stride), weight);
              const __m256i pairs = _mm256_maddubs_epi16(without_sign, signed_x);
              exact[r] = _mm256_add_epi32(exact[r], _mm256_madd_epi16(pairs, ones));
            }
          }
        }
        for (int r = 0; r < count; ++r)
          inner[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact[r]), _mm256_set1_ps(x_scales[r * x.spans + span]),
                                     inner[r]);
      }
      const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
      for (int r = 0; r < count; ++r) sum[r] = _mm256_fmadd_ps(inner[r], scale, sum[r]);
    }
    for (int r = 0; r < count; ++r) _mm256_storeu_ps(sums + r * kLanes, sum[r]);
  }
};

bool runs() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
}  // namespace

const AccelKernel accel_avx2{"avx2", runs, quantize_rows, compute_tasks<Tile>};
