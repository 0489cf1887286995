// Passes over one row of the vocabulary, written so that compilers vectorise them: sums and maxima run in fixed lanes,
// so a row's result is the same on every machine.
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

// The largest value; NaN if there is one.
float row_max(const float* x, int size);
// First index that holds `value`; `size` if none does.
int row_find(const float* x, int size, float value);
// Sum of up to kSumBlock values.
double block_sum(const float* x, int size);
// The sum of a row of any size.
double row_sum(const float* x, int size);
void row_divide(float* x, int size, float by);
// out = exp((x - top) / temperature) / sum. Below e^-87 it is 0.
void row_softmax(const float* x, int size, float top, float temperature, float* out);

}  // namespace dspark
