// Causal attention over a paged pool. One call per layer and step: writes the new tokens' K and V into
// their slots, then attends, decodes (one query) and prefill chunks alike, with grouped queries.
//
// Work is cut into tasks of (sequence, KV heads, tile of queries or part of the keys). A task walks its keys
// in tiles of TK with a running maximum (online softmax). How a sequence's keys are cut depends on that
// sequence alone, so a result is the same whatever else is in the batch.
#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "vec.h"

namespace {

constexpr int TK = 64;           // keys per tile
constexpr int QT = 32;           // queries per prefill task
constexpr int PART = 512;        // keys per decode task
constexpr int DIRECT_ROWS = 12;  // up to so many rows, scores are taken from the pool without a transposed copy

struct Args {
  const int64_t* slots;      // [T]
  const int32_t* tables;     // [B, table_width]
  const int32_t* starts;     // [B + 1]
  const int32_t* lens;       // [B]
  int64_t table_width, sequences, tokens;
  int64_t block_stride;      // elements between blocks
  int64_t value_offset;      // elements from a block's keys to its values, in this layer
  int64_t block_size, kv_heads, heads, head_size;
  float scale;
};

struct Task {
  int32_t sequence, kv_head, kv_heads, first_query, queries, first_key, end_key;
  int32_t partial;  // the first of kv_heads slots for what is to be joined, or -1: writes its output itself
};

struct Scratch {
  std::vector<float> q, o, s, kt, m, l;
  void fit(int rows, int head_size) {
    if (int(m.size()) >= rows && int(kt.size()) == head_size * TK) return;
    q.resize(size_t(rows) * head_size);
    o.resize(size_t(rows) * head_size);
    s.resize(size_t(rows) * TK);
    kt.resize(size_t(head_size) * TK);
    m.resize(rows);
    l.resize(rows);
  }
};

// s[r][j] = q[r] . k[j], straight from the pool's rows.
template <int R, typename T>
void scores_four_keys(const float* q, const T* const* k, int hs, float* s) {
  const T *k0 = k[0], *k1 = k[1], *k2 = k[2], *k3 = k[3];
  vf a[R][4] = {};
  for (int d = 0; d < hs; d += VL) {
    const vf y[4] = {load(k0 + d), load(k1 + d), load(k2 + d), load(k3 + d)};
    for (int r = 0; r < R; r++) {
      const vf x = load(q + r * hs + d);
      for (int i = 0; i < 4; i++) a[r][i] += x * y[i];
    }
  }
  for (int r = 0; r < R; r++) sum4(a[r][0], a[r][1], a[r][2], a[r][3], s + r * TK);
}

// Calls one head of a row into the cache.
template <typename T>
void call(const T* row, int hs) {
  for (int d = 0; d < hs; d += 64 / int(sizeof(T))) __builtin_prefetch(row + d, 0, 2);
}

// Meanwhile the values of these keys and the next tile's keys are called for: a little at a time, so that
// memory and arithmetic overlap.
template <typename T>
void scores_direct(const float* q, int rows, const T* const* k, const T* const* v, int keys, const T* const* next,
                   int next_keys, int64_t head, int hs, float* s) {
  for (int j = 0; j < keys; j += 4) {
    const T* four[4];
    for (int i = 0; i < 4; i++) {
      const int key = std::min(j + i, keys - 1);
      four[i] = k[key] + head;
      call(v[key] + head, hs);
      if (j + i < next_keys) call(next[j + i] + head, hs);
    }
    int r = 0;
    for (; r + 4 <= rows; r += 4) scores_four_keys<4>(q + r * hs, four, hs, s + r * TK + j);
    switch (rows - r) {
      case 3: scores_four_keys<3>(q + r * hs, four, hs, s + r * TK + j); break;
      case 2: scores_four_keys<2>(q + r * hs, four, hs, s + r * TK + j); break;
      case 1: scores_four_keys<1>(q + r * hs, four, hs, s + r * TK + j); break;
    }
  }
}

template <typename T>
void transpose_keys(const T* const* k, int64_t head, int keys, int hs, float* kt) {
  for (int d0 = 0; d0 < hs; d0 += VL) {
    for (int j = 0; j < keys; j++) {
      float row[VL];
      store(row, load(k[j] + head + d0));
      for (int d = 0; d < VL; d++) kt[(d0 + d) * TK + j] = row[d];
    }
  }
}

template <int R>
void scores_rows(const float* q, const float* kt, int hs, float* s) {
  constexpr int W = TK / VL < 4 ? TK / VL : 4;
  for (int j = 0; j < TK; j += W * VL) {
    vf acc[R][W] = {};
    for (int d = 0; d < hs; d++) {
      vf k[W];
      for (int w = 0; w < W; w++) k[w] = load(kt + d * TK + j + w * VL);
      for (int r = 0; r < R; r++) {
        vf x = splat(q[r * hs + d]);
        for (int w = 0; w < W; w++) acc[r][w] += x * k[w];
      }
    }
    for (int r = 0; r < R; r++)
      for (int w = 0; w < W; w++) store(s + r * TK + j + w * VL, acc[r][w]);
  }
}

void scores_transposed(const float* q, int rows, const float* kt, int hs, float* s) {
  int r = 0;
  for (; r + 6 <= rows; r += 6) scores_rows<6>(q + r * hs, kt, hs, s + r * TK);
  for (; r < rows; r++) scores_rows<1>(q + r * hs, kt, hs, s + r * TK);
}

// o[r] += sum_j p[r][j] * v[j], two vectors of the head at a time.
template <int R, typename T>
void accumulate_rows(const float* p, const T* const* v, int64_t head, int keys, int hs, float* o) {
  int d = 0;
  for (; d + 2 * VL <= hs; d += 2 * VL) {
    vf a[R], b[R];
    for (int r = 0; r < R; r++) a[r] = load(o + r * hs + d), b[r] = load(o + r * hs + d + VL);
    for (int j = 0; j < keys; j++) {
      vf x = load(v[j] + head + d), y = load(v[j] + head + d + VL);
      for (int r = 0; r < R; r++) {
        vf w = splat(p[r * TK + j]);
        a[r] += w * x;
        b[r] += w * y;
      }
    }
    for (int r = 0; r < R; r++) store(o + r * hs + d, a[r]), store(o + r * hs + d + VL, b[r]);
  }
  for (; d < hs; d += VL) {
    vf a[R];
    for (int r = 0; r < R; r++) a[r] = load(o + r * hs + d);
    for (int j = 0; j < keys; j++) {
      vf x = load(v[j] + head + d);
      for (int r = 0; r < R; r++) a[r] += splat(p[r * TK + j]) * x;
    }
    for (int r = 0; r < R; r++) store(o + r * hs + d, a[r]);
  }
}

template <typename T>
void accumulate(const float* p, int rows, const T* const* v, int64_t head, int keys, int hs, float* o) {
  int r = 0;
  for (; r + 8 <= rows; r += 8) accumulate_rows<8>(p + r * TK, v, head, keys, hs, o + r * hs);
  for (; r + 3 <= rows; r += 3) accumulate_rows<3>(p + r * TK, v, head, keys, hs, o + r * hs);
  for (; r < rows; r++) accumulate_rows<1>(p + r * TK, v, head, keys, hs, o + r * hs);
}

// Softmax of one row of scores against the running maximum; `visible` keys of the tile count.
void soften(float* s, int visible, float& m, float& l, float* o, int hs) {
  if (visible <= 0) {  // the whole tile lies behind this query
    for (int j = 0; j < TK; j += VL) store(s + j, vf{});
    return;
  }
  for (int j = visible; j < TK; j++) s[j] = -INFINITY;
  vf top = load(s);
  for (int j = VL; j < TK; j += VL) top = vmax(top, load(s + j));
  float peak = std::max(m, max(top));
  if (peak > m) {
    float shrink = std::exp(m - peak);
    for (int d = 0; d < hs; d += VL) store(o + d, load(o + d) * splat(shrink));
    l *= shrink;
    m = peak;
  }
  vf total{};
  for (int j = 0; j < TK; j += VL) {
    vf e = vexp(load(s + j) - splat(peak));
    store(s + j, e);
    total += e;
  }
  l += sum(total);
}

// Where the K and V rows (all heads) of `keys` tokens from `key` on lie.
template <typename T>
void find_rows(const Args& a, const int32_t* table, const T* pool, int key, int keys, const T** k, const T** v) {
  const int64_t row_stride = a.kv_heads * a.head_size;
  for (int j = 0; j < keys; j++) {
    k[j] = pool + int64_t(table[(key + j) / a.block_size]) * a.block_stride + ((key + j) % a.block_size) * row_stride;
    v[j] = k[j] + a.value_offset;
  }
}

template <typename T>
void run_task(const Args& a, const Task& t, const T* q, const T* pool, T* out, float* partials, Scratch& scratch) {
  const int group = a.heads / a.kv_heads, hs = a.head_size, per_head = t.queries * group;
  const int rows = per_head * t.kv_heads;
  scratch.fit(rows, hs);
  float *qs = scratch.q.data(), *o = scratch.o.data(), *s = scratch.s.data(), *kt = scratch.kt.data();
  float *m = scratch.m.data(), *l = scratch.l.data();
  const int first_row = a.starts[t.sequence];
  const int new_tokens = a.starts[t.sequence + 1] - first_row;
  const int first_position = a.lens[t.sequence] - new_tokens + t.first_query;
  // Row r of the task is query r % per_head / group under head r / per_head * group + r % group.
  const auto place = [&](int r) {
    const int64_t token = first_row + t.first_query + r % per_head / group;
    return (token * a.heads + int64_t(t.kv_head + r / per_head) * group + r % group) * hs;
  };
  for (int r = 0; r < rows; r++) {
    const T* source = q + place(r);
    for (int d = 0; d < hs; d += VL) {
      store(qs + r * hs + d, load(source + d) * splat(a.scale));
      store(o + r * hs + d, vf{});
    }
    m[r] = -INFINITY;
    l[r] = 0;
  }
  const int32_t* table = a.tables + t.sequence * a.table_width;
  const int64_t first_head = int64_t(t.kv_head) * hs;
  const bool direct = per_head <= DIRECT_ROWS;
  const T *rows_of[2][2][TK];  // two tiles of K and V rows: the next is called for while this one is computed
  int now = 0, keys = std::min(TK, t.end_key - t.first_key);
  find_rows(a, table, pool, t.first_key, keys, rows_of[0][0], rows_of[0][1]);
  for (int key = t.first_key; key < t.end_key; key += TK) {
    const T *const *k = rows_of[now][0], *const *v = rows_of[now][1];
    const int next = std::min(TK, t.end_key - key - TK);
    if (next > 0) find_rows(a, table, pool, key + TK, next, rows_of[1 - now][0], rows_of[1 - now][1]);
    for (int h = 0; h < t.kv_heads; h++) {
      const int64_t head = first_head + int64_t(h) * hs;
      const int r0 = h * per_head;
      if (direct) {
        scores_direct(qs + r0 * hs, per_head, k, v, keys, rows_of[1 - now][0], next, head, hs, s + r0 * TK);
      } else {
        transpose_keys(k, head, keys, hs, kt);
        scores_transposed(qs + r0 * hs, per_head, kt, hs, s + r0 * TK);
      }
    }
    for (int r = 0; r < rows; r++) {
      const int visible = std::min(keys, first_position + r % per_head / group - key + 1);
      soften(s + r * TK, visible, m[r], l[r], o + r * hs, hs);
    }
    for (int h = 0; h < t.kv_heads; h++) {
      const int r0 = h * per_head;
      accumulate(s + r0 * TK, per_head, v, first_head + int64_t(h) * hs, keys, hs, o + r0 * hs);
    }
    now = 1 - now;
    keys = next;
  }
  if (t.partial >= 0) {  // one query: the parts are joined when all are there
    float* p = partials + size_t(t.partial) * group * (hs + 2);
    for (int r = 0; r < rows; r++) {
      p[r * (hs + 2)] = m[r];
      p[r * (hs + 2) + 1] = l[r];
      std::memcpy(p + r * (hs + 2) + 2, o + r * hs, hs * 4);
    }
    return;
  }
  for (int r = 0; r < rows; r++) {
    T* target = out + place(r);
    const vf inverse = splat(1.0f / l[r]);
    for (int d = 0; d < hs; d += VL) store(target + d, load(o + r * hs + d) * inverse);
  }
}

// Joins the parts of one decode; part i of a head lies i * kv_heads slots behind the head's first.
template <typename T>
void join_parts(const Args& a, int sequence, int kv_head, int slot, int parts, const float* partials, T* out) {
  const int group = a.heads / a.kv_heads, hs = a.head_size, step = hs + 2;
  const size_t stride = size_t(a.kv_heads) * group * step;
  for (int r = 0; r < group; r++) {
    const float* p = partials + (size_t(slot) * group + r) * step;
    float peak = -INFINITY, total = 0;
    for (int i = 0; i < parts; i++) peak = std::max(peak, p[i * stride]);
    for (int i = 0; i < parts; i++) total += p[i * stride + 1] * std::exp(p[i * stride] - peak);
    T* target = out + (int64_t(a.starts[sequence]) * a.heads + kv_head * group + r) * hs;
    for (int d = 0; d < hs; d += VL) {
      vf x{};
      for (int i = 0; i < parts; i++) x += load(p + i * stride + 2 + d) * splat(std::exp(p[i * stride] - peak));
      store(target + d, x * splat(1.0f / total));
    }
  }
}

template <typename T>
void attend(const Args& a, const T* q, const T* k, const T* v, T* pool, T* out, int threads) {
  const int64_t width = a.kv_heads * a.head_size;
  const int group = a.heads / a.kv_heads;
  std::vector<Task> tasks;
  std::vector<std::array<int, 4>> joins;  // sequence, KV head, slot, parts
  int slots = 0, decode_parts = 0;
  for (int b = 0; b < a.sequences; b++)
    if (a.starts[b + 1] - a.starts[b] == 1) decode_parts += (a.lens[b] + PART - 1) / PART;
  // With work enough for all threads a task takes all heads of a key: they lie side by side in memory.
  const int together = decode_parts >= 4 * threads ? int(a.kv_heads) : 1;
  for (int b = 0; b < a.sequences; b++) {
    const int queries = a.starts[b + 1] - a.starts[b], len = a.lens[b];
    if (queries == 1) {
      const int parts = (len + PART - 1) / PART;
      for (int p = 0; p < parts; p++)
        for (int h = 0; h < a.kv_heads; h += together)
          tasks.push_back({b, h, together, 0, 1, p * PART, std::min(len, (p + 1) * PART),
                           parts > 1 ? slots + p * int(a.kv_heads) + h : -1});
      for (int h = 0; parts > 1 && h < a.kv_heads; h++) joins.push_back({b, h, slots + h, parts});
      if (parts > 1) slots += parts * int(a.kv_heads);
      continue;
    }
    for (int h = 0; h < a.kv_heads; h++)
      for (int first = (queries - 1) / QT * QT; first >= 0; first -= QT) {  // the long ones first
        const int n = std::min(QT, queries - first);
        tasks.push_back({b, h, 1, first, n, 0, len - queries + first + n, -1});
      }
  }
  std::vector<float> partials(size_t(slots) * group * (a.head_size + 2));
  const int team = a.tokens == 1 && a.lens[0] <= 64 ? 1 : threads;
#pragma omp parallel num_threads(team)
  {
    static thread_local Scratch scratch;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a.tokens; t++) {
      const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
      T* target = pool + block * a.block_stride + offset * width;
      std::memcpy(target, k + t * width, width * sizeof(T));
      std::memcpy(target + a.value_offset, v + t * width, width * sizeof(T));
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < int64_t(tasks.size()); i++)
      run_task(a, tasks[i], q, pool, out, partials.data(), scratch);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < int64_t(joins.size()); i++)
      join_parts(a, joins[i][0], joins[i][1], joins[i][2], joins[i][3], partials.data(), out);
  }
}

}  // namespace

extern "C" {

int pdmesh_vector_length() { return VL; }

// q [T, heads, HS], k, v [T, kv_heads, HS], out [T, heads * HS], all contiguous and of one type; pool points at
// this layer's keys in block 0. is_bf16: 0 for float, 1 for bfloat16.
void pdmesh_attention(int is_bf16, const void* q, const void* k, const void* v, void* pool, void* out,
                      const int64_t* slots, const int32_t* tables, const int32_t* starts, const int32_t* lens,
                      int64_t table_width, int64_t sequences, int64_t tokens, int64_t block_stride,
                      int64_t value_offset, int64_t block_size, int64_t kv_heads, int64_t heads, int64_t head_size,
                      float scale, int threads) {
  const Args a{slots,        tables,       starts,     lens,     table_width, sequences, tokens,
               block_stride, value_offset, block_size, kv_heads, heads,       head_size, scale};
  if (is_bf16)
    attend(a, static_cast<const bf16*>(q), static_cast<const bf16*>(k), static_cast<const bf16*>(v),
           static_cast<bf16*>(pool), static_cast<bf16*>(out), threads);
  else
    attend(a, static_cast<const float*>(q), static_cast<const float*>(k), static_cast<const float*>(v),
           static_cast<float*>(pool), static_cast<float*>(out), threads);
}
}
