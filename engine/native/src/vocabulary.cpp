#include "vocabulary.h"

namespace dspark {

namespace {

// e^x for x in [-87, 0] within 2 ulp or so.
inline float exponential(float x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const float n = (x * 1.44269504088896341f + kRound) - kRound;
    float f = x - n * 0.693359375f;
    f = f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + (f + 1.0f);
    const int32_t bits = (static_cast<int32_t>(n) + 127) * (1 << 23);
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

}  // namespace

DSPARK_CLONES
float row_max(const float* x, int size) {
    float most[kSumLanes];
    int32_t bad[kSumLanes];
    for (int j = 0; j < kSumLanes; ++j) most[j] = -std::numeric_limits<float>::infinity(), bad[j] = 0;
    int i = 0;
    for (; i + kSumLanes <= size; i += kSumLanes)
        for (int j = 0; j < kSumLanes; ++j) {
            most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
            bad[j] |= x[i + j] != x[i + j];
        }
    for (; i < size; ++i) {
        most[0] = x[i] > most[0] ? x[i] : most[0];
        bad[0] |= x[i] != x[i];
    }
    for (int j = 1; j < kSumLanes; ++j) {
        most[0] = std::max(most[0], most[j]);
        bad[0] |= bad[j];
    }
    return bad[0] ? std::numeric_limits<float>::quiet_NaN() : most[0];
}

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

DSPARK_CLONES
void exponentials(const float* x, int size, float top, float temperature, float* out) {
    for (int i = 0; i < size; ++i) {
        const float y = (x[i] - top) / temperature;
        const float e = exponential(y < -87.0f ? -87.0f : y);
        out[i] = y < -87.0f ? 0.0f : e;
    }
}

void row_softmax(const float* x, int size, float top, float temperature, float* out) {
    exponentials(x, size, top, temperature, out);
    row_divide(out, size, static_cast<float>(row_sum(out, size)));
}

}  // namespace dspark
