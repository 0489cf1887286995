// AVX-512 (F, BW, DQ, VL) with VNNI.
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
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")

namespace dspark {
namespace avx512 {

#include "isa_avx512.h"

using Isa = Avx512;

#define DSPARK_PRAGMA(text) _Pragma(#text)
#define DSPARK_UNROLL(n) DSPARK_PRAGMA(GCC unroll n)
#include "kernels.h"
#include "rows.h"
#include "attention.h"
#include "forward.h"
#include "draft.h"

}  // namespace avx512

#pragma GCC pop_options

namespace {
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
}  // namespace

const Kernels kAvx512 = {
    "avx512", avx512::Isa::kLanes, has_avx512,
    avx512::forward, avx512::context, avx512::draft, avx512::bare_product, avx512::row_max, avx512::exponentials, avx512::at_least,
};

}  // namespace dspark
#endif
