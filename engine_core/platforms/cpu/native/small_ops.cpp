// What lies between a dense model's matrix products: norms, rotary embedding, the gate.
#include <omp.h>

#include <cmath>

#include "vec.h"

namespace {

constexpr int64_t SERIAL = 1 << 15;  // elements below which waking threads costs more than it saves

template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t h, float eps) {
  vf squares{};
  for (int64_t d = 0; d < h; d += VL) {
    vf v = load(x + d);
    squares += v * v;
  }
  const float scale = 1.0f / std::sqrt(sum(squares) / float(h) + eps);
  for (int64_t d = 0; d < h; d += VL) {
    T rounded[VL];
    store(rounded, load(x + d) * splat(scale));
    store(out + d, load(rounded) * load(weight + d));
  }
}

template <typename T>
void norm(T* residual, const T* delta, const T* weight, T* out, int64_t rows, int64_t h, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * h > SERIAL)
  for (int64_t r = 0; r < rows; r++) {
    T* row = residual + r * h;
    if (delta)
      for (int64_t d = 0; d < h; d += VL) store(row + d, load(row + d) + load(delta + r * h + d));
    norm_row(row, weight, out + r * h, h, eps);
  }
}

template <typename T>
void rotate(T* x, int64_t heads, int64_t half, const float* cos, const float* sin) {
  for (int64_t i = 0; i < heads; i++, x += 2 * half) {
    int64_t d = 0;
    for (; d + VL <= half; d += VL) {
      vf a = load(x + d), b = load(x + half + d), c = load(cos + d), s = load(sin + d);
      store(x + d, a * c - b * s);
      store(x + half + d, b * c + a * s);
    }
    for (; d < half; d++) {
      const float a = to_float(x[d]), b = to_float(x[half + d]);
      from_float(x + d, a * cos[d] - b * sin[d]);
      from_float(x + half + d, b * cos[d] + a * sin[d]);
    }
  }
}

template <typename T>
void rope(T* q, T* k, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t kv_heads,
          int64_t half, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * (heads + kv_heads) * half > SERIAL)
  for (int64_t t = 0; t < tokens; t++) {
    rotate(q + t * heads * 2 * half, heads, half, cos + t * half, sin + t * half);
    rotate(k + t * kv_heads * 2 * half, kv_heads, half, cos + t * half, sin + t * half);
  }
}

template <typename T>
void silu_mul(T* gate, const T* up, int64_t count, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (count > SERIAL)
  for (int64_t i = 0; i < count / VL; i++) {
    vf a = load(gate + i * VL);
    T rounded[VL];
    store(rounded, a / (splat(1.0f) + vexp(-a)));
    store(gate + i * VL, load(rounded) * load(up + i * VL));
  }
  for (int64_t i = count / VL * VL; i < count; i++) {
    const float a = to_float(gate[i]);
    from_float(gate + i, a / (1.0f + std::exp(-a)) * to_float(up[i]));
  }
}

}  // namespace

extern "C" {

// residual [rows, h] += delta (when given), in place; out = rms norm of it times weight. h is a multiple of VL.
void pdmesh_norm(int is_bf16, void* residual, const void* delta, const void* weight, void* out, int64_t rows,
                 int64_t h, float eps, int threads) {
  if (is_bf16)
    norm(static_cast<bf16*>(residual), static_cast<const bf16*>(delta), static_cast<const bf16*>(weight),
         static_cast<bf16*>(out), rows, h, eps, threads);
  else
    norm(static_cast<float*>(residual), static_cast<const float*>(delta), static_cast<const float*>(weight),
         static_cast<float*>(out), rows, h, eps, threads);
}

// q [tokens, heads, 2 half], k [tokens, kv_heads, 2 half] in place; cos, sin [tokens, half].
void pdmesh_rope(int is_bf16, void* q, void* k, const float* cos, const float* sin, int64_t tokens, int64_t heads,
                 int64_t kv_heads, int64_t half, int threads) {
  if (is_bf16)
    rope(static_cast<bf16*>(q), static_cast<bf16*>(k), cos, sin, tokens, heads, kv_heads, half, threads);
  else
    rope(static_cast<float*>(q), static_cast<float*>(k), cos, sin, tokens, heads, kv_heads, half, threads);
}

// gate = silu(gate) * up, in place.
void pdmesh_silu_mul(int is_bf16, void* gate, const void* up, int64_t count, int threads) {
  if (is_bf16)
    silu_mul(static_cast<bf16*>(gate), static_cast<const bf16*>(up), count, threads);
  else
    silu_mul(static_cast<float*>(gate), static_cast<const float*>(up), count, threads);
}
}
