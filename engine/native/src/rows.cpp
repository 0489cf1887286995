// Work on rows of the vocabulary after the head.
#include <cmath>
#include <cstdint>
#include <limits>

#if defined(DSPARK_X86) && defined(__GNUC__) && !defined(__clang__)
#define DSPARK_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DSPARK_CLONES
#endif

namespace {

constexpr int kStrip = 64;

// The hash of engine/noise.py, word for word.
inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x21F0AAADu;
    x ^= x >> 15;
    x *= 0x735A2D97u;
    x ^= x >> 15;
    return x;
}

inline uint32_t noise(uint32_t token, uint32_t key0, uint32_t key1) { return mix(mix(token ^ key0) + key1); }

inline float uniform(uint32_t r) { return (static_cast<float>(r) + 0.5f) * 0x1p-32f; }

// log p + G with G = -log(-log1p(-u)), as engine/noise.py computes it.
inline float score(float p, uint32_t r) {
    const float u = std::fmin(uniform(r), 1.0f - 0x1p-24f);
    return std::log(p) - std::log(-std::log1p(-u));
}

// Whether any of a strip's tokens can reach the score whose exp(-score) is `cut`: since -log1p(-u) >= u, a token's
// score is at most log(p / u).
DSPARK_CLONES
bool may_win(const float* p, int count, uint32_t first, uint32_t key0, uint32_t key1, float cut) {
    uint32_t found = 0;
    for (int i = 0; i < count; ++i) {
        // Shifted to the signed range and back, because vectors convert signed words only.
        const int32_t shifted = static_cast<int32_t>(noise(first + i, key0, key1) ^ 0x80000000u);
        const float u = (static_cast<float>(shifted) + 2147483648.0f) * 0x1p-32f;
        found |= u <= p[i] * cut;
    }
    return found != 0;
}

int64_t coupled_argmax(const float* p, int size, uint32_t key0, uint32_t key1) {
    int likeliest = 0;
    for (int i = 1; i < size; ++i)
        if (p[i] > p[likeliest]) likeliest = i;
    float best = -std::numeric_limits<float>::infinity();
    float bound = score(p[likeliest], noise(likeliest, key0, key1));
    int64_t token = likeliest;
    // A little generous, so that rounding never hides a winner.
    float cut = std::exp(-bound) * 1.001f + 1e-30f;
    for (int at = 0; at < size; at += kStrip) {
        const int count = size - at < kStrip ? size - at : kStrip;
        if (!may_win(p + at, count, at, key0, key1, cut)) continue;
        for (int i = at; i < at + count; ++i) {
            if (p[i] <= 0.0f) continue;
            const float value = score(p[i], noise(i, key0, key1));
            if (value > best) {
                best = value;
                token = i;
                if (value > bound) {
                    bound = value;
                    cut = std::exp(-bound) * 1.001f + 1e-30f;
                }
            }
        }
    }
    return token;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// argmax of log p + G for each row; p [rows][size], keys [rows][2], out [rows]
void dspark_coupled_argmax(const float* p, int rows, int size, const uint32_t* keys, int64_t* out) {
    for (int r = 0; r < rows; ++r)
        out[r] = coupled_argmax(p + static_cast<int64_t>(r) * size, size, keys[2 * r], keys[2 * r + 1]);
}

}  // extern "C"
#pragma GCC visibility pop
