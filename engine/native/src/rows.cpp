// From a row of logits to a token: what engine/sampling.py, engine/draws.py and engine/decision.py define.
#include <algorithm>
#include <cmath>
#include <vector>

#include "model.h"
#include "vocabulary.h"

namespace dspark {

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

}  // namespace dspark

using namespace dspark;

namespace {

// What is left of p where the draft's law q was rejected: max(p - q, 0).
DSPARK_CLONES
void residual(const float* p, const float* q, int size, float* out) {
    for (int i = 0; i < size; ++i) {
        const float rest = p[i] - q[i];
        out[i] = rest > 0.0f ? rest : 0.0f;
    }
}

// The same where q is over these ids alone, and out is p.
void residual_of(const float* q, const int64_t* ids, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) {
        const float rest = out[ids[i]] - q[i];
        out[ids[i]] = rest > 0.0f ? rest : 0.0f;
    }
}

// What is to be decided on a row, and what was. The same as Choice in engine/native/rows.py.
struct Choice {
    int64_t row;
    int64_t draft;     // the token that was drafted here, or -1
    const float* law;  // the draft's law [law_size]; null if it is one-hot
    const int64_t* ids;  // target ids of a law over fewer tokens; null if it is over all
    int64_t law_size;
    double accept_u, final_u;
    double top_p, min_p;
    float temperature;
    int32_t top_k;
    int32_t kind;  // 0 greedy, 1 rejection sampling, 2 coupled
    uint32_t key0, key1;
    int32_t accepted;  // out
    int64_t token;     // out; -1 if the row holds no distribution
};

// The chance by which its own law proposed the draft.
double proposed(const Choice& c) {
    if (!c.law) return 1.0;
    if (!c.ids) return c.law[c.draft];
    const int64_t* found = std::find(c.ids, c.ids + c.law_size, c.draft);
    return found == c.ids + c.law_size ? 0.0 : c.law[found - c.ids];
}

void decide(const float* x, int size, Choice& c) {
    static thread_local std::vector<float> law, rest;
    const Kernels& kernels = best_kernels();
    const float top = kernels.row_max(x, size);
    c.token = -1, c.accepted = 0;
    if (!std::isfinite(top)) return;
    if (c.kind == 0) {
        c.token = row_find(x, size, top);
        c.accepted = c.token == c.draft;
        return;
    }
    law.resize(size);
    float* p = law.data();
    kernels.exponentials(x, size, top, c.temperature, p);
    row_divide(p, size, static_cast<float>(row_sum(p, size)));
    if (c.top_k > 0 || c.top_p < 1.0 || c.min_p > 0.0) filter_row(p, size, c.top_k, c.top_p, c.min_p);
    if (c.kind == 2) {
        c.token = coupled_argmax(p, size, c.key0, c.key1);
        c.accepted = c.token == c.draft;
        return;
    }
    if (c.draft >= 0) {
        if (c.accept_u * proposed(c) < p[c.draft]) {
            c.token = c.draft, c.accepted = 1;
            return;
        }
        rest.resize(size);
        if (c.law && !c.ids) {
            residual(p, c.law, size, rest.data());
        } else {
            std::copy(p, p + size, rest.begin());
            if (c.law) residual_of(c.law, c.ids, c.law_size, rest.data());
            else rest[c.draft] = 0.0f;
        }
        c.token = draw(rest.data(), size, c.final_u);
    }
    // No draft, or rounding rejected where p equals q and left nothing: p itself is right.
    if (c.token < 0) c.token = draw(p, size, c.final_u);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Softmax of chosen rows of x [.][size] at a temperature each -> out [n][size]
void dspark_softmax(const float* x, const int64_t* rows, int n, int size, const float* temperatures, float* out) {
    const Kernels& kernels = best_kernels();
    by_rows(n, [&](int r) {
        const float* row = x + rows[r] * size;
        float* p = out + static_cast<int64_t>(r) * size;
        kernels.exponentials(row, size, kernels.row_max(row, size), temperatures[r], p);
        row_divide(p, size, static_cast<float>(row_sum(p, size)));
    });
}

// Decide runs of so many choices, each up to the first that is not its draft, as engine/decision.py says, over
// x [.][size].
void dspark_decide(const float* x, int size, Choice* choices, const int32_t* sizes, int runs) {
    std::vector<Choice*> first(runs);
    for (int r = 0; r < runs; ++r) first[r] = r ? first[r - 1] + sizes[r - 1] : choices;
    by_rows(runs, [&](int r) {
        for (int i = 0; i < sizes[r]; ++i) {
            Choice& c = first[r][i];
            decide(x + c.row * size, size, c);
            if (!c.accepted) return;
        }
    });
}

}  // extern "C"
#pragma GCC visibility pop
