#include "operators.h"
#include "bf16_dots.h"

namespace octavo {

const Kernels* avx512_bf16_kernels() {
    static constexpr Kernels kernels = {"avx512_bf16", rms_norm, add, gated_activation, rope,
                                        dots_prepare_row, dots_product, write_kv, dots_attention, merge_parts,
                                        maxima, maxima_wide, weigh, weigh_wide};
    return &kernels;
}

}  // namespace octavo
