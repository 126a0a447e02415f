// Draws one token per row of logits. The definition is engine_core/execution/sampler.py; this is its fast form.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include "vec.h"

namespace {

struct Row {
  float temperature, top_p, min_p;
  int64_t top_k;
  double uniform;
};

// Orders tokens by likelihood, equal ones by id.
struct Likelier {
  const float* x;
  bool operator()(int32_t a, int32_t b) const { return x[a] != x[b] ? x[a] > x[b] : a < b; }
};

// Keeps in `kept` the top_k likeliest and of these the fewest whose share reaches top_p, in any order. Nearly
// always the few tokens above some share of the likeliest (weight 1) hold them all: only these are sorted.
void truncate(const float* x, const float* weights, int64_t v, const Row& row, std::vector<int32_t>& kept) {
  const bool counted = row.top_k > 0 && row.top_k < v;
  double all = 0;
  for (int64_t i = 0; i < v; i++) all += weights[i];
  for (const float floor : {1e-2f, 1e-4f, 1e-6f, 1e-37f}) {
    double mass = 0;
    kept.clear();
    for (int64_t i = 0; i < v; i++)
      if (weights[i] >= floor) kept.push_back(int32_t(i)), mass += weights[i];
    if (counted ? int64_t(kept.size()) >= row.top_k : mass >= double(row.top_p) * all) break;
  }
  const Likelier likelier{x};
  if (row.top_k > 0 && row.top_k < int64_t(kept.size())) {
    std::nth_element(kept.begin(), kept.begin() + row.top_k - 1, kept.end(), likelier);
    kept.resize(row.top_k);
  }
  if (row.top_p >= 1.0f) return;
  double total = 0;
  if (counted)
    for (int32_t i : kept) total += weights[i];
  else
    total = all;
  const double wanted = double(row.top_p) * total;
  double before = 0;
  size_t sorted = 0;
  for (size_t step = 64; sorted < kept.size(); step *= 8) {  // seldom is more than a small head to be sorted
    const size_t end = std::min(kept.size(), sorted + step);
    std::partial_sort(kept.begin() + sorted, kept.begin() + end, kept.end(), likelier);
    for (; sorted < end; sorted++) {
      if (before >= wanted && sorted > 0) {
        kept.resize(sorted);
        return;
      }
      before += weights[kept[sorted]];
    }
  }
}

// Returns a token, -1 for NaN, -2 when none may be drawn. Equal to draw() of the definition but for rounding.
int64_t draw(const float* x, int64_t v, const Row& row, std::vector<float>& room, std::vector<int32_t>& kept) {
  float peak = -INFINITY;
  int64_t best = -1, i = 0;
  vf tops = splat(-INFINITY);
  vi wrong{};
  for (; i + VL <= v; i += VL) {
    vf y = load(x + i);
    wrong |= (y != y);
    tops = vmax(tops, y);
  }
  for (int j = 0; j < VL; j++)
    if (wrong[j]) return -1;
  peak = max(tops);
  for (; i < v; i++) {
    if (x[i] != x[i]) return -1;
    peak = std::max(peak, x[i]);
  }
  if (peak == -INFINITY) return -2;
  if (row.temperature <= 0) {
    for (best = 0; x[best] != peak;) best++;
    return best;
  }
  room.resize((v + VL - 1) / VL * VL);
  float* w = room.data();
  const vf top = splat(peak), temperature = splat(row.temperature);
  for (i = 0; i + VL <= v; i += VL) store(w + i, vexp((load(x + i) - top) / temperature));
  for (; i < v; i++) w[i] = std::exp((x[i] - peak) / row.temperature);
  if (row.top_p >= 1.0f && (row.top_k <= 0 || row.top_k >= v)) {
    double total = 0;
    for (i = 0; i < v; i++) {
      if (w[i] < row.min_p) w[i] = 0;
      total += w[i];
    }
    double sum = 0;
    const double target = row.uniform * total;
    for (i = 0; i < v; i++) {
      if (w[i] == 0) continue;
      sum += w[i];
      best = i;
      if (sum > target) break;
    }
    return best;
  }
  truncate(x, w, v, row, kept);
  std::sort(kept.begin(), kept.end());
  double total = 0, sum = 0;
  for (int32_t t : kept)
    if (w[t] >= row.min_p) total += w[t];
  const double target = row.uniform * total;
  for (int32_t t : kept) {
    if (w[t] < row.min_p) continue;
    sum += w[t];
    best = t;
    if (sum > target) break;
  }
  return best;
}

}  // namespace

extern "C" {

// logits [rows, v]; banned ids of row r lie at banned[banned_starts[r]] to banned[banned_starts[r + 1]] and are
// overwritten by -inf. out [rows]: a token, -1 for NaN, -2 when none may be drawn.
void pdmesh_sample(float* logits, int64_t rows, int64_t v, const float* temperature, const float* top_p,
                   const float* min_p, const int64_t* top_k, const double* uniform, const int64_t* banned,
                   const int64_t* banned_starts, int64_t* out, int threads) {
#pragma omp parallel num_threads(threads) if (rows > 1)
  {
    static thread_local std::vector<float> room;
    static thread_local std::vector<int32_t> kept;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++) {
      float* x = logits + r * v;
      for (int64_t i = banned_starts[r]; i < banned_starts[r + 1]; i++)
        if (banned[i] >= 0 && banned[i] < v) x[banned[i]] = -INFINITY;
      out[r] = draw(x, v, {temperature[r], top_p[r], min_p[r], top_k[r], uniform[r]}, room, kept);
    }
  }
}
}
