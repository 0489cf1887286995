// AVX-512 (F, BW, DQ, VL) with VNNI and BF16: products with bf16 weights round their activations to bf16 as well.
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
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")

namespace dspark {
namespace avx512bf16 {

#include "isa_avx512.h"

struct Isa : Avx512 {
    static constexpr bool kDotsBf16 = true;
    // sum + the products of two neighbouring columns of 16 weight rows with one row's activations
    static F dot_bf16(F sum, const uint8_t* weights, const uint16_t* x) {
        const __m512i pairs = _mm512_loadu_si512(weights);
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(pairs),
                                reinterpret_cast<__m512bh>(quad(reinterpret_cast<const int8_t*>(x))));
    }
};

#define DSPARK_PRAGMA(text) _Pragma(#text)
#define DSPARK_UNROLL(n) DSPARK_PRAGMA(GCC unroll n)
#include "kernels.h"
#include "rows.h"
#include "attention.h"
#include "forward.h"
#include "draft.h"

}  // namespace avx512bf16

#pragma GCC pop_options

namespace {
bool has_avx512bf16() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
}  // namespace

const Kernels kAvx512Bf16 = {
    "avx512bf16", avx512bf16::Isa::kLanes, has_avx512bf16,
    avx512bf16::forward, avx512bf16::context, avx512bf16::draft, avx512bf16::bare_product, avx512bf16::row_max, avx512bf16::exponentials, avx512bf16::at_least,
};

}  // namespace dspark
#endif
