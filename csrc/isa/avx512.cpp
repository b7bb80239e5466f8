#include "operators.h"

namespace octavo {

const Kernels* avx512_kernels() {
    static constexpr Kernels kernels = {"avx512", rms_norm, add, gated_activation, rope, quantize_row,
                                        group_product, bf16_product, write_kv, attention};
    return &kernels;
}

}  // namespace octavo
