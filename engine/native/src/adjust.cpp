// What a request changes on its own row of logits, one pass each; as engine/sampling.py does it in torch, bit for bit.
#include <cstdint>
#include <cstring>
#include <limits>

#include "vocabulary.h"

namespace {

// A choice between two floats as one between integers, which compilers turn into vectors where they would else
// keep a branch.
inline float pick(bool which, float yes, float no) {
    uint32_t a, b;
    std::memcpy(&a, &yes, 4);
    std::memcpy(&b, &no, 4);
    const uint32_t mask = 0u - static_cast<uint32_t>(which), bits = (a & mask) | (b & ~mask);
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

DSPARK_CLONES
void penalise(float* x, int size, const int32_t* counts, float frequency, float presence) {
    for (int i = 0; i < size; ++i)
        x[i] -= frequency * static_cast<float>(counts[i]) + pick(counts[i] > 0, presence, 0.0f);
}

DSPARK_CLONES
void repeat(float* x, int size, const uint8_t* seen, float penalty) {
    for (int i = 0; i < size; ++i)
        x[i] = pick(seen[i] != 0, pick(x[i] > 0.0f, x[i] / penalty, x[i] * penalty), x[i]);
}

// What each byte keeps of eight tokens, the lowest bit first.
struct Masks {
    uint32_t keep[256][8];
    Masks() {
        for (int byte = 0; byte < 256; ++byte)
            for (int j = 0; j < 8; ++j) keep[byte][j] = 0u - (byte >> j & 1u);
    }
};

typedef uint32_t Eight __attribute__((vector_size(32)));

DSPARK_CLONES
void allow(float* x, int bytes, const uint8_t* bits, const Masks& masks) {
    const Eight never = Eight{} + 0xff800000u;  // -infinity
    for (int i = 0; i < bytes; ++i) {
        Eight row, keep;
        std::memcpy(&row, x + 8 * i, sizeof row);
        std::memcpy(&keep, masks.keep[bits[i]], sizeof keep);
        row = (row & keep) | (never & ~keep);
        std::memcpy(x + 8 * i, &row, sizeof row);
    }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// x [size] -= frequency * counts + presence * (counts > 0)
void dspark_penalise(float* x, int size, const int32_t* counts, float frequency, float presence) {
    penalise(x, size, counts, frequency, presence);
}

// Where `seen` [size]: a positive x is divided by the penalty, any other multiplied with it.
void dspark_repeat(float* x, int size, const uint8_t* seen, float penalty) { repeat(x, size, seen, penalty); }

// What has no bit in `bits` [size / 8, rounded up] becomes -infinity.
void dspark_allow(float* x, int size, const uint8_t* bits) {
    static const Masks masks;
    allow(x, size / 8, bits, masks);
    for (int i = size / 8 * 8; i < size; ++i)
        if (!(bits[i / 8] >> (i % 8) & 1)) x[i] = -std::numeric_limits<float>::infinity();
}

}  // extern "C"
#pragma GCC visibility pop
