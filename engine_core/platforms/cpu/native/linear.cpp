// Products of few rows with weights that stay as the checkpoint has them: [N, K], row after row.
//
// Each weight is read from memory once per call, whatever the number of rows; the reading is what a decode
// step waits for. A chunk of weight rows is read as three or four streams that lie far apart, because one core's
// prefetchers follow each page by itself: this nearly doubles what a core can read. Chunks are handed out
// as threads come for them, so that a thread that the system has taken off its core holds up one chunk and
// not half of the work. How a sum is formed does not depend on chunks, threads or the number of rows.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "vec.h"

namespace {

constexpr int MR = 8;  // input rows at a time, at most
constexpr int64_t CHUNK_BYTES = 192 << 10;

// acc[j][i] = x[i] . w[j]. AHEAD calls the streams' next rows into the second-level cache meanwhile: with
// several input rows the loads alone come too seldom to keep the memory busy.
template <int M, int NR, bool AHEAD, typename T>
void dots(const float* x, const T* const* w, int64_t k, float (*acc)[MR]) {
  vf a[NR][(M + 3) / 4 * 4] = {};
  for (int64_t d = 0; d < k; d += VL) {
    vf v[NR];
    for (int j = 0; j < NR; j++) {
      v[j] = load(w[j] + d);
      if (AHEAD) __builtin_prefetch(w[j] + k + d, 0, 2);
    }
    for (int i = 0; i < M; i++) {
      const vf r = load(x + i * k + d);
      for (int j = 0; j < NR; j++) a[j][i] += r * v[j];
    }
  }
  for (int j = 0; j < NR; j++)
    for (int i = 0; i < M; i += 4) sum4(a[j][i], a[j][i + 1], a[j][i + 2], a[j][i + 3], acc[j] + i);
}

template <int NR, bool AHEAD, typename T>
void dots_of(int m, const float* x, const T* const* w, int64_t k, float (*acc)[MR]) {
  switch (m) {
    case 1: return dots<1, NR, AHEAD>(x, w, k, acc);
    case 2: return dots<2, NR, AHEAD>(x, w, k, acc);
    case 3: return dots<3, NR, AHEAD>(x, w, k, acc);
    case 4: return dots<4, NR, AHEAD>(x, w, k, acc);
    case 5: return dots<5, NR, AHEAD>(x, w, k, acc);
    case 6: return dots<6, NR, AHEAD>(x, w, k, acc);
    case 7: return dots<7, NR, AHEAD>(x, w, k, acc);
    default: return dots<8, NR, AHEAD>(x, w, k, acc);
  }
}

template <int NR, typename T, typename O>
void stream_rows(const float* x, int64_t m, int64_t step, int64_t k, const T* w, const T* bias, int64_t count, O* out,
                 int64_t stride) {
  const int64_t length = (count + NR - 1) / NR;  // of a stream; the last ones may have to repeat a row
  float acc[NR][MR];
  for (int64_t n = 0; n < length; n++) {
    int64_t row[NR];
    const T* weights[NR];
    for (int j = 0; j < NR; j++) {
      row[j] = std::min(j * length + n, count - 1);
      weights[j] = w + row[j] * k;
    }
    for (int64_t i = 0; i < m; i += step) {
      const int rows = int(std::min(step, m - i));
      if (i == 0 && m > 1)
        dots_of<NR, true>(rows, x, weights, k, acc);
      else
        dots_of<NR, false>(rows, x + i * k, weights, k, acc);
      for (int j = 0; j < NR; j++) {
        const float shift = bias ? to_float(bias[row[j]]) : 0.0f;
        for (int r = 0; r < rows; r++) from_float(out + (i + r) * stride + row[j], acc[j][r] + shift);
      }
    }
  }
}

// out[i * stride + n] = x[i] . w[n] + bias[n] for n in [0, count).
template <typename T, typename O>
void rows_times(const float* x, int64_t m, int64_t k, const T* w, const T* bias, int64_t count, O* out,
                int64_t stride) {
  const int64_t passes = (m + MR - 1) / MR, step = (m + passes - 1) / passes;
  if (step > 6)  // what fits into the registers: 8 * 3 or 6 * 4 sums
    stream_rows<3>(x, m, step, k, w, bias, count, out, stride);
  else
    stream_rows<4>(x, m, step, k, w, bias, count, out, stride);
}

template <typename T>
const float* widen(const T* x, int64_t count, std::vector<float>& room) {
  room.resize(count);
  for (int64_t i = 0; i < count; i++) room[i] = to_float(x[i]);
  return room.data();
}
template <>
const float* widen(const float* x, int64_t, std::vector<float>&) {
  return x;
}

// Rows per chunk of a weight [n, k]: about CHUNK_BYTES, and as many chunks for each thread.
int64_t chunk_rows(int64_t n, int64_t row_bytes, int threads) {
  const int64_t each = std::max<int64_t>(1, n * row_bytes / (CHUNK_BYTES * threads));
  const int64_t rows = (n + each * threads - 1) / (each * threads);
  return (rows + 11) / 12 * 12;  // whole streams of three or four
}

template <typename T>
void linear(const T* x, int64_t m, int64_t k, int count, void* const* weights, void* const* biases, void* const* outs,
            const int64_t* ns, int threads) {
  if (m < 1) return;  // a chunk that samples nothing has no rows for the head
  std::vector<float> room;
  const float* wide = widen(x, m * k, room);
  int64_t rows[8], first_chunk[9] = {0};
  for (int i = 0; i < count; i++) {
    rows[i] = chunk_rows(ns[i], k * sizeof(T), threads);
    first_chunk[i + 1] = first_chunk[i] + (ns[i] + rows[i] - 1) / rows[i];
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t c = 0; c < first_chunk[count]; c++) {
    int i = 0;
    while (c >= first_chunk[i + 1]) i++;
    const int64_t first = (c - first_chunk[i]) * rows[i], end = std::min(ns[i], first + rows[i]);
    const T* bias = static_cast<const T*>(biases[i]);
    rows_times(wide, m, k, static_cast<const T*>(weights[i]) + first * k, bias ? bias + first : bias, end - first,
               static_cast<T*>(outs[i]) + first, ns[i]);
  }
}

template <typename T>
void gated(const T* x, int64_t m, int64_t k, const T* gate, const T* gate_bias, const T* up, const T* up_bias, T* out,
           int64_t n, int threads) {
  if (m < 1) return;
  std::vector<float> room;
  const float* wide = widen(x, m * k, room);
  const int64_t rows = chunk_rows(n, 2 * k * sizeof(T), threads);
  const int64_t chunks = (n + rows - 1) / rows;
#pragma omp parallel num_threads(threads)
  {
    static thread_local std::vector<float> scratch;
    const int64_t half = (m * rows + VL - 1) / VL * VL;  // the gate's pass below runs over its end
    scratch.resize(2 * half);
    float *g = scratch.data(), *u = g + half;
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < chunks; c++) {
      const int64_t first = c * rows, end = std::min(n, first + rows), width = end - first;
      rows_times(wide, m, k, gate + first * k, gate_bias ? gate_bias + first : gate_bias, width, g, width);
      rows_times(wide, m, k, up + first * k, up_bias ? up_bias + first : up_bias, width, u, width);
      for (int64_t i = 0; i < m * width; i += VL) {
        vf a = load(g + i);
        store(g + i, a / (splat(1.0f) + vexp(-a)));
      }
      for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < width; j++) from_float(out + i * n + first + j, g[i * width + j] * u[i * width + j]);
    }
  }
}

}  // namespace

extern "C" {

// outs[i] [m, ns[i]] = x [m, k] times weights[i] [ns[i], k] transposed, plus biases[i] (may be null); at most 8 of
// them. k is a multiple of the vector length.
void pdmesh_linear(int is_bf16, const void* x, int64_t m, int64_t k, int count, void* const* weights,
                   void* const* biases, void* const* outs, const int64_t* ns, int threads) {
  if (m < 1) return;
  if (is_bf16)
    linear(static_cast<const bf16*>(x), m, k, count, weights, biases, outs, ns, threads);
  else
    linear(static_cast<const float*>(x), m, k, count, weights, biases, outs, ns, threads);
}

// out [m, n] = silu(x gate^T + gate_bias) * (x up^T + up_bias)
void pdmesh_gated(int is_bf16, const void* x, int64_t m, int64_t k, const void* gate, const void* gate_bias,
                  const void* up, const void* up_bias, void* out, int64_t n, int threads) {
  if (m < 1) return;
  if (is_bf16)
    gated(static_cast<const bf16*>(x), m, k, static_cast<const bf16*>(gate), static_cast<const bf16*>(gate_bias),
          static_cast<const bf16*>(up), static_cast<const bf16*>(up_bias), static_cast<bf16*>(out), n, threads);
  else
    gated(static_cast<const float*>(x), m, k, static_cast<const float*>(gate), static_cast<const float*>(gate_bias),
          static_cast<const float*>(up), static_cast<const float*>(up_bias), static_cast<float*>(out), n, threads);
}
}
