// What a model is to the kernels: packed matrices, sizes, and the K/V pools. Knows no instruction set.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "pool.h"

namespace dspark {

constexpr int kPage = 16;    // tokens a page
constexpr int kGroup = 32;   // weights that share a scale, and activations too
constexpr int kMaxLanes = 16;

enum class Format : int { kBf16 = 0, kQ4_0 = 1, kQ4_1 = 2, kQ8_0 = 3 };

inline bool quantised(Format format) { return format != Format::kBf16; }

// Zeroed memory from the system, page by page as it is touched: a big K/V pool costs nothing until it is used.
template <class T>
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t count) { resize(count); }
    ~Buffer() { release(); }
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    // What it held is lost.
    void resize(size_t count) {
        release();
        if (count == 0) return;
        void* memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        madvise(memory, count * sizeof(T), MADV_HUGEPAGE);
#endif
        data_ = static_cast<T*>(memory);
        size_ = count;
    }
    T* data() { return data_; }
    const T* data() const { return data_; }
    size_t size() const { return size_; }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }

  private:
    void release() {
        if (data_) munmap(data_, size_ * sizeof(T));
        data_ = nullptr;
        size_ = 0;
    }
    T* data_ = nullptr;
    size_t size_ = 0;
};

// A weight matrix [rows, cols] (out x in), rows padded to whole blocks of `lanes`, packed so that one load fetches the
// same columns of `lanes` rows. Layouts, for block b of `lanes` rows:
//   bf16  [b][col / 2][lane][2]                      two neighbouring columns in one 32-bit lane
//   q4    [b][group][4][lane][4] bytes               byte i of quad j: column 4j + i (low nibble), 16 + 4j + i (high)
//   q8    [b][group][8][lane][4] bytes               byte i of quad j: column 4j + i, signed
// q4 and q8 have a scale (fp16) [b][group][lane], q4_1 a minimum as well. q4_0 is q4_1 with minimum -8 * scale.
struct Matrix {
    Format format = Format::kBf16;
    int rows = 0, cols = 0, lanes = 8;
    Buffer<uint8_t> weights;
    Buffer<uint16_t> scales, minima;
    Buffer<float> bias;  // [padded rows], empty if none

    bool empty() const { return rows == 0; }
    int blocks() const { return (rows + lanes - 1) / lanes; }
    int groups() const { return cols / kGroup; }
};

// Rows of activations [n, cols]: fp32 for bf16 weights; int8 with a scale a group of 32 for quantised ones.
struct Activations {
    int cols = 0;
    Buffer<float> values;
    Buffer<int8_t> quants;
    Buffer<float> scales;  // [n][cols / 32]
    Buffer<float> sums;    // [n][cols / 32]: scale * sum of the group's quants

    void resize(size_t rows, int columns) {
        cols = columns;
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

struct Model {
    int vocab = 0, hidden = 0, intermediate = 0, heads = 0, kv_heads = 0, head_dim = 0;
    float eps = 0.0f;
    std::vector<Layer> layers;
    std::vector<float> final_norm;
    Matrix head;
    // Embedding rows as they are in the checkpoint: bf16, or blocks of the format.
    Format embedding_format = Format::kBf16;
    Buffer<uint8_t> embedding;
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
    std::unique_ptr<Pool> pool;
    int lanes = 8;
};

// One sequence of a batch: `count` rows from position `start` on, its first row at `row` of the batch.
struct Span {
    int row, count, start;
    const int32_t* pages;
};

struct Batch {
    int rows = 0;
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
// Pack rows in checkpoint form (bf16, or GGUF blocks, which keep their values and scales).
Matrix pack(Format format, const uint8_t* rows, int count, int cols, int lanes);

// ---- one forward pass, one per instruction set

struct Kernels {
    const char* name;
    int lanes;
    bool (*supported)();
    void (*forward)(Model&, Batch&);
    // out[n][rows] = activations x matrix; the product alone, for tests and for draft models
    void (*product)(Pool&, const Matrix&, const float* x, int n, float* out);
};

extern const Kernels kPortable;
#if defined(DSPARK_X86)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace dspark
