// From a checkpoint's rows to the layouts that the kernels read. Runs once, at load.
#include <stdexcept>

#include "model.h"

namespace dspark {

namespace {

// GGUF blocks of 32 weights: q4_0 {half d; nibbles[16]}, q4_1 {half d, m; nibbles[16]}, q8_0 {half d; int8[32]}.
// Nibble i of a q4 block holds weight i (low) and i + 16 (high).
size_t block_bytes(Format format) {
    switch (format) {
        case Format::kQ4_0: return 18;
        case Format::kQ4_1: return 20;
        case Format::kQ8_0: return 34;
        default: throw std::invalid_argument("bf16 has no blocks");
    }
}

uint16_t load_half(const uint8_t* p) {
    uint16_t value;
    std::memcpy(&value, p, 2);
    return value;
}

}  // namespace

size_t row_bytes(Format format, int cols) {
    return format == Format::kBf16 ? static_cast<size_t>(cols) * 2 : cols / kGroup * block_bytes(format);
}

void unpack_row(Format format, const uint8_t* row, int cols, float* out) {
    if (format == Format::kBf16) {
        for (int i = 0; i < cols; ++i) out[i] = bf16_to_float(load_half(row + 2 * i));
        return;
    }
    const size_t size = block_bytes(format);
    for (int g = 0; g < cols / kGroup; ++g, row += size, out += kGroup) {
        const float d = half_to_float(load_half(row));
        if (format == Format::kQ8_0) {
            for (int i = 0; i < kGroup; ++i) out[i] = d * static_cast<int8_t>(row[2 + i]);
            continue;
        }
        const bool with_minimum = format == Format::kQ4_1;
        const float m = with_minimum ? half_to_float(load_half(row + 2)) : -8.0f * d;
        const uint8_t* nibbles = row + (with_minimum ? 4 : 2);
        for (int i = 0; i < 16; ++i) {
            out[i] = d * (nibbles[i] & 15) + m;
            out[i + 16] = d * (nibbles[i] >> 4) + m;
        }
    }
}

Matrix pack(Format format, const uint8_t* rows, int count, int cols, int lanes, uint8_t* out, size_t stride) {
    if (cols % kGroup) throw std::invalid_argument("the inner size of a matrix must be a multiple of 32");
    Matrix matrix;
    matrix.format = format;
    matrix.rows = count;
    matrix.cols = cols;
    matrix.weights = out;
    matrix.stride = stride;
    const bool bf16 = format == Format::kBf16, with_minimum = format == Format::kQ4_1;
    const int width = bf16 ? 2 * lanes : lanes, quads = format == Format::kQ8_0 ? 8 : 4;
    const size_t row_stride = row_bytes(format, cols), whole = group_bytes(format) / (kTile / width);
    for (int n = 0; n < count; ++n) {
        const uint8_t* row = rows + n * row_stride;
        const int strand = n % kTile / width, lane = n % width;
        uint8_t* group = out + n / kTile * stride + strand * matrix.groups() * whole;
        for (int g = 0; g < matrix.groups(); ++g, group += whole) {
            if (bf16) {
                auto* words = reinterpret_cast<uint16_t*>(group);
                for (int k = 0; k < kGroup; ++k)
                    words[(k / 2 * width + lane) * 2 + k % 2] = load_half(row + 2 * (g * kGroup + k));
                continue;
            }
            const uint8_t* source = row + g * block_bytes(format);
            const uint8_t* data = source + (with_minimum ? 4 : 2);
            for (int i = 0; i < quads * 4; ++i) group[(i / 4 * lanes + lane) * 4 + i % 4] = data[i];
            auto* scales = reinterpret_cast<uint16_t*>(group + quads * 4 * lanes);
            scales[lane] = load_half(source);
            if (with_minimum) scales[lanes + lane] = load_half(source + 2);
        }
    }
    return matrix;
}

}  // namespace dspark
