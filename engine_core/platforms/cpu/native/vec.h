// Vectors of floats in GCC's portable extension: one zmm register with AVX-512, else one ymm.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int VL = 16;
#else
constexpr int VL = 8;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef float vf_u __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef uint16_t vh_u __attribute__((vector_size(VL * 2), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

static inline vf splat(float x) { return vf{} + x; }

static inline vf load(const float* p) { return *reinterpret_cast<const vf_u*>(p); }
static inline vf load(const bf16* p) {
  vh h = *reinterpret_cast<const vh_u*>(p);
  vu w = __builtin_convertvector(h, vu) << 16;
  return (vf)(w);
}
static inline void store(float* p, vf x) { *reinterpret_cast<vf_u*>(p) = x; }
static inline void store(bf16* p, vf x) {  // round to nearest even; NaN keeps its payload's top bits
  vu w = (vu)(x);
  vu rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
  vu quiet = (w >> 16) | 0x40;
  vi nan = x != x;
  vu mask = (vu)(nan);
  vu out = (rounded & ~mask) | (quiet & mask);
  *reinterpret_cast<vh_u*>(p) = __builtin_convertvector(out, vh);
}

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  uint32_t w = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &w, 4);
  return f;
}
static inline void from_float(float* p, float x) { *p = x; }
static inline void from_float(bf16* p, float x) {
  uint32_t w;
  std::memcpy(&w, &x, 4);
  p->bits = x != x ? uint16_t((w >> 16) | 0x40) : uint16_t((w + 0x7fff + ((w >> 16) & 1)) >> 16);
}
static inline float round_to(const float*, float x) { return x; }
static inline float round_to(const bf16*, float x) {
  bf16 b;
  from_float(&b, x);
  return to_float(b);
}

static inline vf select(vi mask, vf a, vf b) {
  vi x = ((vi)(a) & mask) | ((vi)(b) & ~mask);
  return (vf)(x);
}
static inline vf vmax(vf a, vf b) { return select(a > b, a, b); }

static inline float sum(vf x) {
  float s[VL];
  std::memcpy(s, &x, sizeof s);
  for (int w = VL / 2; w; w /= 2)
    for (int i = 0; i < w; i++) s[i] += s[i + w];
  return s[0];
}
static inline float max(vf x) {
  float s[VL];
  std::memcpy(s, &x, sizeof s);
  for (int w = VL / 2; w; w /= 2)
    for (int i = 0; i < w; i++) s[i] = s[i] > s[i + w] ? s[i] : s[i + w];
  return s[0];
}

// Sums of four vectors at once: a fraction of the shuffles of four separate sums.
static inline void sum4(vf a, vf b, vf c, vf d, float* out) {
#if defined(__AVX512F__)
  __m512 x = (__m512)(a), y = (__m512)(b);
  __m512 z = (__m512)(c), w = (__m512)(d);
  __m512d xy = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y)));
  __m512d zw = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(z, w), _mm512_unpackhi_ps(z, w)));
  __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(xy, zw)), _mm512_castpd_ps(_mm512_unpackhi_pd(xy, zw)));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all),
                              _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

// exp to about one unit in the last place; 0 below -87 (also for -inf).
static inline vf vexp(vf x) {
  vi tiny = x < splat(-87.0f);
  vf c = select(x > splat(88.0f), splat(88.0f), select(tiny, splat(-87.0f), x));
  const vf magic = splat(12582912.0f);
  vf n = (c * splat(1.44269504088896341f) + magic) - magic;
  vf r = c - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  vf p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  vi bits = (__builtin_convertvector(n, vi) + 127) << 23;
  return select(tiny, splat(0.0f), p * (vf)(bits));
}
