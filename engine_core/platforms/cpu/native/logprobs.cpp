// Log probabilities of given tokens, as of a prompt's.
#include <omp.h>

#include "logprobs.h"

extern "C" {

// logits [rows, v], one token each -> logprobs [rows] (NaN where the row holds one), ranks [rows], and the `top`
// likeliest tokens with theirs, top_ids and top_logprobs [rows, top]; 0 <= top <= v.
void pdmesh_score(const float* logits, int64_t rows, int64_t v, const int64_t* tokens, int64_t top, double* logprobs,
                  int32_t* ranks, int32_t* top_ids, double* top_logprobs, int threads) {
#pragma omp parallel num_threads(threads) if (rows > 1)
  {
    static thread_local std::vector<float> best;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++) {
      const float* x = logits + r * v;
      const float peak = highest(x, v);
      logprobs[r] = NAN;
      if (peak != peak) continue;
      const double sum = log_sum(x, v, peak);
      logprobs[r] = x[tokens[r]] - sum;
      ranks[r] = rank_of(x, v, tokens[r]);
      if (top < 1) continue;
      likeliest(x, v, top, top_ids + r * top, best);
      for (int64_t i = 0; i < top; i++) top_logprobs[r * top + i] = best[i] - sum;
    }
  }
}
}
