// Work on rows of the vocabulary after the head.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

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

// ---- filters

// The largest values of a row, found through a histogram of their leading bits; only the bins in which a cut falls are
// ever sorted. All values are >= 0, so their bit patterns are ordered as they are.
class Ranking {
  public:
    struct Cut {
        int kept = 0;         // how many of the largest values stay
        float least = 0.0f;   // the smallest of them
        int ties = 0;         // how many values equal to it stay
        double mass = 0.0;
    };

    Ranking(const float* p, int size) : p_(p), size_(size), count_(kBins), mass_(kBins) {
        for (int i = 0; i < size; ++i) {
            const int bin = bin_of(p[i]);
            ++count_[bin];
            mass_[bin] += p[i];
        }
    }

    // The n largest (all, if there are fewer).
    Cut by_count(int n) const {
        return walk([n](const Cut& cut, float) { return cut.kept < n; });
    }
    // The fewest whose mass reaches `target`, at least one.
    Cut by_mass(double target) const {
        return walk([target](const Cut& cut, float) { return cut.kept == 0 || cut.mass < target; });
    }
    // All that are at least `floor`.
    Cut by_floor(float floor) const {
        return walk([floor](const Cut&, float value) { return value >= floor; });
    }

  private:
    static constexpr int kBins = 4096;  // sign (always 0), exponent and 4 bits of mantissa

    static int bin_of(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        return static_cast<int>(bits >> 19) & (kBins - 1);
    }

    static float least_of(int bin) {
        const uint32_t bits = static_cast<uint32_t>(bin) << 19;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }

    // Take values in descending order while `goes_on(so far, next)`; it must not come true again.
    template <class Test>
    Cut walk(Test goes_on) const {
        Cut cut;
        std::vector<float> values;
        for (int bin = kBins - 1; bin >= 0; --bin) {
            if (count_[bin] == 0) continue;
            Cut whole = cut;  // if even the bin's least value would still be taken last, the bin goes as a whole
            whole.kept += count_[bin] - 1;
            whole.mass += mass_[bin];
            if (bin > 0 && goes_on(whole, least_of(bin))) {
                ++whole.kept;
                whole.least = least_of(bin);
                whole.ties = size_;  // whatever equals it is in this bin, and stays
                cut = whole;
                continue;
            }
            values.clear();
            for (int i = 0; i < size_; ++i)
                if (bin_of(p_[i]) == bin) values.push_back(p_[i]);
            std::sort(values.begin(), values.end(), std::greater<float>());
            for (const float value : values) {
                if (!goes_on(cut, value)) return cut;
                cut.ties = cut.kept > 0 && value == cut.least ? cut.ties + 1 : 1;
                cut.least = value;
                cut.mass += value;
                ++cut.kept;
            }
        }
        return cut;
    }

    const float* p_;
    const int size_;
    std::vector<int> count_;
    std::vector<double> mass_;
};

// Min-p, top-k and top-p on one row, in place, as engine/sampling.py defines them; then normalised.
void filter_row(float* p, int size, int top_k, double top_p, double min_p) {
    const Ranking ranking(p, size);
    Ranking::Cut cut;
    cut.kept = size, cut.mass = 1.0, cut.ties = size;  // least is 0: everything stays
    if (min_p > 0.0) cut = ranking.by_floor(static_cast<float>(min_p) * *std::max_element(p, p + size));
    if (top_k > 0 && top_k < cut.kept) cut = ranking.by_count(top_k);
    if (top_p < 1.0) {
        const Ranking::Cut nucleus = ranking.by_mass(top_p * cut.mass);
        if (nucleus.kept < cut.kept) cut = nucleus;
    }
    double sum = 0.0;
    for (int i = 0, ties = cut.ties; i < size; ++i) {
        if (p[i] < cut.least || (p[i] == cut.least && ties-- <= 0)) p[i] = 0.0f;
        sum += p[i];
    }
    const float total = static_cast<float>(sum);
    for (int i = 0; i < size; ++i) p[i] /= total;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// argmax of log p + G for each row; p [rows][size], keys [rows][2], out [rows]
void dspark_coupled_argmax(const float* p, int rows, int size, const uint32_t* keys, int64_t* out) {
    for (int r = 0; r < rows; ++r)
        out[r] = coupled_argmax(p + static_cast<int64_t>(r) * size, size, keys[2 * r], keys[2 * r + 1]);
}

// Filters of each row, in place; p [rows][size], top_k [rows] (0: off), top_p and min_p [rows]
void dspark_filter(float* p, int rows, int size, const int32_t* top_k, const double* top_p,
                   const double* min_p) {
    for (int r = 0; r < rows; ++r) filter_row(p + static_cast<int64_t>(r) * size, size, top_k[r], top_p[r], min_p[r]);
}

}  // extern "C"
#pragma GCC visibility pop
