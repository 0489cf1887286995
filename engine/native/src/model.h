// What a model is to the kernels: packed matrices, sizes, and the K/V pools. Knows no instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "pool.h"

namespace dspark {

constexpr int kPage = 16;    // tokens a page
constexpr int kGroup = 32;   // weights that share a scale, and activations too
constexpr int kTile = 32;    // rows of a weight matrix that are worked on at a time
constexpr int kStrip = 4;    // rows of activations that lie together
constexpr int kMaxLanes = 16;

enum class Format : int { kBf16 = 0, kQ4_0 = 1, kQ4_1 = 2, kQ8_0 = 3 };

inline bool quantised(Format format) { return format != Format::kBf16; }

// Bytes of 32 rows x 32 columns, scales included.
inline size_t group_bytes(Format format) {
    switch (format) {
        case Format::kQ4_0: return 18 * kTile;
        case Format::kQ4_1: return 20 * kTile;
        case Format::kQ8_0: return 34 * kTile;
        default: return 64 * kTile;
    }
}

// A weight matrix [rows, cols] (out x in) in tiles of 32 rows. A tile consists of strands, each of as many rows as a
// kernel takes in one pass (two vectors for bf16, one else) and read from front to back:
//   bf16  [group of 32 columns][col / 2][2 * lanes rows][2]            two neighbouring columns in one 32-bit lane
//   q4    [group]{[4][lanes][4] bytes, scales[lanes], minima[lanes]}   byte i of quad j: column 4j + i (low nibble) and
//                                                                      16 + 4j + i (high)
//   q8    [group]{[8][lanes][4] bytes, scales[lanes]}                  byte i of quad j: column 4j + i, signed
// Scales and minima are fp16; q4_0 has no minima (they are -8 * scale). Rows are padded with zeros to a whole tile.
struct Matrix {
    Format format = Format::kBf16;
    int rows = 0, cols = 0;
    const uint8_t* weights = nullptr;
    size_t stride = 0;        // bytes from one tile to the next
    std::vector<float> bias;  // [padded rows], empty if none

    bool empty() const { return rows == 0; }
    int tiles() const { return (rows + kTile - 1) / kTile; }
    int groups() const { return cols / kGroup; }
    const uint8_t* tile(int index) const { return weights + index * stride; }
};

// Rows of activations [n, cols]: fp32 for bf16 weights; int8 with a scale a group of 32 for quantised ones. The latter
// lie in strips of four rows, so that a kernel that works on four rows follows one pointer.
struct Activations {
    int cols = 0;
    Buffer<float> values;   // [n][cols]; kernels with dot products of bf16 keep bf16 in the same place
    Buffer<int8_t> quants;  // [n / 4][group][4][32]
    Buffer<float> scales;   // [n / 4][group][4]
    Buffer<float> sums;     // [n / 4][group][4]: scale * sum of the group's quants

    int capacity = 0;

    // Room for so many rows; what was there is lost.
    void reserve(int rows, int columns) {
        if (rows > capacity || columns != cols) resize(std::max(rows, 2 * capacity), columns);
    }
    void resize(size_t rows, int columns) {
        cols = columns;
        capacity = static_cast<int>(rows);
        rows = (rows + kStrip - 1) / kStrip * kStrip;
        values.resize(rows * columns);
        quants.resize(rows * columns);
        scales.resize(rows * (columns / kGroup));
        sums.resize(rows * (columns / kGroup));
    }
};

struct Layer {
    std::vector<float> input_norm, mlp_norm, q_norm, k_norm;  // q_norm and k_norm may be empty
    Matrix q, k, v, output, gate, up, down;
    int window = 0;      // keys a query sees, 0: all
    bool rotate = true;  // whether q and k are rotated
};

// What a draft model has beside its layers. Row k of a block gets from the head, on top of its logits, a bias that
// depends on the token before it (paper eq. 5 and 6; the gated head exists in DeepSpec's code only).
struct DraftParts {
    enum Kind { kNone = 0, kMarkov = 1, kGated = 2, kRecurrent = 3 };

    Matrix fuse;  // features of the target -> hidden
    std::vector<float> fuse_norm;
    int kind = kNone, rank = 0;
    Buffer<uint16_t> previous;      // W1 [target vocabulary][rank], bf16
    Matrix bias;                    // W2 [vocabulary][rank]
    Matrix mix;                     // gated [rank][hidden + rank], recurrent [3 rank][2 rank + hidden], with bias
    std::vector<float> confidence;  // [hidden + rank], empty if there is no such head
    float confidence_bias = 0.0f;
    std::vector<int32_t> ids;  // target ids of a reduced vocabulary, else empty

    Activations fused, embedded, mixed;  // scratch: inputs of fuse, bias and mix
};

// One row of a drafted block: how its token is chosen, and what was. The same as Slot in engine/native/draft.py.
struct DraftSlot {
    int32_t row;       // of logits and hidden
    int32_t sequence;  // slots of a sequence come in order
    float temperature;
    int32_t kind;  // as in Choice: 0 greedy, 1 by `u`, 2 coupled under the key
    double top_p, min_p, u;
    int32_t top_k;
    uint32_t key0, key1;
    float confidence;  // out: raw logit, 0 without such a head
    float* law;        // out: q [vocabulary], where not null
    int64_t token;     // out: a target id
};

struct Model {
    int vocab = 0, hidden = 0, intermediate = 0, heads = 0, kv_heads = 0, head_dim = 0;
    float eps = 0.0f;
    Arena arena;  // the matrices
    std::vector<Layer> layers;
    std::vector<float> final_norm;
    Matrix head;
    // Embedding rows as they are in the checkpoint: bf16, or blocks of the format.
    Format embedding_format = Format::kBf16;
    const uint8_t* embedding = nullptr;
    Buffer<uint8_t> own_embedding;  // unless it is another model's
    DraftParts draft;
    Buffer<float> rope;  // [positions][2][head_dim / 2]: cosines, then sines
    int positions = 0;

    // K [layer][page][kv head][head_dim][16] and V [layer][page][kv head][16][head_dim], bf16.
    int num_pages = 0;
    Buffer<uint16_t> keys, values;
    size_t page_stride() const { return static_cast<size_t>(kv_heads) * head_dim * kPage; }
    uint16_t* key_page(int layer, int page) {
        return keys.data() + (static_cast<size_t>(layer) * num_pages + page) * page_stride();
    }
    uint16_t* value_page(int layer, int page) {
        return values.data() + (static_cast<size_t>(layer) * num_pages + page) * page_stride();
    }

    // Scratch for `capacity` rows.
    int capacity = 0;
    Buffer<float> x, q, attended;  // residual stream, queries, attention output
    Activations narrow, wide;      // inputs of width hidden, and of width intermediate
    Activations attention_out;     // of width heads * head_dim
    std::shared_ptr<Pool> pool;
    int lanes = 8;
};

// One sequence of a batch: `count` rows from position `start` on, its first row at `row` of the batch.
struct Span {
    int row, count, start;
    const int32_t* pages;
};

struct Batch {
    int rows = 0;
    bool causal = true;  // else every row of a span sees the whole span
    const int32_t* tokens = nullptr;
    std::vector<Span> spans;
    std::vector<int32_t> position;  // [rows]
    std::vector<int32_t> span_of;   // [rows]
    const int32_t* logit_rows = nullptr;
    int logit_count = 0;
    float* logits = nullptr;  // [logit_count][vocab]
    const int32_t* feature_layers = nullptr;
    int feature_count = 0;
    float* features = nullptr;  // [rows][feature_count * hidden]
    float* hidden = nullptr;    // [logit_count][hidden]: what the head sees, or null
};

inline float bf16_to_float(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// Round to nearest, ties to even.
inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);  // NaN stays NaN
    bits += 0x7fff + ((bits >> 16) & 1);
    return static_cast<uint16_t>(bits >> 16);
}

// IEEE half to float, without instructions that old CPUs lack.
inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 0x1f, mantissa = half & 0x3ff;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | (mantissa << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else {  // subnormal: exact in float
        float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// ---- packing (pack.cpp)

// Bytes of one row of `cols` weights in its checkpoint form.
size_t row_bytes(Format format, int cols);
// Dequantise one row to floats.
void unpack_row(Format format, const uint8_t* row, int cols, float* out);
// Pack rows in checkpoint form (bf16, or GGUF blocks, which keep their values and scales) into zeroed memory,
// `stride` bytes from tile to tile.
Matrix pack(Format format, const uint8_t* rows, int count, int cols, int lanes, uint8_t* out, size_t stride);

// ---- one forward pass, one per instruction set

struct Kernels {
    const char* name;
    int lanes;
    bool (*supported)();
    void (*forward)(Model&, Batch&);
    // K and V of context rows from the target's features [rows][fuse.cols], for every layer
    void (*context)(Model&, Batch&, const float* features);
    // Tokens of drafted blocks, slot after slot; logits [.][vocab] are corrected in place, anchors [sequences]
    // `before`, if there is one, is told of each slot ahead of it: what was drawn before may change its logits.
    void (*draft)(Model&, DraftSlot*, int count, const int32_t* anchors, int sequences, float* logits,
                  const float* hidden, void (*before)(int slot));
    // out[n][rows] = activations x matrix; the product alone, for tests and for draft models
    void (*product)(Pool&, const Matrix&, const float* x, int n, float* out);
    // rows.h
    float (*row_max)(const float* x, int size);
    void (*exponentials)(const float* x, int size, float top, float temperature, float* out);
    int (*at_least)(const float* x, int size, float floor, float* out);
};

// Kernels that this machine runs, best first; the best, to which row work goes; and those of a name.
const std::vector<const Kernels*>& usable();
const Kernels& best_kernels();
const Kernels& find_kernels(const std::string& name);

extern const Kernels kPortable;
#if defined(DSPARK_X86)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;
#endif

}  // namespace dspark
