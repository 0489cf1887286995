// The library's C interface, called through ctypes (which releases the interpreter lock for the call).
//
// Functions that can fail return 0, or -1 with a message in dspark_error().
#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>

#include "handle.h"

namespace dspark {

std::string& last_error() {
    static thread_local std::string text;
    return text;
}

Batch latch(const Model& m, int span_count, const int32_t* spans, const int32_t* pages) {
    Batch batch;
    for (int s = 0; s < span_count; ++s) {
        const int count = spans[3 * s], start = spans[3 * s + 1];
        if (start + count > m.positions) throw std::out_of_range("position beyond the rotary table");
        batch.spans.push_back({batch.rows, count, start, pages + spans[3 * s + 2]});
        for (int i = 0; i < count; ++i) {
            batch.position.push_back(start + i);
            batch.span_of.push_back(s);
        }
        batch.rows += count;
    }
    return batch;
}

void reserve(Model& m, int rows) {
    if (rows <= m.capacity) return;
    const size_t n = static_cast<size_t>(std::max(rows, 2 * m.capacity));
    m.x.resize(n * m.hidden);
    m.q.resize(n * m.heads * m.head_dim);
    m.attended.resize(n * m.heads * m.head_dim);
    m.narrow.resize(n, m.hidden);
    m.wide.resize(n, m.intermediate);
    m.attention_out.resize(n, m.heads * m.head_dim);
    m.capacity = static_cast<int>(n);
}

namespace {

Format format_of(int code) {
    if (code < 0 || code > 3) throw std::invalid_argument("unknown weight format");
    return static_cast<Format>(code);
}

Matrix& matrix_of(Model& m, int layer, int which) {
    if (layer == kHead) return m.head;
    if (layer == kDraft) {
        Matrix* const parts[] = {&m.draft.fuse, &m.draft.bias, &m.draft.mix};
        if (which < 0 || which > 2) throw std::invalid_argument("unknown matrix");
        return *parts[which];
    }
    Layer& l = m.layers.at(layer);
    Matrix* const all[] = {&l.q, &l.k, &l.v, &l.output, &l.gate, &l.up, &l.down};
    if (which < 0 || which > 6) throw std::invalid_argument("unknown matrix");
    return *all[which];
}

// Memory for a matrix, and the distance of its tiles. Tiles of gate and up, which are worked on in pairs, alternate.
std::pair<uint8_t*, size_t> place(Model& m, int layer, int which, Format format, int count, int cols) {
    const size_t bytes = cols / kGroup * group_bytes(format), tiles = (count + kTile - 1) / kTile;
    constexpr int kGate = 4, kUp = 5;
    if (layer >= 0 && which == kGate) return {m.arena.take(2 * bytes * tiles), 2 * bytes};
    if (layer >= 0 && which == kUp) {
        const Matrix& gate = m.layers.at(layer).gate;
        if (gate.format == format && gate.rows == count && gate.cols == cols)
            return {const_cast<uint8_t*>(gate.weights) + bytes, 2 * bytes};
    }
    return {m.arena.take(bytes * tiles), bytes};
}

}  // namespace
}  // namespace dspark

using namespace dspark;

#pragma GCC visibility push(default)
extern "C" {

const char* dspark_error() { return last_error().c_str(); }

// Names of the kernels that this machine runs, best first, separated by spaces.
const char* dspark_supported() {
    static const std::string names = [] {
        std::string out;
        for (const Kernels* kernels : usable()) out += (out.empty() ? "" : " ") + std::string(kernels->name);
        return out;
    }();
    return names.c_str();
}

// sizes: vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, positions, pages, threads
Handle* dspark_create(const char* kernels, const int32_t* sizes, float eps, const float* rope) {
    Handle* handle = nullptr;
    guarded([&] {
        auto made = std::make_unique<Handle>();
        made->kernels = &find_kernels(kernels);
        Model& m = made->model;
        m.vocab = sizes[0], m.hidden = sizes[1], m.intermediate = sizes[2];
        m.layers.resize(sizes[3]);
        m.heads = sizes[4], m.kv_heads = sizes[5], m.head_dim = sizes[6];
        m.positions = sizes[7], m.num_pages = sizes[8], m.eps = eps;
        m.lanes = made->kernels->lanes;
        if (m.head_dim % 32 || m.hidden % 32 || m.intermediate % 32)
            throw std::invalid_argument("head, hidden and intermediate sizes must be multiples of 32");
        if (m.heads % m.kv_heads) throw std::invalid_argument("heads must be a multiple of kv heads");
        m.rope.resize(static_cast<size_t>(m.positions) * m.head_dim);
        std::copy(rope, rope + m.rope.size(), m.rope.data());
        const size_t pool = m.layers.size() * m.num_pages * m.page_stride();
        m.keys.resize(pool);
        m.values.resize(pool);
        m.pool = team(std::max(1, sizes[9]));
        handle = made.release();
    });
    return handle;
}

void dspark_destroy(Handle* handle) { delete handle; }

int dspark_set_matrix(Handle* h, int layer, int which, int format, const uint8_t* rows, int count, int cols,
                      const float* bias) {
    return guarded([&] {
        Model& m = h->model;
        const Format kind = format_of(format);
        const auto [memory, stride] = place(m, layer, which, kind, count, cols);
        Matrix packed = pack(kind, rows, count, cols, m.lanes, memory, stride);
        if (bias) {
            packed.bias.resize(static_cast<size_t>(packed.tiles()) * kTile);
            std::copy(bias, bias + count, packed.bias.data());
        }
        matrix_of(m, layer, which) = std::move(packed);
    });
}

int dspark_set_embedding(Handle* h, int format, const uint8_t* rows) {
    return guarded([&] {
        Model& m = h->model;
        m.embedding_format = format_of(format);
        m.own_embedding.resize(row_bytes(m.embedding_format, m.hidden) * m.vocab);
        std::copy(rows, rows + m.own_embedding.size(), m.own_embedding.data());
        m.embedding = m.own_embedding.data();
    });
}

// which: 0 input, 1 mlp, 2 q, 3 k of a layer; layer -1 is the final norm, layer -2 that of a draft model's features
int dspark_set_norm(Handle* h, int layer, int which, const float* weight, int size) {
    return guarded([&] {
        std::vector<float> values(weight, weight + size);
        if (layer < 0) {
            (layer == kHead ? h->model.final_norm : h->model.draft.fuse_norm) = std::move(values);
            return;
        }
        Layer& l = h->model.layers.at(layer);
        std::vector<float>* const all[] = {&l.input_norm, &l.mlp_norm, &l.q_norm, &l.k_norm};
        if (which < 0 || which > 3) throw std::invalid_argument("unknown norm");
        *all[which] = std::move(values);
    });
}

int dspark_set_layer(Handle* h, int layer, int window, int rotate) {
    return guarded([&] {
        h->model.layers.at(layer).window = window;
        h->model.layers.at(layer).rotate = rotate != 0;
    });
}

// spans: [n][3] = rows, start position, offset into `pages`; tokens: [rows of all spans]. Without `causal`, the rows of
// a span see all of it. hidden [logit_count][hidden], if not null: what the head sees.
int dspark_forward(Handle* h, int span_count, const int32_t* spans, const int32_t* pages, const int32_t* tokens,
                   int logit_count, const int32_t* logit_rows, float* logits, int feature_count,
                   const int32_t* feature_layers, float* features, int causal, float* hidden) {
    return guarded([&] {
        Batch batch = latch(h->model, span_count, spans, pages);
        batch.tokens = tokens, batch.causal = causal != 0;
        batch.logit_rows = logit_rows, batch.logit_count = logit_count, batch.logits = logits, batch.hidden = hidden;
        batch.feature_layers = feature_layers, batch.feature_count = feature_count, batch.features = features;
        reserve(h->model, batch.rows);
        h->kernels->forward(h->model, batch);
    });
}

// A product alone: x [n][cols] -> out [n][rows of the matrix].
int dspark_product(Handle* h, int layer, int which, const float* x, int n, float* out) {
    return guarded([&] { h->kernels->product(*h->model.pool, matrix_of(h->model, layer, which), x, n, out); });
}

}  // extern "C"
#pragma GCC visibility pop
