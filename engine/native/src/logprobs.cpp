// What the model says of a token and of the likeliest ones: what engine/logprobs.py defines.
#include <algorithm>
#include <cmath>
#include <vector>

#include "model.h"
#include "vocabulary.h"

using namespace dspark;

namespace {

DSPARK_CLONES
int64_t count_above(const float* x, int size, float value) {
    int count = 0;
    for (int i = 0; i < size; ++i) count += x[i] > value;
    return count;
}

// The `top` largest, best first; of equal ones the lowest ids.
void likeliest(const float* x, int size, int top, int64_t* ids) {
    const auto better = [x](int64_t a, int64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
    int64_t* const end = ids + top;
    for (int i = 0; i < top; ++i) ids[i] = i;
    std::make_heap(ids, end, better);  // the worst of those kept lies first
    float worst = x[ids[0]];
    for (int i = top; i < size; ++i) {
        if (!(x[i] > worst)) continue;
        std::pop_heap(ids, end, better);
        end[-1] = i;
        std::push_heap(ids, end, better);
        worst = x[ids[0]];
    }
    std::sort_heap(ids, end, better);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Of each row [size]: the log probability of its token and its rank, and the `tops` likeliest with theirs.
// own, ranks [n]; ids, values [n][width], width at least the largest of `tops`, which is at most `size`.
void dspark_logprobs(const float* const* rows, const int64_t* tokens, const int32_t* tops, int n, int size, int width,
                     double* own, int64_t* ranks, int64_t* ids, double* values) {
    const Kernels& kernels = best_kernels();
    by_rows(n, [&](int i) {
        static thread_local std::vector<float> space;
        space.resize(size);
        const float* x = rows[i];
        const float top = kernels.row_max(x, size);
        kernels.exponentials(x, size, top, 1.0f, space.data());
        const double total = static_cast<double>(top) + std::log(row_sum(space.data(), size));
        own[i] = x[tokens[i]] - total;
        ranks[i] = 1 + count_above(x, size, x[tokens[i]]);
        if (!tops[i]) return;
        int64_t* best = ids + static_cast<int64_t>(i) * width;
        likeliest(x, size, tops[i], best);
        for (int j = 0; j < tops[i]; ++j) values[static_cast<int64_t>(i) * width + j] = x[best[j]] - total;
    });
}

}  // extern "C"
#pragma GCC visibility pop
