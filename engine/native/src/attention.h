// Paged attention of a few query rows of one K/V head. Included by isa_*.cpp behind kernels.h.
//
// Keys are taken in chunks at fixed positions, each chunk folded into a running softmax in order. A row that shares a
// call with later rows sees extra keys with weight exactly 0, which changes no bit of its result.

constexpr int kChunk = 256;  // keys a chunk; a multiple of the page

struct Query {
    const float* q;  // [head_dim]
    float* out;      // [head_dim]
    int first, end;  // visible keys: [first, end)
};

// Scores of one page: out[r][0 .. 16) = q_r . k, not yet scaled.
template <int R>
inline void page_scores(const Query* rows, const uint16_t* keys, int dim, float (*out)[kChunk], int at) {
    constexpr int V = kPage / L;
    F sum[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = Isa::zero();
    for (int d = 0; d < dim; ++d) {
        F k[V];
        for (int v = 0; v < V; ++v) k[v] = Isa::load_bf16(keys + d * kPage + v * L);
DSPARK_UNROLL(4)
        for (int r = 0; r < R; ++r) {
            const F q = Isa::broadcast(rows[r].q + d);
            for (int v = 0; v < V; ++v) sum[r][v] = Isa::fma(k[v], q, sum[r][v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) Isa::store(out[r] + at + v * L, sum[r][v]);
}

// Turn a row's scores of keys [from, from + size) into weights, in place; returns their sum and moves `top`.
// Invisible keys get weight 0. `shrink` is what earlier sums must be multiplied by.
inline float weigh(float* scores, int from, int size, const Query& row, float scale, float& top, float& shrink) {
    const int first = std::max(row.first - from, 0), end = std::min(row.end - from, size);
    shrink = 1.0f;
    if (first >= end) {
        std::fill(scores, scores + size, 0.0f);
        return 0.0f;
    }
    std::fill(scores, scores + first, -INFINITY);
    std::fill(scores + end, scores + size, -INFINITY);
    F most = Isa::set(-INFINITY);
    for (int i = 0; i < size; i += L) most = Isa::max(most, Isa::load(scores + i));
    const float now = std::max(top, Isa::reduce_max(most) * scale);
    if (top > -INFINITY) {
        float gap[kMaxLanes];
        Isa::store(gap, exponential(Isa::set(top - now)));
        shrink = gap[0];
    }
    top = now;
    F total = Isa::zero();
    for (int i = 0; i < size; i += L) {
        const F e = exponential(Isa::sub(Isa::mul(Isa::load(scores + i), Isa::set(scale)), Isa::set(now)));
        Isa::store(scores + i, e);
    }
    std::fill(scores, scores + first, 0.0f);
    std::fill(scores + end, scores + size, 0.0f);
    for (int i = 0; i < size; i += L) total = Isa::add(total, Isa::load(scores + i));
    return Isa::reduce_add(total);
}

// acc[r] += weights[r] . values over `size` keys from position `from` (the start of a page) on.
template <int R>
inline void add_values(float (*weights)[kChunk], const Model& model, int layer, int head, const int32_t* pages, int from,
                       int size, float* const* acc) {
    const int dim = model.head_dim;
    const size_t head_stride = static_cast<size_t>(dim) * kPage;
    Model& m = const_cast<Model&>(model);
    int d = 0;
    for (; d + 2 * L <= dim; d += 2 * L) {
        F sum[R][2];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < 2; ++v) sum[r][v] = Isa::load(acc[r] + d + v * L);
        for (int i = 0; i < size; ++i) {
            const uint16_t* value = m.value_page(layer, pages[(from + i) / kPage]) + head * head_stride +
                                    static_cast<size_t>(i % kPage) * dim + d;
            const F v0 = Isa::load_bf16(value), v1 = Isa::load_bf16(value + L);
DSPARK_UNROLL(4)
            for (int r = 0; r < R; ++r) {
                const F w = Isa::broadcast(weights[r] + i);
                sum[r][0] = Isa::fma(v0, w, sum[r][0]);
                sum[r][1] = Isa::fma(v1, w, sum[r][1]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < 2; ++v) Isa::store(acc[r] + d + v * L, sum[r][v]);
    }
    for (; d < dim; d += L) {
        for (int r = 0; r < R; ++r) {
            F sum = Isa::load(acc[r] + d);
            for (int i = 0; i < size; ++i) {
                const uint16_t* value = m.value_page(layer, pages[(from + i) / kPage]) + head * head_stride +
                                        static_cast<size_t>(i % kPage) * dim + d;
                sum = Isa::fma(Isa::load_bf16(value), Isa::broadcast(weights[r] + i), sum);
            }
            Isa::store(acc[r] + d, sum);
        }
    }
}

template <int R>
inline void attend_rows(Model& model, int layer, int head, const int32_t* pages, const Query* rows) {
    const int dim = model.head_dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const size_t head_stride = static_cast<size_t>(dim) * kPage;
    alignas(64) float weights[R][kChunk];
    float* acc[R];
    float top[R], total[R];
    int first = rows[0].first, end = rows[0].end;
    for (int r = 0; r < R; ++r) {
        acc[r] = rows[r].out;
        std::fill(acc[r], acc[r] + dim, 0.0f);
        top[r] = -INFINITY;
        total[r] = 0.0f;
        first = std::min(first, rows[r].first);
        end = std::max(end, rows[r].end);
    }
    for (int from = first / kChunk * kChunk; from < end; from += kChunk) {
        const int size = std::min(kChunk, end - from), padded = (size + kPage - 1) / kPage * kPage;
        for (int i = 0; i < padded; i += kPage) {
            const uint16_t* keys = model.key_page(layer, pages[(from + i) / kPage]) + head * head_stride;
            page_scores<R>(rows, keys, dim, weights, i);
        }
        for (int r = 0; r < R; ++r) {
            float shrink;
            const float sum = weigh(weights[r], from, padded, rows[r], scale, top[r], shrink);
            total[r] = total[r] * shrink + sum;
            if (shrink != 1.0f)
                for (int d = 0; d < dim; d += L) Isa::store(acc[r] + d, Isa::mul(Isa::load(acc[r] + d), Isa::set(shrink)));
        }
        add_values<R>(weights, model, layer, head, pages, from, size, acc);
    }
    for (int r = 0; r < R; ++r) {
        const F inverse = Isa::set(1.0f / total[r]);
        for (int d = 0; d < dim; d += L) Isa::store(acc[r] + d, Isa::mul(Isa::load(acc[r] + d), inverse));
    }
}

// Any number of rows of one K/V head, four at a time.
[[gnu::noinline]] inline void attend(Model& model, int layer, int head, const int32_t* pages, const Query* rows, int count) {
    int r = 0;
    for (; r + 4 <= count; r += 4) attend_rows<4>(model, layer, head, pages, rows + r);
    switch (count - r) {
        case 3: attend_rows<3>(model, layer, head, pages, rows + r); break;
        case 2: attend_rows<2>(model, layer, head, pages, rows + r); break;
        case 1: attend_rows<1>(model, layer, head, pages, rows + r); break;
        default: break;
    }
}
