// AVX-512 with VNNI: 16 floats at a time, and integer dot products in one instruction. Included inside a namespace by
// the files that compile it, with BF16 and without.

struct Avx512 {
    static constexpr int kLanes = 16;
    static constexpr bool kDotsBf16 = false;  // whether there is a dot_bf16
    static constexpr int kRegisters = 32;
    using F = __m512;
    using I = __m512i;
    using Q4 = __m512i;
    struct Q8 {
        __m512i sizes;
        __mmask64 negative;
    };

    static F zero() { return _mm512_setzero_ps(); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static F broadcast(const float* p) { return _mm512_set1_ps(*p); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F abs(F a) { return _mm512_abs_ps(a); }
    static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F scale_by_power(F a, F n) { return _mm512_scalef_ps(a, n); }
    static F select_negative(F sign, F below, F above) {
        return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(sign)), above, below);
    }
    static unsigned which_at_least(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
    static float reduce_add(F a) { return _mm512_reduce_add_ps(a); }
    static float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
    static F load_bf16(const uint16_t* p) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static F load_half(const uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
        const __m512i pairs = _mm512_loadu_si512(p);
        even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

    static I int_zero() { return _mm512_setzero_si512(); }
    static Q4 q4_zero() { return _mm512_setzero_si512(); }
    static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
    static F q4_total(Q4 a) { return _mm512_cvtepi32_ps(a); }
    static void load_nibbles(const uint8_t* p, I& low, I& high) {
        const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
        low = _mm512_and_si512(both, mask);
        high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    }
    static __m512i quad(const int8_t* q) {
        int32_t word;
        std::memcpy(&word, q, 4);
        return _mm512_set1_epi32(word);
    }
    static Q4 q4_dot(Q4 sum, I nibbles, const int8_t* q) { return _mm512_dpbusd_epi32(sum, nibbles, quad(q)); }
    // dpbusd wants one unsigned factor: |w|, with the sign of w moved over to q.
    static Q8 load_q8(const uint8_t* p) {
        const __m512i w = _mm512_loadu_si512(p);
        return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
    }
    static I q8_dot(I sum, Q8 w, const int8_t* q) {
        const __m512i plain = quad(q);
        const __m512i turned = _mm512_mask_sub_epi8(plain, w.negative, _mm512_setzero_si512(), plain);
        return _mm512_dpbusd_epi32(sum, w.sizes, turned);
    }
    static int quantise_group(const float* x, float inverse, int8_t* out) {
        const __m512 by = _mm512_set1_ps(inverse);
        const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), by));
        const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), by));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtsepi32_epi8(low));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), _mm512_cvtsepi32_epi8(high));
        return _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
    }
};
