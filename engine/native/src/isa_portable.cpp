// Plain C++: any machine, and what the tests compare the others with.
#include <algorithm>
#include <cmath>

#include "model.h"
#include "vocabulary.h"

#pragma GCC optimize("O2")

namespace dspark {
namespace portable {

struct Isa {
    static constexpr int kLanes = 8;
    static constexpr bool kDotsBf16 = false;  // whether there is a dot_bf16
    static constexpr int kRegisters = 16;
    struct F {
        float v[kLanes];
    };
    struct I {
        int32_t v[kLanes];
    };
    struct Bytes {
        int8_t v[kLanes][4];
    };
    using Q4 = I;
    using Q8 = Bytes;

    template <class Op>
    static F make(Op op) {
        F out;
        for (int i = 0; i < kLanes; ++i) out.v[i] = op(i);
        return out;
    }
    static F zero() { return set(0.0f); }
    static F set(float x) { return make([&](int) { return x; }); }
    static F broadcast(const float* p) { return set(*p); }
    static F load(const float* p) { return make([&](int i) { return p[i]; }); }
    static void store(float* p, F a) { std::memcpy(p, a.v, sizeof(a.v)); }
    static F add(F a, F b) { return make([&](int i) { return a.v[i] + b.v[i]; }); }
    static F sub(F a, F b) { return make([&](int i) { return a.v[i] - b.v[i]; }); }
    static F mul(F a, F b) { return make([&](int i) { return a.v[i] * b.v[i]; }); }
    static F div(F a, F b) { return make([&](int i) { return a.v[i] / b.v[i]; }); }
    static F fma(F a, F b, F c) { return make([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
    static F max(F a, F b) { return make([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }  // of NaN: b
    static F abs(F a) { return make([&](int i) { return std::fabs(a.v[i]); }); }
    static F round(F a) { return make([&](int i) { return std::nearbyint(a.v[i]); }); }
    static F scale_by_power(F a, F n) {  // where n is not finite, a is NaN
        return make([&](int i) { return std::isfinite(n.v[i]) ? std::ldexp(a.v[i], static_cast<int>(n.v[i])) : a.v[i]; });
    }
    static F select_negative(F sign, F below, F above) {
        return make([&](int i) { return sign.v[i] < 0.0f ? below.v[i] : above.v[i]; });
    }
    static unsigned which_at_least(F a, F b) {
        unsigned bits = 0;
        for (int i = 0; i < kLanes; ++i) bits |= static_cast<unsigned>(a.v[i] >= b.v[i]) << i;
        return bits;
    }
    static float reduce_add(F a) {
        float sum = 0.0f;
        for (float x : a.v) sum += x;
        return sum;
    }
    static float reduce_max(F a) { return *std::max_element(a.v, a.v + kLanes); }
    static F load_bf16(const uint16_t* p) { return make([&](int i) { return bf16_to_float(p[i]); }); }
    static F load_half(const uint16_t* p) { return make([&](int i) { return half_to_float(p[i]); }); }
    static void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
        even = make([&](int i) { return bf16_to_float(p[2 * i]); });
        odd = make([&](int i) { return bf16_to_float(p[2 * i + 1]); });
    }
    static void prefetch(const void*) {}

    static I int_zero() { return {}; }
    static Q4 q4_zero() { return {}; }
    static F to_float(I a) { return make([&](int i) { return static_cast<float>(a.v[i]); }); }
    static F q4_total(Q4 a) { return to_float(a); }
    static void load_nibbles(const uint8_t* p, I& low, I& high) {
        for (int i = 0; i < kLanes; ++i) {
            uint32_t word;
            std::memcpy(&word, p + 4 * i, 4);
            low.v[i] = static_cast<int32_t>(word & 0x0f0f0f0f);
            high.v[i] = static_cast<int32_t>((word >> 4) & 0x0f0f0f0f);
        }
    }
    static Q4 q4_dot(Q4 sum, I nibbles, const int8_t* q) {
        for (int i = 0; i < kLanes; ++i)
            for (int j = 0; j < 4; ++j) sum.v[i] += ((nibbles.v[i] >> (8 * j)) & 15) * q[j];
        return sum;
    }
    static Q8 load_q8(const uint8_t* p) {
        Q8 out;
        std::memcpy(out.v, p, sizeof(out.v));
        return out;
    }
    static I q8_dot(I sum, Q8 w, const int8_t* q) {
        for (int i = 0; i < kLanes; ++i)
            for (int j = 0; j < 4; ++j) sum.v[i] += w.v[i][j] * q[j];
        return sum;
    }
    static int quantise_group(const float* x, float inverse, int8_t* out) {
        int total = 0;
        for (int i = 0; i < kGroup; ++i) {
            out[i] = static_cast<int8_t>(std::nearbyint(x[i] * inverse));
            total += out[i];
        }
        return total;
    }
};

#define DSPARK_UNROLL(n)  // left to the compiler, which takes minutes otherwise
#include "kernels.h"
#include "rows.h"
#include "attention.h"
#include "forward.h"
#include "draft.h"

}  // namespace portable

const Kernels kPortable = {
    "portable", portable::Isa::kLanes, [] { return true; },
    portable::forward, portable::context, portable::draft, portable::bare_product, portable::row_max, portable::exponentials, portable::at_least,
};

}  // namespace dspark
