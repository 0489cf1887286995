// Paged attention of a few query rows of one K/V head. Included by isa_*.cpp behind kernels.h.
//
// Keys are taken in chunks at fixed positions, each chunk folded into a running softmax in order. A row that shares a
// call with later rows sees extra keys with weight exactly 0, which changes no bit of its result.

constexpr int kChunk = 256;  // keys a chunk; a multiple of the page
constexpr int kFetch = 8;    // pages that are fetched ahead of their use

struct Query {
    const float* q;  // [head_dim]
    float* out;      // [head_dim]
    int first, end;  // visible keys: [first, end)
};

// Scores of one page: out[r][0 .. 16) = q_r . k, not yet scaled; meanwhile page `later` is fetched.
template <int R>
inline void page_scores(const Query* rows, const uint16_t* keys, const uint16_t* later, int dim, float (*out)[kChunk], int at) {
    constexpr int V = kPage / L;
    F sum[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = Isa::zero();
    for (int d = 0; d < dim; ++d) {
        if (d % 2 == 0) Isa::prefetch(later + d * kPage);
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

// acc[r][d .. d + N * L) += weights[r] . values over `size` keys that start with a page. pages[i] holds the values of
// page i; behind the last come those that are fetched meanwhile, by the first columns for all.
template <int R, int N>
inline void add_columns(float (*weights)[kChunk], const uint16_t* const* pages, int dim, int size, float* const* acc, int d) {
    F sum[R][N];
DSPARK_UNROLL(4)
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) sum[r][n] = Isa::load(acc[r] + d + n * L);
    for (int from = 0; from < size; from += kPage) {
        const uint16_t* value = pages[from / kPage] + d;
        const uint16_t* later = pages[from / kPage + kFetch];
        const int count = std::min(kPage, size - from);
        for (int i = 0; i < count; ++i, value += dim) {
            if (d == 0)
                for (int line = 0; line < dim; line += 32) Isa::prefetch(later + i * dim + line);
            F v[N];
            for (int n = 0; n < N; ++n) v[n] = Isa::load_bf16(value + n * L);
DSPARK_UNROLL(4)
            for (int r = 0; r < R; ++r) {
                const F w = Isa::broadcast(weights[r] + from + i);
                for (int n = 0; n < N; ++n) sum[r][n] = Isa::fma(v[n], w, sum[r][n]);
            }
        }
    }
DSPARK_UNROLL(4)
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) Isa::store(acc[r] + d + n * L, sum[r][n]);
}

template <int R>
inline void add_values(float (*weights)[kChunk], const uint16_t* const* pages, int dim, int size, float* const* acc) {
    constexpr int kWide = Isa::kRegisters >= 32 || R <= 2 ? 4 : R == 3 ? 3 : 2;
    int d = 0;
    for (; d + kWide * L <= dim; d += kWide * L) add_columns<R, kWide>(weights, pages, dim, size, acc, d);
    for (; d + 2 * L <= dim; d += 2 * L) add_columns<R, 2>(weights, pages, dim, size, acc, d);
    for (; d < dim; d += L) add_columns<R, 1>(weights, pages, dim, size, acc, d);
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
        // The chunk's pages in the order of their use, and those of the next chunk that are fetched meanwhile: contexts
        // lie scattered, so no hardware foresees them.
        const int count = padded / kPage, page = from / kPage;
        const int more = std::min(kFetch, (end - from - size + kPage - 1) / kPage);
        const uint16_t* stream[2 * kChunk / kPage + kFetch];
        for (int i = 0; i < count; ++i) {
            stream[i] = model.key_page(layer, pages[page + i]) + head * head_stride;
            stream[count + i] = model.value_page(layer, pages[page + i]) + head * head_stride;
        }
        for (int i = 0; i < kFetch; ++i)
            stream[2 * count + i] = i < more ? model.key_page(layer, pages[page + count + i]) + head * head_stride
                                             : stream[2 * count - 1];
        for (int i = 0; i < count; ++i) page_scores<R>(rows, stream[i], stream[i + kFetch], dim, weights, i * kPage);
        for (int r = 0; r < R; ++r) {
            float shrink;
            const float sum = weigh(weights[r], from, padded, rows[r], scale, top[r], shrink);
            total[r] = total[r] * shrink + sum;
            if (shrink != 1.0f)
                for (int d = 0; d < dim; d += L) Isa::store(acc[r] + d, Isa::mul(Isa::load(acc[r] + d), Isa::set(shrink)));
        }
        add_values<R>(weights, stream + count, dim, size, acc);
    }
    for (int r = 0; r < R; ++r) {
        const F inverse = Isa::set(1.0f / total[r]);
        for (int d = 0; d < dim; d += L) Isa::store(acc[r] + d, Isa::mul(Isa::load(acc[r] + d), inverse));
    }
}

// Rows that see different keys, in one call. Weight 0 takes a finite key away, but 0 times NaN is NaN; a later row's
// fault is not an earlier one's, so where something came out that is no number, each row is done with its own keys alone.
template <int R>
inline void attend_together(Model& model, int layer, int head, const int32_t* pages, const Query* rows) {
    attend_rows<R>(model, layer, head, pages, rows);
    if (rows[0].first == rows[R - 1].first && rows[0].end == rows[R - 1].end) return;
    F poison = Isa::zero();
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < model.head_dim; d += L) poison = Isa::fma(Isa::load(rows[r].out + d), Isa::zero(), poison);
    if (Isa::reduce_add(poison) == 0.0f) return;
    for (int r = 0; r < R; ++r) attend_rows<1>(model, layer, head, pages, rows + r);
}

// Any number of rows of one K/V head, four at a time; those that see more come later.
[[gnu::noinline]] inline void attend(Model& model, int layer, int head, const int32_t* pages, const Query* rows, int count) {
    int r = 0;
    for (; r + 4 <= count; r += 4) attend_together<4>(model, layer, head, pages, rows + r);
    switch (count - r) {
        case 3: attend_together<3>(model, layer, head, pages, rows + r); break;
        case 2: attend_together<2>(model, layer, head, pages, rows + r); break;
        case 1: attend_rows<1>(model, layer, head, pages, rows + r); break;
        default: break;
    }
}
