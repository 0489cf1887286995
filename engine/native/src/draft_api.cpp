// The C interface of draft models: a Handle with its own layers and K/V pools, and the target's embedding and head.
#include <algorithm>
#include <stdexcept>

#include "handle.h"

using namespace dspark;

#pragma GCC visibility push(default)
extern "C" {

// Use the embedding of another model, which must live longer, and its head too unless this one has its own.
int dspark_borrow(Handle* h, const Handle* target, int head) {
    return guarded([&] {
        const Model& from = target->model;
        Model& m = h->model;
        if (from.hidden != m.hidden) throw std::invalid_argument("hidden sizes differ");
        if (from.lanes != m.lanes) throw std::invalid_argument("both models must use the same kernels");
        m.embedding = from.embedding;
        m.embedding_format = from.embedding_format;
        if (!head) return;
        if (from.vocab != m.vocab) throw std::invalid_argument("vocabularies differ");
        m.head = from.head;
    });
}

// The sequential head. previous: W1 [tokens][rank] in bf16; confidence [hidden + rank] or null; ids [vocab] or null.
int dspark_set_draft(Handle* h, int kind, int rank, const uint16_t* previous, int tokens, const float* confidence,
                     float confidence_bias, const int32_t* ids) {
    return guarded([&] {
        Model& m = h->model;
        DraftParts& d = m.draft;
        if (kind < 0 || kind > 3) throw std::invalid_argument("unknown sequential head");
        d.kind = kind, d.rank = kind == DraftParts::kNone ? 0 : rank;
        if (d.rank) {
            d.previous.resize(static_cast<size_t>(tokens) * rank);
            std::copy(previous, previous + d.previous.size(), d.previous.data());
        }
        d.confidence.clear();
        if (confidence) d.confidence.assign(confidence, confidence + m.hidden + d.rank);
        d.confidence_bias = confidence_bias;
        d.ids.clear();
        if (ids) d.ids.assign(ids, ids + m.vocab);
    });
}

// K and V of context rows from the target's features [rows of all spans][fuse.cols], for every layer.
int dspark_context(Handle* h, int span_count, const int32_t* spans, const int32_t* pages, const float* features) {
    return guarded([&] {
        Model& m = h->model;
        Batch batch = latch(m, span_count, spans, pages);
        reserve(m, batch.rows);
        m.draft.fused.reserve(batch.rows, m.draft.fuse.cols);
        h->kernels->context(m, batch, features);
    });
}

// Tokens of drafted blocks: slots [count], anchors [sequences]; logits [.][vocab] are corrected in place.
// `before`, if not null, is called ahead of every slot, in this thread.
int dspark_draft(Handle* h, DraftSlot* slots, int count, const int32_t* anchors, int sequences, float* logits,
                 const float* hidden, void (*before)(int)) {
    return guarded([&] {
        DraftParts& d = h->model.draft;
        if (d.kind != DraftParts::kNone) d.embedded.reserve(sequences, d.rank);
        if (d.kind == DraftParts::kGated || d.kind == DraftParts::kRecurrent) d.mixed.reserve(sequences, d.mix.cols);
        h->kernels->draft(h->model, slots, count, anchors, sequences, logits, hidden, before);
    });
}

}  // extern "C"
#pragma GCC visibility pop
