// Draws one token per row of logits. The definition is engine_core/execution/sampler.py; this is its fast form.
#include <omp.h>

#include <initializer_list>

#include "logprobs.h"

namespace {

// What a row's draw needs: engine_core/execution/native_sampler.py has the same layout.
struct Row {
  double temperature, top_p, min_p, frequency, presence, repetition;
  int64_t top_k;
  int64_t logprobs;  // likeliest tokens to report, -1 to report nothing
  uint64_t key;      // of the seed
  int64_t position;
  const int32_t* seen;    // distinct tokens that penalties concern,
  const int32_t* counts;  // and how often each is in the output
  int64_t num_seen;
  const int64_t* bias_ids;
  const double* biases;
  int64_t num_biases;
  const uint32_t* mask;  // bit t % 32 of word t / 32 allows token t; null allows all
  const int64_t* banned;
  int64_t num_banned;
};
static_assert(sizeof(Row) == 19 * 8, "native_sampler.py counts on it");

enum : int64_t { NOT_A_NUMBER = -1, NOTHING_LEFT = -2, INFINITE = -3 };

// What a thread keeps between rows.
struct Room {
  std::vector<float> weights, raw, best, undo;
  std::vector<int32_t> kept;
};

uint64_t mix(uint64_t z) {  // splitmix64's finaliser
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

double uniform(const Row& row) {
  return double(mix(row.key + uint64_t(row.position) * 0x9E3779B97F4A7C15u) >> 11) * 0x1p-53;
}

// Tokens that the mask forbids get -inf. Returns whether all are numbers, forbidden ones included.
bool allow(float* x, int64_t v, const uint32_t* mask) {
  vi lane, wrong{};
  for (int j = 0; j < VL; j++) lane[j] = 1 << j;
  const vf never = splat(-INFINITY);
  int64_t i = 0;
  for (; i + VL <= v; i += VL) {
    const vf y = load(x + i);
    wrong |= (y != y);
    const int32_t bits = int32_t(mask[i / 32] >> (i % 32));
    store(x + i, select(((vi{} + bits) & lane) != 0, y, never));
  }
  bool good = !any(wrong);
  for (; i < v; i++) {
    good = good && x[i] == x[i];
    if (!(mask[i / 32] >> (i % 32) & 1)) x[i] = -INFINITY;
  }
  return good;
}

// Bans, biases and penalties, in the definition's order; false when a number is none. Every step's sums are
// float64, rounded once. (`volatile` keeps the compiler from fusing what numpy does one by one.)
bool adjust(float* x, int64_t v, const Row& row, Room& room) {
  if (row.mask && !allow(x, v, row.mask)) return false;
  room.undo.clear();
  bool good = true;
  for (int64_t i = 0; i < row.num_banned; i++) {
    const int64_t t = row.banned[i];
    const bool there = t >= 0 && t < v;
    room.undo.push_back(there ? x[t] : 0.0f);
    if (!there) continue;
    good = good && x[t] == x[t];
    x[t] = -INFINITY;
  }
  if (row.mask && row.num_banned && highest(x, v) == -INFINITY)  // the mask alone holds
    for (int64_t i = row.num_banned; i-- > 0;)
      if (row.banned[i] >= 0 && row.banned[i] < v) x[row.banned[i]] = room.undo[i];
  for (int64_t i = 0; i < row.num_biases; i++) {
    const int64_t t = row.bias_ids[i];
    if (t >= 0 && t < v) x[t] = float(double(x[t]) + row.biases[i]);
  }
  for (int64_t i = 0; i < row.num_seen; i++) {
    float& logit = x[row.seen[i]];
    volatile double y = logit;
    if (row.repetition != 1) y = y > 0 ? y / row.repetition : y * row.repetition;
    if (row.counts[i]) {
      volatile double times = row.frequency * row.counts[i];
      volatile double penalty = times + row.presence;
      y = y - penalty;
    }
    logit = float(y);
  }
  return good;
}

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
    if (counted ? int64_t(kept.size()) >= row.top_k : mass >= row.top_p * all) break;
  }
  const Likelier likelier{x};
  if (row.top_k > 0 && row.top_k < int64_t(kept.size())) {
    std::nth_element(kept.begin(), kept.begin() + row.top_k - 1, kept.end(), likelier);
    kept.resize(row.top_k);
  }
  if (row.top_p >= 1) return;
  double total = 0;
  if (counted)
    for (int32_t i : kept) total += weights[i];
  else
    total = all;
  const double wanted = row.top_p * total;
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

// Returns a token, or why there is none. Equal to draw() of the definition but for rounding.
int64_t draw(const float* x, int64_t v, const Row& row, Room& room) {
  const float peak = highest(x, v);
  int64_t best = -1, i = 0;
  if (peak != peak) return NOT_A_NUMBER;
  if (peak == -INFINITY) return NOTHING_LEFT;
  if (peak == INFINITY) return INFINITE;
  if (row.temperature <= 0) {
    for (best = 0; x[best] != peak;) best++;
    return best;
  }
  room.weights.resize((v + VL - 1) / VL * VL);
  float* w = room.weights.data();
  std::vector<int32_t>& kept = room.kept;
  const float heat = float(row.temperature), min_p = float(row.min_p);
  const vf top = splat(peak), temperature = splat(heat);
  for (i = 0; i + VL <= v; i += VL) store(w + i, vexp((load(x + i) - top) / temperature));
  for (; i < v; i++) w[i] = std::exp((x[i] - peak) / heat);
  if (row.top_p >= 1 && (row.top_k <= 0 || row.top_k >= v)) {
    double total = 0;
    for (i = 0; i < v; i++) {
      if (w[i] < min_p) w[i] = 0;
      total += w[i];
    }
    double sum = 0;
    const double target = uniform(row) * total;
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
    if (w[t] >= min_p) total += w[t];
  const double target = uniform(row) * total;
  for (int32_t t : kept) {
    if (w[t] < min_p) continue;
    sum += w[t];
    best = t;
    if (sum > target) break;
  }
  return best;
}

// Where the log probabilities of one row go.
struct Report {
  double* logprob;
  int32_t* rank;
  int32_t* top_ids;
  double* top_logprobs;
};

int64_t sample(float* x, int64_t v, const Row& row, Room& room, const Report& out) {
  const float* raw = x;
  const bool changed = row.mask || row.num_banned || row.num_biases || row.num_seen;
  double sum = 0;
  if (row.logprobs >= 0) {  // by the model itself: before anything is done to the row
    const float peak = highest(x, v);
    if (peak != peak) return NOT_A_NUMBER;
    sum = log_sum(x, v, peak);
    const int64_t top = std::min(row.logprobs, v);
    if (top > 0) likeliest(x, v, top, out.top_ids, room.best);
    for (int64_t i = 0; i < top; i++) out.top_logprobs[i] = room.best[i] - sum;
    if (changed) {
      room.raw.assign(x, x + v);
      raw = room.raw.data();
    }
  }
  if (changed && !adjust(x, v, row, room)) return NOT_A_NUMBER;
  const int64_t token = draw(x, v, row, room);
  if (row.logprobs >= 0 && token >= 0) {
    *out.logprob = raw[token] - sum;
    *out.rank = rank_of(raw, v, token);
  }
  return token;
}

}  // namespace

extern "C" {

// logits [rows, v] are overwritten; out [rows]: a token, -1 for NaN, -2 when none may be drawn, -3 for infinity.
// Rows that ask for log probabilities get them in logprobs and ranks [rows], top_ids and top_logprobs
// [rows, width], where width is at least what any row asks for, or v.
void pdmesh_sample(float* logits, int64_t rows, int64_t v, const void* specs, int64_t* out, double* logprobs,
                   int32_t* ranks, int32_t* top_ids, double* top_logprobs, int64_t width, int threads) {
  const Row* row = static_cast<const Row*>(specs);
#pragma omp parallel num_threads(threads) if (rows > 1)
  {
    static thread_local Room room;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++)
      out[r] = sample(logits + r * v, v, row[r], room,
                      {logprobs + r, ranks + r, top_ids + r * width, top_logprobs + r * width});
  }
}
}
