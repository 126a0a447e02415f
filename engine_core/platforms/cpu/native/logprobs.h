// Log probabilities of a row of logits: what sampler.cpp and logprobs.cpp share. The definition is
// engine_core/execution/logprobs.py.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

static inline bool any(vi x) {
  int64_t s[VL / 2], all = 0;
  std::memcpy(s, &x, sizeof s);
  for (int i = 0; i < VL / 2; i++) all |= s[i];
  return all != 0;
}

// The highest of x [v]; NaN when any is NaN.
static inline float highest(const float* x, int64_t v) {
  float peak = -INFINITY;
  vf tops = splat(-INFINITY);
  vi wrong{};
  int64_t i = 0;
  for (; i + VL <= v; i += VL) {
    vf y = load(x + i);
    wrong |= (y != y);
    tops = vmax(tops, y);
  }
  if (any(wrong)) return NAN;
  peak = max(tops);
  for (; i < v; i++) {
    if (x[i] != x[i]) return NAN;
    peak = std::max(peak, x[i]);
  }
  return peak;
}

// log(sum(exp(x))); `peak` is the highest of x.
static inline double log_sum(const float* x, int64_t v, float peak) {
  constexpr int64_t BLOCK = 64 * VL;  // summed in float lanes; more of them would lose digits
  const vf top = splat(peak);
  double total = 0;
  int64_t i = 0;
  while (i + VL <= v) {
    const int64_t end = std::min(v - VL, i + BLOCK - VL);
    vf part{};
    for (; i <= end; i += VL) part += vexp(load(x + i) - top);
    total += sum(part);
  }
  for (; i < v; i++) total += std::exp(x[i] - peak);
  return double(peak) + std::log(total);
}

// The k likeliest tokens, best first, equal ones by id; 1 <= k <= v.
static inline void likeliest(const float* x, int64_t v, int64_t k, int32_t* ids, std::vector<float>& best) {
  best.assign(k, -INFINITY);
  int64_t count = 0;
  const auto take = [&](int64_t t) {
    int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && best[at - 1] < x[t]; at--) best[at] = best[at - 1], ids[at] = ids[at - 1];
    best[at] = x[t], ids[at] = int32_t(t);
  };
  int64_t i = 0;
  for (; i < k; i++) take(i);
  const auto rest = [&](int64_t end) {
    for (; i < end; i++)
      if (x[i] > best[k - 1]) take(i);
  };
  while (i + 4 * VL <= v) {
    const vf least = splat(best[k - 1]);
    const float* y = x + i;
    const vi higher = (load(y) > least) | (load(y + VL) > least) | (load(y + 2 * VL) > least) |
                      (load(y + 3 * VL) > least);
    if (any(higher))
      rest(i + 4 * VL);
    else
      i += 4 * VL;
  }
  rest(v);
}

// How many of x [count] are above `level`, or, with `equal`, at least as high.
static inline int64_t count_above(const float* x, int64_t count, float level, bool equal) {
  const vf bar = splat(level);
  vi found{};
  int64_t i = 0, total = 0;
  if (equal)
    for (; i + VL <= count; i += VL) found -= load(x + i) >= bar;
  else
    for (; i + VL <= count; i += VL) found -= load(x + i) > bar;
  int32_t lanes[VL];
  std::memcpy(lanes, &found, sizeof lanes);
  for (int j = 0; j < VL; j++) total += lanes[j];
  for (; i < count; i++) total += equal ? x[i] >= level : x[i] > level;
  return total;
}

// Place of a token among all by likelihood, equal ones by id; 1 is the likeliest.
static inline int32_t rank_of(const float* x, int64_t v, int64_t token) {
  return int32_t(1 + count_above(x, token, x[token], true) +
                 count_above(x + token + 1, v - token - 1, x[token], false));
}
