// The sequential head of a draft model. Included by isa_*.cpp behind forward.h.
//
// Slots are decided one after another, all sequences together: the bias of slot k is a function of the token that was
// drawn at slot k - 1 (paper section 3.2).

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

class SequentialHead {
  public:
    SequentialHead(Model& model, DraftSlot* slots, int count, const int32_t* anchors, int sequences, float* logits,
                   const float* hidden, void (*before)(int))
        : m_(model), d_(model.draft), logits_(logits), hidden_(hidden), before_(before),
          previous_(anchors, anchors + sequences),
          state_(d_.kind == DraftParts::kRecurrent ? sequences * d_.rank : 0, 0.0f), rounds_(sequences) {
        std::vector<std::vector<DraftSlot*>> of(sequences);
        for (int i = 0; i < count; ++i) of.at(slots[i].sequence).push_back(&slots[i]);
        for (size_t k = 0;; ++k) {
            std::vector<DraftSlot*> round;
            for (auto& slots_of : of)
                if (k < slots_of.size()) round.push_back(slots_of[k]);
            if (round.empty()) break;
            rounds_.resize(std::max(rounds_.size(), k + 1));
            rounds_[k] = std::move(round);
        }
    }

    void run() {
        int slot = 0;
        for (auto& round : rounds_) {
            if (round.empty()) break;
            if (before_) before_(slot++);
            round_ = &round;
            const int n = static_cast<int>(round.size());
            std::vector<Phase> phases;
            if (d_.kind != DraftParts::kNone || !d_.confidence.empty())
                phases.push_back({n, [this](int i, int) { embed(i); }});
            if (d_.kind != DraftParts::kNone) {
                if (d_.kind != DraftParts::kMarkov) {
                    mixed_.resize(static_cast<size_t>(n) * d_.mix.tiles() * kTile);
                    phases.push_back({d_.mix.tiles(), [this, n](int tile, int) {
                                          const int stride = d_.mix.tiles() * kTile;
                                          product(d_.mix, tile, 1, rows_of(d_.mixed), n, mixed_.data() + tile * kTile,
                                                  stride, d_.mix.stride);
                                      }});
                    phases.push_back({n, [this](int i, int) { mix(i); }});
                }
                phases.push_back({d_.bias.tiles(), [this, n](int tile, int) { add_bias(tile, n); }});
            }
            phases.push_back({n, [this](int i, int) { choose(*(*round_)[i]); }});
            m_.pool->run(phases);
        }
    }

  private:
    DraftSlot& slot(int i) { return *(*round_)[i]; }
    const float* hidden_of(const DraftSlot& s) const { return hidden_ + static_cast<size_t>(s.row) * m_.hidden; }

    // The embedding of the token before the slot; the confidence that depends on it.
    void embed(int i) {
        DraftSlot& s = slot(i);
        const int rank = d_.rank, hidden = m_.hidden;
        std::vector<float> parts(2 * rank + hidden);
        float *before = parts.data(), *e = before + rank, *h = e + rank;
        const uint16_t* row = d_.previous.data() + static_cast<size_t>(previous_[s.sequence]) * rank;  // rank may be 0
        for (int r = 0; r < rank; ++r) e[r] = bf16_to_float(row[r]);
        std::copy(hidden_of(s), hidden_of(s) + hidden, h);
        if (!d_.confidence.empty()) {
            float sum = d_.confidence_bias;
            for (int j = 0; j < hidden; ++j) sum += d_.confidence[j] * h[j];
            for (int r = 0; r < rank; ++r) sum += d_.confidence[hidden + r] * e[r];
            s.confidence = sum;
        }
        if (d_.kind == DraftParts::kNone) return;
        if (d_.kind == DraftParts::kMarkov) {
            hand_over(e, rank, i, d_.bias.format, d_.embedded);
        } else if (d_.kind == DraftParts::kGated) {
            std::rotate(e, h, h + hidden);  // [h; e]
            hand_over(e, rank + hidden, i, d_.mix.format, d_.mixed);
        } else {
            std::copy_n(state_.data() + static_cast<size_t>(s.sequence) * rank, rank, before);  // [s; e; h]
            hand_over(before, 2 * rank + hidden, i, d_.mix.format, d_.mixed);
        }
    }

    // From the gates to what the bias is made of.
    void mix(int i) {
        DraftSlot& s = slot(i);
        const int rank = d_.rank;
        const float* gates = mixed_.data() + static_cast<size_t>(i) * d_.mix.tiles() * kTile;
        std::vector<float> out(rank);
        if (d_.kind == DraftParts::kGated) {
            const uint16_t* row = d_.previous.data() + static_cast<size_t>(previous_[s.sequence]) * rank;
            for (int r = 0; r < rank; ++r) out[r] = sigmoid(gates[r]) * bf16_to_float(row[r]);
        } else {
            float* state = state_.data() + static_cast<size_t>(s.sequence) * rank;
            for (int r = 0; r < rank; ++r) {
                const float keep = sigmoid(gates[r]);
                out[r] = std::tanh(gates[2 * rank + r]);
                state[r] = keep * state[r] + (1.0f - keep) * std::tanh(gates[rank + r]);
            }
        }
        hand_over(out.data(), rank, i, d_.bias.format, d_.embedded);
    }

    void add_bias(int tile, int n) {
        float* sum = scratch(static_cast<size_t>(n) * kTile);
        product(d_.bias, tile, 1, rows_of(d_.embedded), n, sum, kTile, d_.bias.stride * m_.pool->threads());
        const int columns = std::min(kTile, d_.bias.rows - tile * kTile);
        for (int i = 0; i < n; ++i) {
            float* row = logits_ + static_cast<size_t>(slot(i).row) * m_.vocab + tile * kTile;
            for (int c = 0; c < columns; ++c) row[c] += sum[i * kTile + c];
        }
    }

    void choose(DraftSlot& s) {
        const float* x = logits_ + static_cast<size_t>(s.row) * m_.vocab;
        static thread_local std::vector<float> space;
        if (!s.law) space.resize(m_.vocab);
        float* p = s.law ? s.law : space.data();
        const float top = row_max(x, m_.vocab);
        int64_t token = 0;  // a broken row proposes the first token for certain, and the target decides
        if (!std::isfinite(top)) {
            if (s.law) std::fill_n(p, m_.vocab, 0.0f), p[0] = 1.0f;
        } else {
            if (s.kind == 0) {
                token = row_find(x, m_.vocab, top);
            } else {
                exponentials(x, m_.vocab, top, s.temperature, p);
                row_divide(p, m_.vocab, static_cast<float>(row_sum(p, m_.vocab)));
                if (s.top_k > 0 || s.top_p < 1.0 || s.min_p > 0.0) filter_row(p, m_.vocab, s.top_k, s.top_p, s.min_p);
                const int32_t* ids = d_.ids.empty() ? nullptr : d_.ids.data();
                token = s.kind == 2 ? coupled_argmax(p, m_.vocab, s.key0, s.key1, ids) : draw(p, m_.vocab, s.u);
            }
        }
        s.token = d_.ids.empty() ? token : d_.ids[token];
        previous_[s.sequence] = static_cast<int32_t>(s.token);
    }

    Model& m_;
    DraftParts& d_;
    float* logits_;
    const float* hidden_;
    void (*before_)(int);
    std::vector<int32_t> previous_;  // token before the next slot of each sequence
    std::vector<float> state_;       // [sequences][rank] of a recurrent head
    std::vector<float> mixed_;       // gates of this round
    std::vector<std::vector<DraftSlot*>> rounds_;
    const std::vector<DraftSlot*>* round_ = nullptr;
};

inline void draft(Model& model, DraftSlot* slots, int count, const int32_t* anchors, int sequences, float* logits,
                  const float* hidden, void (*before)(int)) {
    SequentialHead(model, slots, count, anchors, sequences, logits, hidden, before).run();
}
