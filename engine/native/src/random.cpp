// The coupled draw of seeded requests, and the generator behind all random numbers: engine/noise.py, word for word.
#include "model.h"
#include "pool.h"
#include "vocabulary.h"

namespace dspark {

namespace {

constexpr int kRun = 64;

// The hash.
inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x21F0AAADu;
    x ^= x >> 15;
    x *= 0x735A2D97u;
    x ^= x >> 15;
    return x;
}

inline uint32_t noise(uint32_t token, uint32_t key0, uint32_t key1) { return mix(mix(token ^ key0) + key1); }

// Rounded in the same two steps as there: the signed word, then 2^32 added.
inline float uniform(uint32_t r) {
    const int32_t word = static_cast<int32_t>(r);
    const float value = static_cast<float>(word) + (word < 0 ? 4294967296.0f : 0.0f);
    return (value + 0.5f) * 0x1p-32f;
}

// log p + G with G = -log(-log1p(-u)); the logarithms may differ from torch's in the last bit.
inline float score(float p, uint32_t r) {
    const float u = std::fmin(uniform(r), 1.0f - 0x1p-24f);
    return std::log(p) - std::log(-std::log1p(-u));
}

// Whether any of a strip's tokens can reach the score whose exp(-score) is `cut`: since -log1p(-u) >= u, a token's
// score is at most log(p / u).
DSPARK_CLONES
bool may_win(const float* p, const int32_t* ids, int count, uint32_t key0, uint32_t key1, float cut) {
    uint32_t found = 0;
    for (int i = 0; i < count; ++i) {
        // Shifted to the signed range and back, because vectors convert signed words only.
        const int32_t shifted = static_cast<int32_t>(noise(static_cast<uint32_t>(ids[i]), key0, key1) ^ 0x80000000u);
        const float u = (static_cast<float>(shifted) + 2147483648.0f) * 0x1p-32f;
        found |= u <= p[i] * cut;
    }
    return found != 0;
}

// One block of Philox4x32-10.
void philox(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]}, k[2] = {key[0], key[1]};
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{c[0]} * 0xD2511F53u, p1 = uint64_t{c[2]} * 0xCD9E8D57u;
        const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
                                  static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
        std::memcpy(c, next, sizeof(c));
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    std::memcpy(out, c, sizeof(c));
}

}  // namespace

int64_t coupled_argmax(const float* p, int size, uint32_t key0, uint32_t key1, const int32_t* ids) {
    const auto id = [ids](int i) { return static_cast<uint32_t>(ids ? ids[i] : i); };
    const int likeliest = row_find(p, size, best_kernels().row_max(p, size)) % size;
    float best = -std::numeric_limits<float>::infinity();
    float bound = score(p[likeliest], noise(id(likeliest), key0, key1));
    int64_t token = likeliest;
    // A little generous, so that rounding never hides a winner.
    float cut = std::exp(-bound) * 1.001f + 1e-30f;
    int32_t run[kRun];
    for (int at = 0; at < size; at += kRun) {
        const int count = size - at < kRun ? size - at : kRun;
        for (int i = 0; i < count; ++i) run[i] = static_cast<int32_t>(id(at + i));
        if (!may_win(p + at, run, count, key0, key1, cut)) continue;
        for (int i = at; i < at + count; ++i) {
            if (p[i] <= 0.0f) continue;
            const float value = score(p[i], noise(id(i), key0, key1));
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

}  // namespace dspark

using namespace dspark;

#pragma GCC visibility push(default)
extern "C" {

// argmax of log p + G for each row; p [rows][size], keys [rows][2], out [rows]
void dspark_coupled_argmax(const float* p, int rows, int size, const uint32_t* keys, int64_t* out) {
    by_rows(rows, [&](int r) {
        out[r] = coupled_argmax(p + static_cast<int64_t>(r) * size, size, keys[2 * r], keys[2 * r + 1]);
    });
}

// streams [n][4], positions [n], rounds [n] -> out [n][slots], as `uniforms` there
void dspark_uniforms(const int64_t* streams, const int64_t* positions, const int64_t* rounds, int n, int slots,
                     int purpose, double* out) {
    for (int i = 0; i < n; ++i) {
        const int64_t* s = streams + 4 * i;
        const uint32_t key[2] = {static_cast<uint32_t>(s[0]), static_cast<uint32_t>(s[1])};
        for (int slot = 0; slot < slots; ++slot) {
            const uint32_t counter[4] = {static_cast<uint32_t>(positions[i]), static_cast<uint32_t>(slot * 4 + purpose),
                                         static_cast<uint32_t>(rounds[i] ^ s[3]), static_cast<uint32_t>(s[2])};
            uint32_t words[4];
            philox(counter, key, words);
            const uint64_t bits = (uint64_t{words[0] >> 5} << 26) + (words[1] >> 6);
            out[i * slots + slot] = static_cast<double>(bits) * 0x1p-53;
        }
    }
}

// seeds, choices, positions [n] -> out [n][2], as `row_keys` there
void dspark_row_keys(const int64_t* seeds, const int64_t* choices, const int64_t* positions, int n, uint32_t* out) {
    for (int i = 0; i < n; ++i) {
        const auto seed = static_cast<uint64_t>(seeds[i]);
        const uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
        const uint32_t counter[4] = {static_cast<uint32_t>(positions[i]), static_cast<uint32_t>(choices[i]), 0x5EED, 0};
        uint32_t words[4];
        philox(counter, key, words);
        out[2 * i] = words[0];
        out[2 * i + 1] = words[1];
    }
}

}  // extern "C"
#pragma GCC visibility pop
