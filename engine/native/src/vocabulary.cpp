#include "vocabulary.h"

namespace dspark {

DSPARK_CLONES
int row_find(const float* x, int size, float value) {
    for (int at = 0; at < size; at += kSumBlock) {
        const int end = std::min(at + kSumBlock, size);
        int32_t found = 0;
        for (int i = at; i < end; ++i) found |= x[i] == value;
        if (!found) continue;
        for (int i = at; i < end; ++i)
            if (x[i] == value) return i;
    }
    return size;
}

DSPARK_CLONES
double block_sum(const float* x, int size) {
    double sum[kSumLanes];
    for (int j = 0; j < kSumLanes; ++j) sum[j] = 0.0;
    int i = 0;
    for (; i + kSumLanes <= size; i += kSumLanes)
        for (int j = 0; j < kSumLanes; ++j) sum[j] += x[i + j];
    for (; i < size; ++i) sum[0] += x[i];
    for (int j = 1; j < kSumLanes; ++j) sum[0] += sum[j];
    return sum[0];
}

double row_sum(const float* x, int size) {
    double sum = 0.0;
    for (int at = 0; at < size; at += kSumBlock) sum += block_sum(x + at, std::min(kSumBlock, size - at));
    return sum;
}

DSPARK_CLONES
void row_divide(float* x, int size, float by) {
    for (int i = 0; i < size; ++i) x[i] /= by;
}

}  // namespace dspark
