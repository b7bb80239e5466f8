#include "operators.h"

namespace octavo {

const Kernels* generic_kernels() {
    static constexpr Kernels kernels = {"generic", rms_norm, add, gated_activation, rope, quantize_row,
                                        group_product, bf16_product, write_kv, attention};
    return &kernels;
}

}  // namespace octavo
