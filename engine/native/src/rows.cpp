// From logits to distributions and draws: what engine/sampling.py defines, for rows of fp32 in memory.
#include <functional>
#include <vector>

#include "vocabulary.h"

using namespace dspark;

namespace {

// ---- filters

// The values of a row that are at least `floor`, in order of their index.
std::vector<float> at_least(const float* p, int size, float floor) {
    std::vector<float> out;
    for (int at = 0; at < size; at += kSumBlock) {
        const int count = std::min(kSumBlock, size - at);
        if (row_max(p + at, count) < floor) continue;
        for (int i = at; i < at + count; ++i)
            if (p[i] >= floor) out.push_back(p[i]);
    }
    return out;
}

// A cut through values in descending order.
struct Cut {
    int kept = 0;        // how many of the largest stay
    float least = 0.0f;  // the smallest of them
    int ties = 0;        // how many values equal to it stay
    double mass = 0.0;
};

// Take values, sorted in descending order, while `goes_on(so far, next)`.
template <class Test>
Cut walk(const std::vector<float>& values, Test goes_on) {
    Cut cut;
    for (const float value : values) {
        if (!goes_on(cut, value)) break;
        cut.ties = cut.kept > 0 && value == cut.least ? cut.ties + 1 : 1;
        cut.least = value;
        cut.mass += value;
        ++cut.kept;
    }
    return cut;
}

// Min-p, then top-k, then top-p, on the largest values of a row of `size`, sorted in descending order. False if the
// cut may lie below them.
bool find_cut(const std::vector<float>& values, int size, int top_k, double top_p, double min_p, Cut& cut) {
    const int seen = static_cast<int>(values.size());
    const bool whole = seen == size;
    cut = Cut{};
    cut.kept = size, cut.mass = 1.0, cut.ties = size;  // least is 0: everything stays
    if (min_p > 0.0) {
        const float floor = static_cast<float>(min_p) * values.front();
        cut = walk(values, [floor](const Cut&, float value) { return value >= floor; });
        if (cut.kept == seen && !whole) return false;
    }
    if (top_k > 0 && top_k < cut.kept) {
        if (top_k >= seen && !whole) return false;
        cut = walk(values, [top_k](const Cut& so_far, float) { return so_far.kept < top_k; });
    }
    if (top_p < 1.0) {
        const double target = top_p * cut.mass;
        const Cut nucleus = walk(
            values, [target](const Cut& so_far, float) { return so_far.kept == 0 || so_far.mass < target; });
        if (nucleus.kept == seen && !whole && nucleus.kept < cut.kept) return false;
        if (nucleus.kept < cut.kept) cut = nucleus;
    }
    return true;
}

DSPARK_CLONES
int drop_below(float* p, int size, float least) {
    int equal = 0;
    for (int i = 0; i < size; ++i) {
        equal += p[i] == least;
        p[i] = p[i] < least ? 0.0f : p[i];
    }
    return equal;
}

void filter_row(float* p, int size, int top_k, double top_p, double min_p) {
    // Few values decide, as a rule: only those not too far below the largest are sorted, more if they do not settle it.
    const float top = row_max(p, size);
    Cut cut;
    for (float share = 1.0f / 128;; share = share > 1e-12f ? share / 128 : 0.0f) {
        std::vector<float> values = at_least(p, size, top * share);
        std::sort(values.begin(), values.end(), std::greater<float>());
        if (find_cut(values, size, top_k, top_p, min_p, cut)) break;
    }
    const int equal = drop_below(p, size, cut.least);
    for (int i = 0, ties = cut.ties; equal > cut.ties && i < size; ++i)
        if (p[i] == cut.least && ties-- <= 0) p[i] = 0.0f;
    row_divide(p, size, static_cast<float>(row_sum(p, size)));
}

// ---- draws

// Inverse CDF: the first token whose cumulative weight exceeds u times the sum; -1 if the sum is 0.
int64_t draw(const float* weights, int size, double u) {
    const int blocks = (size + kSumBlock - 1) / kSumBlock;
    static thread_local std::vector<double> upto;
    upto.resize(blocks);
    double total = 0.0;
    for (int b = 0; b < blocks; ++b)
        upto[b] = total += block_sum(weights + b * kSumBlock, std::min(kSumBlock, size - b * kSumBlock));
    if (!(total > 0.0)) return -1;
    const double target = std::min(u * total, std::nextafter(total, 0.0));
    const int b = static_cast<int>(std::upper_bound(upto.begin(), upto.end(), target) - upto.begin());
    const double rest = target - (b ? upto[b - 1] : 0.0);
    double sum = 0.0;
    int64_t last = -1;  // rounding may leave the target just beyond the block's end
    for (int i = b * kSumBlock; i < std::min((b + 1) * kSumBlock, size); ++i) {
        if (weights[i] <= 0.0f) continue;
        last = i;
        sum += weights[i];
        if (sum > rest) break;
    }
    return last;
}

// What is left of p where the draft's law q was rejected: max(p - q, 0).
DSPARK_CLONES
void residual(const float* p, const float* q, int size, float* out) {
    for (int i = 0; i < size; ++i) {
        const float rest = p[i] - q[i];
        out[i] = rest > 0.0f ? rest : 0.0f;
    }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Argmax (lowest index) and maximum of chosen rows of x [.][size]; the maximum is NaN if the row holds one.
void dspark_peaks(const float* x, const int64_t* rows, int n, int size, int64_t* index, float* top) {
    for (int r = 0; r < n; ++r) {
        const float* row = x + rows[r] * size;
        top[r] = row_max(row, size);
        index[r] = row_find(row, size, top[r]);
    }
}

// Softmax of chosen rows of x [.][size] at a temperature each -> out [n][size]
void dspark_softmax(const float* x, const int64_t* rows, int n, int size, const float* temperatures, float* out) {
    for (int r = 0; r < n; ++r) {
        const float* row = x + rows[r] * size;
        row_softmax(row, size, row_max(row, size), temperatures[r], out + static_cast<int64_t>(r) * size);
    }
}

// Filters of each row, in place; p [rows][size], top_k [rows] (0: off), top_p and min_p [rows]
void dspark_filter(float* p, int rows, int size, const int32_t* top_k, const double* top_p,
                   const double* min_p) {
    for (int r = 0; r < rows; ++r) filter_row(p + static_cast<int64_t>(r) * size, size, top_k[r], top_p[r], min_p[r]);
}

// A draw from each row of p [.][size], less the draft's law where one was rejected: laws[r] points to q [size], or is
// null; tokens[r] is the draft of a one-hot law, or -1. Where nothing is left, p itself is drawn from.
void dspark_draw(const float* p, const int64_t* rows, int n, int size, const double* u, const float* const* laws,
                 const int64_t* tokens, int64_t* out) {
    std::vector<float> rest;
    for (int r = 0; r < n; ++r) {
        const float* row = p + rows[r] * size;
        out[r] = -1;
        if (laws[r] || tokens[r] >= 0) {
            rest.resize(size);
            if (laws[r]) {
                residual(row, laws[r], size, rest.data());
            } else {
                std::copy(row, row + size, rest.begin());
                rest[tokens[r]] = 0.0f;
            }
            out[r] = draw(rest.data(), size, u[r]);
        }
        if (out[r] < 0) out[r] = draw(row, size, u[r]);
    }
}

}  // extern "C"
#pragma GCC visibility pop
