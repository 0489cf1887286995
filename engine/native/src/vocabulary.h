// Passes over one row of the vocabulary that compilers vectorise by themselves. Sums run in fixed lanes, so they are
// the same on every machine. What compilers don't vectorise is in rows.h, once per instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(DSPARK_X86) && defined(__GNUC__) && !defined(__clang__)
#define DSPARK_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DSPARK_CLONES
#endif

namespace dspark {

constexpr int kSumLanes = 16;
constexpr int kSumBlock = 256;

// First index that holds `value`; `size` if none does.
int row_find(const float* x, int size, float value);
// Sum of up to kSumBlock values.
double block_sum(const float* x, int size);
// The sum of a row of any size.
double row_sum(const float* x, int size);
void row_divide(float* x, int size, float by);

// Min-p, top-k and top-p in place, then normalised (filter.cpp).
void filter_row(float* p, int size, int top_k, double top_p, double min_p);
// Inverse CDF: the first index whose cumulative weight exceeds u times the sum; -1 if the sum is 0 (rows.cpp).
int64_t draw(const float* weights, int size, double u);
// argmax of log p + G under a key, the noise being that of the token ids (null: the index itself) (random.cpp).
int64_t coupled_argmax(const float* p, int size, uint32_t key0, uint32_t key1, const int32_t* ids = nullptr);

}  // namespace dspark
