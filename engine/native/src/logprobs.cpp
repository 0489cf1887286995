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

constexpr int kBlock = 128, kLanes = 16;

// The largest value of each whole block of kBlock.
DSPARK_CLONES
void block_tops(const float* x, int blocks, float* tops) {
    for (int b = 0; b < blocks; ++b) {
        float most[kLanes];
        std::copy(x + b * kBlock, x + b * kBlock + kLanes, most);
        for (int i = kLanes; i < kBlock; i += kLanes)
            for (int j = 0; j < kLanes; ++j) {
                const float value = x[b * kBlock + i + j];
                most[j] = value > most[j] ? value : most[j];
            }
        tops[b] = *std::max_element(most, most + kLanes);
    }
}

// The `top` largest, best first; of equal ones the lowest ids. tops [size / kBlock] as above.
void likeliest(const float* x, int size, int top, const float* tops, int64_t* ids) {
    const auto better = [x](int64_t a, int64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
    int64_t* const end = ids + top;
    for (int i = 0; i < top; ++i) ids[i] = i;
    std::make_heap(ids, end, better);  // the worst of those kept lies first
    float worst = x[ids[0]];
    for (int i = top; i < size;) {
        const int block = i / kBlock, next = std::min((block + 1) * kBlock, size);
        if (block < size / kBlock && !(tops[block] > worst)) {  // as most blocks, once a few have been seen
            i = next;
            continue;
        }
        for (; i < next; ++i) {
            if (!(x[i] > worst)) continue;
            std::pop_heap(ids, end, better);
            end[-1] = i;
            std::push_heap(ids, end, better);
            worst = x[ids[0]];
        }
    }
    std::sort_heap(ids, end, better);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Of each row [size]: the log probability of its token and its rank, and the `tops` likeliest with theirs.
// own [n], ranks [n] or null; ids, values [n][width], width at least the largest of `tops`, at most `size`.
void dspark_logprobs(const float* const* rows, const int64_t* tokens, const int32_t* tops, int n, int size, int width,
                     double* own, int64_t* ranks, int64_t* ids, double* values) {
    const Kernels& kernels = best_kernels();
    by_rows(n, [&](int i) {
        static thread_local std::vector<float> space;  // of exponentials, then of blocks' tops
        space.resize(size);
        const float* x = rows[i];
        const float top = kernels.row_max(x, size);
        kernels.exponentials(x, size, top, 1.0f, space.data());
        const double total = static_cast<double>(top) + std::log(row_sum(space.data(), size));
        own[i] = x[tokens[i]] - total;
        if (ranks) ranks[i] = 1 + count_above(x, size, x[tokens[i]]);
        if (!tops[i]) return;
        int64_t* best = ids + static_cast<int64_t>(i) * width;
        block_tops(x, size / kBlock, space.data());
        likeliest(x, size, tops[i], space.data(), best);
        for (int j = 0; j < tops[i]; ++j) values[static_cast<int64_t>(i) * width + j] = x[best[j]] - total;
    });
}

}  // extern "C"
#pragma GCC visibility pop
