// The phases of one forward pass. Included by isa_*.cpp behind attention.h; read it top to bottom.
//
// Per layer: norm, q/k/v (rotated and written to their pages head by head), attention, output, norm, gate and up,
// down. Each phase is cut into tiles that any thread may take.

constexpr int kHeadTiles = 2;  // weight tiles that a thread takes at a time from the head
constexpr int kRowTile = 4;    // rows of a tile that works row by row
constexpr int kTokenTile = 4;  // query tokens of an attention tile

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Thread-private space, grown on demand and kept.
inline float* scratch(size_t floats) {
    thread_local Buffer<float> space;
    if (space.size() < floats) space.resize(floats);
    return space.data();
}

class Pass {
  public:
    Pass(Model& model, Batch& batch) : m_(model), b_(batch) {}

    std::vector<Phase> phases() {
        std::vector<Phase> out;
        out.reserve(m_.layers.size() * 8 + 4);
        by_rows(out, b_.rows, [this](int row) { embed(row); });
        feature(out, -1);
        for (int i = 0; i < static_cast<int>(m_.layers.size()); ++i) {
            const Layer& layer = m_.layers[i];
            by_rows(out, b_.rows, [this, &layer](int row) {
                norm(row, layer.input_norm, m_.x.data() + static_cast<size_t>(row) * m_.hidden, layer.q.format);
            });
            out.push_back({m_.heads + 2 * m_.kv_heads, [this, &layer, i](int tile, int) { project(layer, i, tile); }});
            attention(out, layer, i);
            add_to_stream(out, layer.output, m_.attention_out);
            by_rows(out, b_.rows, [this, &layer](int row) {
                norm(row, layer.mlp_norm, m_.x.data() + static_cast<size_t>(row) * m_.hidden, layer.gate.format);
            });
            out.push_back({layer.gate.tiles(), [this, &layer](int tile, int) { activate(layer, tile); }});
            add_to_stream(out, layer.down, m_.wide);
            feature(out, i);
        }
        by_rows(out, b_.logit_count, [this](int row) {
            norm(row, m_.final_norm, m_.x.data() + static_cast<size_t>(b_.logit_rows[row]) * m_.hidden, m_.head.format,
                 b_.hidden ? b_.hidden + static_cast<size_t>(row) * m_.hidden : nullptr);
        });
        if (b_.logit_count)
            out.push_back({ceil_div(m_.head.tiles(), kHeadTiles), [this](int tile, int) { logits(tile); }});
        return out;
    }

    // K and V of context rows for every layer at once: they depend on the fused features alone.
    std::vector<Phase> context_phases(const float* features) {
        DraftParts& draft = m_.draft;
        const int width = draft.fuse.cols;
        std::vector<Phase> out;
        by_rows(out, b_.rows, [this, &draft, features, width](int row) {
            hand_over(features + static_cast<size_t>(row) * width, width, row, draft.fuse.format, draft.fused);
        });
        std::memset(m_.x.data(), 0, sizeof(float) * b_.rows * m_.hidden);
        add_to_stream(out, draft.fuse, draft.fused);
        by_rows(out, b_.rows, [this, &draft](int row) {
            norm(row, draft.fuse_norm, m_.x.data() + static_cast<size_t>(row) * m_.hidden, m_.layers[0].k.format);
        });
        const int each = 2 * m_.kv_heads;
        out.push_back({static_cast<int>(m_.layers.size()) * each, [this, each](int tile, int) {
                           project(m_.layers[tile / each], tile / each, m_.heads + tile % each);
                       }});
        return out;
    }

  private:
    template <class Work>
    void by_rows(std::vector<Phase>& out, int rows, Work work) {
        if (rows == 0) return;
        out.push_back({ceil_div(rows, kRowTile), [rows, work](int tile, int) {
                           for (int r = tile * kRowTile; r < std::min(rows, (tile + 1) * kRowTile); ++r) work(r);
                       }});
    }

    void embed(int row) {
        const size_t stride = row_bytes(m_.embedding_format, m_.hidden);
        const uint8_t* source = m_.embedding + b_.tokens[row] * stride;
        unpack_row(m_.embedding_format, source, m_.hidden, m_.x.data() + static_cast<size_t>(row) * m_.hidden);
    }

    void norm(int row, const std::vector<float>& weight, const float* x, Format format, float* normed = nullptr) {
        if (!normed) normed = scratch(m_.hidden);
        rms_norm(x, weight.data(), m_.hidden, m_.eps, normed);
        hand_over(normed, m_.hidden, row, format, m_.narrow);
    }

    // One head of q, k or v for all rows: product, norm, rotation; k and v go to their pages.
    void project(const Layer& layer, int index, int tile) {
        const int dim = m_.head_dim, half = dim / 2;
        const bool is_q = tile < m_.heads, is_k = !is_q && tile < m_.heads + m_.kv_heads;
        const int head = is_q ? tile : is_k ? tile - m_.heads : tile - m_.heads - m_.kv_heads;
        const Matrix& w = is_q ? layer.q : is_k ? layer.k : layer.v;
        const std::vector<float>& weight = is_q ? layer.q_norm : layer.k_norm;
        float* out = scratch(static_cast<size_t>(b_.rows) * dim);
        product(w, head * dim / kTile, dim / kTile, rows_of(m_.narrow), b_.rows, out, dim, ahead(w, dim / kTile));
        for (int r = 0; r < b_.rows; ++r) {
            float* x = out + static_cast<size_t>(r) * dim;
            if (is_q || is_k) {
                if (!weight.empty()) rms_norm(x, weight.data(), dim, m_.eps, x);
                if (layer.rotate) rotate(x, m_.rope.data() + static_cast<size_t>(b_.position[r]) * dim, half);
            }
            if (is_q) {
                std::memcpy(m_.q.data() + (static_cast<size_t>(r) * m_.heads + head) * dim, x, sizeof(float) * dim);
                continue;
            }
            const int slot = b_.position[r] % kPage;
            const int page = b_.spans[b_.span_of[r]].pages[b_.position[r] / kPage];
            const size_t at = static_cast<size_t>(head) * dim * kPage;
            if (is_k) {
                uint16_t* keys = m_.key_page(index, page) + at;
                for (int d = 0; d < dim; ++d) keys[d * kPage + slot] = float_to_bf16(x[d]);
            } else {
                uint16_t* values = m_.value_page(index, page) + at + static_cast<size_t>(slot) * dim;
                for (int d = 0; d < dim; ++d) values[d] = float_to_bf16(x[d]);
            }
        }
    }

    void attention(std::vector<Phase>& out, const Layer& layer, int index) {
        if (pieces_.empty())
            for (int s = 0; s < static_cast<int>(b_.spans.size()); ++s)
                for (int t = 0; t < b_.spans[s].count; t += kTokenTile) pieces_.push_back({s, t});
        out.push_back({static_cast<int>(pieces_.size()) * m_.kv_heads, [this, &layer, index](int tile, int) {
                           // Long contexts sit at the end of a batch as often as at its start; taking pieces from the
                           // back first costs nothing, and keeps a prefill's expensive last rows from coming last.
                           const int piece = static_cast<int>(pieces_.size()) - 1 - tile / m_.kv_heads;
                           attend_piece(layer, index, pieces_[piece], tile % m_.kv_heads);
                       }});
    }

    struct Piece {
        int span, offset;
    };

    void attend_piece(const Layer& layer, int index, Piece piece, int head) {
        const Span& span = b_.spans[piece.span];
        const int group = m_.heads / m_.kv_heads, dim = m_.head_dim;
        const int tokens = std::min(kTokenTile, span.count - piece.offset);
        std::vector<Query>& rows = queries();
        rows.clear();
        for (int t = 0; t < tokens; ++t) {
            const int row = span.row + piece.offset + t;
            const int end = b_.causal ? b_.position[row] + 1 : span.start + span.count;
            // A block that sees itself whole has `window` tokens of context before it.
            const int from = b_.causal ? end - layer.window : span.start - layer.window;
            const int first = layer.window ? std::max(0, from) : 0;
            for (int g = 0; g < group; ++g) {
                const size_t at = (static_cast<size_t>(row) * m_.heads + head * group + g) * dim;
                rows.push_back({m_.q.data() + at, m_.attended.data() + at, first, end});
            }
        }
        attend(m_, index, head, span.pages, rows.data(), static_cast<int>(rows.size()));
        const int width = m_.heads * dim;
        for (int t = 0; t < tokens; ++t) {
            const int row = span.row + piece.offset + t, column = head * group * dim;
            hand_over_part(m_.attended.data() + static_cast<size_t>(row) * width + column, group * dim, row, column,
                           layer.output.format, m_.attention_out);
        }
    }

    static std::vector<Query>& queries() {
        thread_local std::vector<Query> rows;
        return rows;
    }

    // x += activations x w
    void add_to_stream(std::vector<Phase>& out, const Matrix& w, const Activations& from) {
        out.push_back({w.tiles(), [this, &w, &from](int tile, int) {
                           float* sum = scratch(static_cast<size_t>(b_.rows) * kTile);
                           product(w, tile, 1, rows_of(from), b_.rows, sum, kTile, ahead(w, 1));
                           for (int r = 0; r < b_.rows; ++r) {
                               float* x = m_.x.data() + static_cast<size_t>(r) * m_.hidden + tile * kTile;
                               for (int i = 0; i < kTile; i += L)
                                   Isa::store(x + i, Isa::add(Isa::load(x + i), Isa::load(sum + r * kTile + i)));
                           }
                       }});
    }

    // 32 columns of silu(gate) * up for all rows
    void activate(const Layer& layer, int tile) {
        float* gate = scratch(static_cast<size_t>(b_.rows) * kTile * 2);
        float* up = gate + static_cast<size_t>(b_.rows) * kTile;
        product(layer.gate, tile, 1, rows_of(m_.narrow), b_.rows, gate, kTile, ahead(layer.gate, 1));
        product(layer.up, tile, 1, rows_of(m_.narrow), b_.rows, up, kTile, ahead(layer.up, 1));
        silu_times(gate, up, b_.rows * kTile);
        for (int r = 0; r < b_.rows; ++r)
            hand_over_part(gate + r * kTile, kTile, r, tile * kTile, layer.down.format, m_.wide);
    }

    void logits(int tile) {
        constexpr int kColumns = kHeadTiles * kTile;
        const int count = std::min(kHeadTiles, m_.head.tiles() - tile * kHeadTiles), begin = tile * kColumns;
        const int columns = std::min(kColumns, m_.vocab - begin);
        float* sum = scratch(static_cast<size_t>(b_.logit_count) * kColumns);
        product(m_.head, tile * kHeadTiles, count, rows_of(m_.narrow), b_.logit_count, sum, kColumns,
                ahead(m_.head, kHeadTiles));
        for (int r = 0; r < b_.logit_count; ++r)
            std::memcpy(b_.logits + static_cast<size_t>(r) * m_.vocab + begin, sum + r * kColumns, sizeof(float) * columns);
    }

    // Copy the residual stream out if layer `index` is among the features.
    void feature(std::vector<Phase>& out, int index) {
        for (int f = 0; f < b_.feature_count; ++f) {
            if (b_.feature_layers[f] != index) continue;
            by_rows(out, b_.rows, [this, f](int row) {
                std::memcpy(b_.features + (static_cast<size_t>(row) * b_.feature_count + f) * m_.hidden,
                            m_.x.data() + static_cast<size_t>(row) * m_.hidden, sizeof(float) * m_.hidden);
            });
        }
    }

    // Threads take tiles in turn, and matrices lie in memory in the order of their use: what this thread will work on
    // next is most likely this far behind what it works on now.
    size_t ahead(const Matrix& w, int tiles) const { return w.stride * tiles * m_.pool->threads(); }

    Model& m_;
    Batch& b_;
    std::vector<Piece> pieces_;
};

inline void forward(Model& model, Batch& batch) {
    Pass pass(model, batch);
    model.pool->run(pass.phases());
}

inline void context(Model& model, Batch& batch, const float* features) {
    Pass pass(model, batch);
    model.pool->run(pass.context_phases(features));
}

inline void bare_product(Pool& pool, const Matrix& w, const float* x, int n, float* out) {
    Activations rows;
    rows.resize(n, w.cols);
    for (int r = 0; r < n; ++r) hand_over(x + static_cast<size_t>(r) * w.cols, w.cols, r, w.format, rows);
    std::vector<Phase> phases;
    phases.push_back({w.tiles(), [&](int tile, int) {
                          float* sum = scratch(static_cast<size_t>(n) * kTile);
                          product(w, tile, 1, rows_of(rows), n, sum, kTile, w.stride * pool.threads());
                          const int columns = std::min(kTile, w.rows - tile * kTile);
                          for (int r = 0; r < n; ++r)
                              std::memcpy(out + static_cast<size_t>(r) * w.rows + tile * kTile, sum + r * kTile,
                                          sizeof(float) * columns);
                      }});
    pool.run(phases);
}
