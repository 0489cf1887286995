// AVX2 with FMA and F16C: 8 floats at a time.
#include <algorithm>
#include <cmath>
#include <functional>
#include <thread>
#include <vector>

#include "model.h"
#include "vocabulary.h"

#if defined(DSPARK_X86)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace dspark {
namespace avx2 {

struct Isa {
    static constexpr int kLanes = 8;
    static constexpr bool kDotsBf16 = false;  // whether there is a dot_bf16
    static constexpr int kRegisters = 16;
    using F = __m256;
    using I = __m256i;
    using Q4 = __m256i;  // 16 sums of 16 bits: 8 pairs of u4 * s8 stay below 8 * 2 * 15 * 127 = 30480
    struct Q8 {
        __m256i signs, sizes;
    };

    static F zero() { return _mm256_setzero_ps(); }
    static F set(float x) { return _mm256_set1_ps(x); }
    static F broadcast(const float* p) { return _mm256_broadcast_ss(p); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // a * 2^n for whole n in [-126, 127]
    static F scale_by_power(F a, F n) {
        const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
    }
    static F select_negative(F sign, F below, F above) { return _mm256_blendv_ps(above, below, sign); }
    static unsigned which_at_least(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
    static float reduce_add(F a) {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
    static float reduce_max(F a) {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }
    static F load_bf16(const uint16_t* p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    static F load_half(const uint16_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

    static I int_zero() { return _mm256_setzero_si256(); }
    static Q4 q4_zero() { return _mm256_setzero_si256(); }
    static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
    static F q4_total(Q4 a) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(a, _mm256_set1_epi16(1))); }
    static void load_nibbles(const uint8_t* p, I& low, I& high) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), mask = _mm256_set1_epi8(15);
        low = _mm256_and_si256(both, mask);
        high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    }
    static __m256i quad(const int8_t* q) {
        int32_t word;
        std::memcpy(&word, q, 4);
        return _mm256_set1_epi32(word);
    }
    static Q4 q4_dot(Q4 sum, I nibbles, const int8_t* q) {
        return _mm256_add_epi16(sum, _mm256_maddubs_epi16(nibbles, quad(q)));
    }
    static Q8 load_q8(const uint8_t* p) {
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return {w, _mm256_abs_epi8(w)};
    }
    // |w| * sign(w) q: both factors are at most 127 (128 only for |w|, unsigned), so pairs fit in 16 bits.
    static I q8_dot(I sum, Q8 w, const int8_t* q) {
        const __m256i pairs = _mm256_maddubs_epi16(w.sizes, _mm256_sign_epi8(quad(q), w.signs));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    static int quantise_group(const float* x, float inverse, int8_t* out) {
        const __m256 by = _mm256_set1_ps(inverse);
        __m256i part[4];
        for (int i = 0; i < 4; ++i) part[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), by));
        const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(part[0], part[1]), _mm256_add_epi32(part[2], part[3]));
        // Packing works on 128-bit halves; the permutation puts the 32 bytes back in order.
        const __m256i words0 = _mm256_packs_epi32(part[0], part[1]), words1 = _mm256_packs_epi32(part[2], part[3]);
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words0, words1),
                                                          _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
        __m128i total = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        total = _mm_add_epi32(total, _mm_shuffle_epi32(total, 0x4e));
        total = _mm_add_epi32(total, _mm_shuffle_epi32(total, 0xb1));
        return _mm_cvtsi128_si32(total);
    }
};

#define DSPARK_PRAGMA(text) _Pragma(#text)
#define DSPARK_UNROLL(n) DSPARK_PRAGMA(GCC unroll n)
#include "kernels.h"
#include "rows.h"
#include "attention.h"
#include "forward.h"
#include "draft.h"

}  // namespace avx2

#pragma GCC pop_options

namespace {
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
}  // namespace

const Kernels kAvx2 = {
    "avx2", avx2::Isa::kLanes, has_avx2,
    avx2::forward, avx2::context, avx2::draft, avx2::bare_product, avx2::row_max, avx2::exponentials, avx2::at_least,
};

}  // namespace dspark
#endif
