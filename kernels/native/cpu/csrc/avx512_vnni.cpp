// The kernel for CPUs with AVX-512 and VNNI. A register holds 4 bytes of each of 16 outputs, so vpdpbusd adds the
// products of 4 weights to 16 sums, and no sums are added across a register.
#include <immintrin.h>

#include "rows.h"

namespace {
int32_t four(const int8_t* q) {
  int32_t bytes;
  std::memcpy(&bytes, q, sizeof bytes);
  return bytes;
}

struct Tile {
  template <int count, int bits>
  static void compute(const uint8_t* weights, const uint16_t* scales, const Rows& x, int64_t row, int64_t per,
                      float* sums) {
    const __m512i low = _mm512_set1_epi8(15);
    const int64_t stride = x.spans * kSpan;
    const int8_t* q = x.q + row * stride;
    const float* x_scales = x.scales + row * x.spans;
    const int32_t* initial = x.initial + row * x.spans;
    __m512 sum[count], inner[count];
    for (int r = 0; r < count; ++r) sum[r] = _mm512_setzero_ps();
    for (int64_t block = 0; block < x.spans; block += per, scales += kLanes) {
      for (int r = 0; r < count; ++r) inner[r] = _mm512_setzero_ps();
      for (int64_t span = block; span < block + per; ++span) {
        __m512i exact[count];
        for (int r = 0; r < count; ++r) exact[r] = _mm512_set1_epi32(initial[r * x.spans + span]);
        const int8_t* at = q + span * kSpan;
        if constexpr (bits == 4) {
          for (int i = 0; i < 4; ++i, weights += 64, at += 8) {
            const __m512i both = _mm512_loadu_si512(weights);
            const __m512i even = _mm512_and_si512(both, low);
            const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            for (int r = 0; r < count; ++r) {
              exact[r] = _mm512_dpbusd_epi32(exact[r], even, _mm512_set1_epi32(four(at + r * stride)));
              exact[r] = _mm512_dpbusd_epi32(exact[r], odd, _mm512_set1_epi32(four(at + 4 + r * stride)));
            }
          }
        } else {
          for (int i = 0; i < 8; ++i, weights += 64, at += 4)
            for (int r = 0; r < count; ++r)
              exact[r] = _mm512_dpbusd_epi32(exact[r], _mm512_loadu_si512(weights),
                                             _mm512_set1_epi32(four(at + r * stride)));
        }
        for (int r = 0; r < count; ++r)
          inner[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact[r]), _mm512_set1_ps(x_scales[r * x.spans + span]),
                                     inner[r]);
      }
      const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
      for (int r = 0; r < count; ++r) sum[r] = _mm512_fmadd_ps(inner[r], scale, sum[r]);
    }
    for (int r = 0; r < count; ++r) _mm512_storeu_ps(sums + r * kLanes, sum[r]);
  }
};

bool runs() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
}  // namespace

const AccelKernel accel_avx512_vnni{"avx512-vnni", runs, quantize_rows, compute_tasks<Tile>};
